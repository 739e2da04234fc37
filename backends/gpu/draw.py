"""One step's draw on a device: its arguments uploaded, its results fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace.backends.gpu.kernels import Draw
from headrace.backends.gpu.sampling_arguments import pack_sampling
from headrace.types import SamplingBatch, StepResult, TokenMasks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def upload_draw(
    sampling: SamplingBatch, masks: TokenMasks | None, vocab_size: int, device: torch.device
) -> Draw:
    """Pack the batch's sampling parameters and make room for the results."""
    packed = pack_sampling(sampling, masks, vocab_size)
    num_rows = len(packed.seeds)
    most = max(1, packed.most_logprobs)

    def up(array: NDArray[Any]) -> torch.Tensor:
        return torch.tensor(array, device=device)

    def room(*shape: int, fill: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, fill, dtype=dtype, device=device)

    return Draw(
        floats=up(packed.floats),
        ints=up(packed.ints),
        seeds=up(packed.seeds.view("int64")),
        positions=up(packed.positions),
        history_ids=up(packed.history_ids),
        history_counts=up(packed.history_counts),
        bias_ids=up(packed.bias_ids),
        bias_values=up(packed.bias_values),
        masks=up(packed.masks),
        adjusts=packed.adjusts,
        filters_by_count=packed.filters_by_count,
        filters_by_mass=packed.filters_by_mass,
        most_logprobs=packed.most_logprobs,
        token_ids=room(num_rows, fill=0, dtype=torch.int32),
        failed=room(num_rows, fill=0, dtype=torch.int32),
        logprobs=room(num_rows, fill=0, dtype=torch.float32),
        top_token_ids=room(num_rows, most, fill=-1, dtype=torch.int32),
        top_logprobs=room(num_rows, most, fill=0, dtype=torch.float32),
    )


def fetch_result(draw: Draw) -> StepResult:
    """Wait for the draw and return what it gave."""

    def down(tensor: torch.Tensor) -> NDArray[Any]:
        array: NDArray[Any] = tensor.cpu().numpy()
        return array

    token_ids, failed = down(draw.token_ids), down(draw.failed) != 0
    if draw.most_logprobs < 0:
        return StepResult(token_ids, None, None, None, failed)
    top_ids: NDArray[np.int32] = down(draw.top_token_ids)[:, : draw.most_logprobs]
    top = down(draw.top_logprobs)[:, : draw.most_logprobs]
    return StepResult(token_ids, down(draw.logprobs), top_ids, top, failed)
