"""A model served end to end: greedy text beside the CPU backend's, and what a decode step takes."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from gpu_check.stage import Stage, checkpoint_of

NEAR_TIE = 0.15
"""Log probabilities: where two texts part, the CPU's of the two tokens differ by less. bf16 activations move a
logit of SmolLM2 by 0.02 (standard deviation, from the divergence of 0.00024 in docs/performance.md)."""
NUM_ALTERNATIVES = 20
PROMPTS = (
    "The capital of France is",
    "A water mill works by",
    "Once upon a time, in a village by a river,",
    "def fibonacci(n):",
    "The three laws of motion say that",
    "Water boils at",
)


def check_text(stage: Stage) -> None:
    """Generate for several prompts in one batch on the backend and on the CPU, and compare."""
    prompts = PROMPTS[: stage.sizes.num_prompts]
    expected = _generate(stage, "cpu", prompts)
    got = _generate(stage, stage.backend, prompts)
    for prompt, mine, theirs in zip(prompts, got, expected, strict=True):
        is_right, note = compare(mine.choices[0].token_ids, theirs.choices[0])
        stage.judged(f"text: {prompt}", is_right, note)


def _generate(stage: Stage, backend: str, prompts: Sequence[str]) -> list[Any]:
    from headrace.config import load_config
    from headrace.llm import LLM

    source = str(checkpoint_of(stage.model))
    engine = {"max_model_len": 256, "max_num_sequences": 8, "max_batched_tokens": 128}
    if stage.is_dry:
        engine = {"max_model_len": 64, "max_num_sequences": 2, "max_batched_tokens": 16}
    flags: dict[str, Any] = {
        "models.0.source": source, "models.0.backend": backend,
        "models.0.engine.kv_memory": "256MiB",
    }  # fmt: skip
    flags |= {f"models.0.engine.{key}": value for key, value in engine.items()}
    with LLM.from_config(load_config(None, flags=flags).config) as llm:
        sampling = llm.sampling(
            temperature=0.0, max_tokens=stage.sizes.new_tokens, logprobs=NUM_ALTERNATIVES
        )
        return llm.generate(list(prompts), sampling, progress=False)


def compare(got: Sequence[int], expected: Any) -> tuple[bool, str]:
    """Judge tokens against a Completion of the CPU's with log probabilities.

    They are right where equal, or where they part at two tokens that the CPU finds equally good up to NEAR_TIE;
    behind that place they are answers to different texts.
    """
    theirs = expected.token_ids
    parted = next(
        (place for place, pair in enumerate(zip(got, theirs, strict=False)) if pair[0] != pair[1]),
        None,
    )
    if parted is None:
        is_same = len(got) == len(theirs)
        return is_same, "" if is_same else f"{len(got)} tokens, the CPU's are {len(theirs)}"
    place = expected.logprobs[parted]
    known = {token.token_id: token.logprob for token in (*place.top, place.chosen)}
    if got[parted] not in known:
        return False, f"part at token {parted}: ours is not among the CPU's best {NUM_ALTERNATIVES}"
    gap = abs(known[theirs[parted]] - known[got[parted]])
    return gap < NEAR_TIE, f"part at token {parted}, {gap:.3f} apart"


# --- the time of a decode step ----------------------------------------------------------


def measure_steps(stage: Stage) -> None:
    """Measure decode steps of the model, launch to drawn tokens on the host, replayed and eager."""
    from headrace.backends.gpu.ops import GpuOps
    from headrace.backends.gpu.runner import GpuRunner
    from headrace.group import SingleRank
    from headrace.testing.model_driver import open_checkpoint
    from headrace.types import EngineSettings

    sizes = stage.sizes
    length = sizes.context + 64
    settings = EngineSettings(
        dtype="bfloat16", kv_dtype="bfloat16", max_model_len=length,
        max_num_sequences=max(sizes.batches), max_batched_tokens=64,
    )  # fmt: skip
    ops = GpuOps(stage.kernels, stage.device, settings, stage.backend)
    model = open_checkpoint(checkpoint_of(stage.model))
    runner = GpuRunner(ops, model, SingleRank(), settings)
    runner.allocate(max(sizes.batches) * -(-length // settings.block_size))
    runner.warm_up(lambda fraction: None)
    recorded = dict(runner._decode_steps)
    for counted, num_sequences in zip(("1 sequence", "32 sequences"), sizes.batches, strict=True):
        batch = _decode_batch(num_sequences, sizes.context, settings.block_size)
        for label, steps in (("graph", recorded), ("eager", {})):
            name = f"decode step, {counted}, {label}, ms"
            if label == "graph" and num_sequences not in recorded:
                stage.failed(name, RuntimeError("no graph was recorded: the log says why"))
                continue
            runner._decode_steps = dict(steps)
            stage.measured(name, _step_milliseconds(runner, batch, sizes.steps))
    runner.close()


@functools.cache
def _decode_batch(num_sequences: int, context: int, block_size: int) -> Any:
    from headrace.backends.batches import SequenceStep, forward_batch

    width = -(-(context + 1) // block_size)
    rows = [
        SequenceStep([7 + row], context, list(range(row * width, (row + 1) * width)))
        for row in range(num_sequences)
    ]
    return forward_batch(rows, block_size=block_size)


def _step_milliseconds(runner: Any, batch: Any, repeats: int) -> float:
    """Median wall time of a step, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        handle = runner.execute(batch)
        handle.sample()
        handle.result()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times[1:])[repeats // 2]
