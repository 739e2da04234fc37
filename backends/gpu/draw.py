"""One step's draw on a device: its arguments uploaded, its results fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace.backends.gpu.kernels import Draw
from headrace.backends.gpu.sampling_arguments import pack_sampling
from headrace.types import SamplingBatch, StepResult, TokenMasks

if TYPE_CHECKING:
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


class Fetch:
    """A draw's results on their way to the host: later work on the stream is not waited for."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._event: torch.cuda.Event | None = None
        wanted = [draw.token_ids, draw.failed]
        if draw.most_logprobs >= 0:
            wanted += [draw.logprobs, draw.top_token_ids, draw.top_logprobs]
        self._host = wanted
        if draw.token_ids.is_cuda:
            self._host = [
                torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in wanted
            ]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def result(self) -> StepResult:
        """Wait for this draw and return what it gave."""
        if self._event is not None:
            self._event.synchronize()
        arrays: list[NDArray[Any]] = [tensor.numpy().copy() for tensor in self._host]
        token_ids, failed = arrays[0], arrays[1] != 0
        if self._draw.most_logprobs < 0:
            return StepResult(token_ids, None, None, None, failed)
        most = self._draw.most_logprobs
        return StepResult(token_ids, arrays[2], arrays[3][:, :most], arrays[4][:, :most], failed)


def fetch_result(draw: Draw) -> StepResult:
    """Wait for the draw and return what it gave."""
    return Fetch(draw).result()
