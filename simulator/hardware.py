"""What a simulated replica runs on: how long its steps take and how much memory it has.

Measured (`headrace bench --profile`) or analytic. The analytic model is a roofline made linear: a step
reads all weights once, each prompt token costs two operations per parameter, each KV row is read once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, did_you_mean
from headrace.simulator.measured import MeasuredStepTime
from headrace.step_time import StepTime, StepTimeFormula

_FORMAT = "headrace-step-profile-1"
_BANDWIDTH_SHARE, _FLOPS_SHARE, _MEMORY_SHARE = 0.8, 0.5, 0.9
"""What kernels reach of a data sheet's bandwidth and operations, and what of the memory is used."""
_SECONDS_PER_SEQUENCE = 5e-6


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Figures of a data sheet: dense 16-bit operations, memory bandwidth and size."""

    flops: float
    bytes_per_second: float
    memory_bytes: int
    step_seconds: float = 4e-4
    """Launching and the engine's own part."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a model a step's time depends on; weights and KV rows of 16 bits."""

    num_parameters: float
    kv_bytes_per_token: int
    max_position: int


ACCELERATORS: Mapping[str, Accelerator] = {
    "h200": Accelerator(989e12, 4.8e12, 141 * 10**9),
    "a100": Accelerator(312e12, 2.039e12, 80 * 10**9),
    "l4": Accelerator(121e12, 0.3e12, 24 * 10**9),
}
MODELS: Mapping[str, ModelSize] = {
    "smollm2-135m": ModelSize(0.135e9, 2 * 2 * 30 * 3 * 64, 8192),
    "llama-3.2-1b": ModelSize(1.24e9, 2 * 2 * 16 * 8 * 64, 131072),
    "llama-3.2-3b": ModelSize(3.21e9, 2 * 2 * 28 * 8 * 128, 131072),
    "llama-3.1-8b": ModelSize(8.03e9, 2 * 2 * 32 * 8 * 128, 131072),
    "qwen2.5-14b": ModelSize(14.8e9, 2 * 2 * 48 * 8 * 128, 131072),
    "qwen2.5-32b": ModelSize(32.8e9, 2 * 2 * 64 * 8 * 128, 131072),
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """One replica's device with its model."""

    name: str
    step_time: StepTime
    kv_bytes_per_token: int
    kv_pool_bytes: int
    """What is left for keys and values beside the weights."""
    max_position: int
    request_seconds: float = 0.0
    """What the gateway adds to a request before its first token, in seconds."""
    engine: Mapping[str, int] | None = None
    """The engine settings a profile was measured with; None: the caller's."""


def analytic(device: str, model: str) -> Hardware:
    """Return a known accelerator with a known model. ConfigError where one is not known or too small."""
    accelerator, size = ACCELERATORS.get(device), MODELS.get(model)
    if accelerator is None:
        raise ConfigError(
            f"--device {device!r} is not known. {did_you_mean(device, ACCELERATORS)}; there are "
            f"{', '.join(ACCELERATORS)}, or give --profile"
        )
    if size is None:
        raise ConfigError(
            f"--model-size {model!r} is not known. {did_you_mean(model, MODELS)}; there are "
            f"{', '.join(MODELS)}"
        )
    weights = 2 * size.num_parameters
    pool = int(_MEMORY_SHARE * accelerator.memory_bytes - weights)
    if pool < size.kv_bytes_per_token * 4096:
        raise ConfigError(
            f"--model-size {model}: its weights take {weights / 1e9:.0f} GB, and {_MEMORY_SHARE:.0%} of "
            f"one {device} are {_MEMORY_SHARE * accelerator.memory_bytes / 1e9:.0f} GB; choose a smaller "
            "model or a larger device"
        )
    bandwidth = _BANDWIDTH_SHARE * accelerator.bytes_per_second
    step_time = StepTimeFormula(
        base_seconds=accelerator.step_seconds + weights / bandwidth,
        seconds_per_prefill_token=2 * size.num_parameters / (_FLOPS_SHARE * accelerator.flops),
        seconds_per_sequence=_SECONDS_PER_SEQUENCE,
        seconds_per_kv_row=size.kv_bytes_per_token / bandwidth,
    )
    return Hardware(
        f"{model} on {device}", step_time, size.kv_bytes_per_token, pool, size.max_position
    )


def from_profile(path: Path) -> Hardware:
    """Return the device that `headrace bench --profile` measured. ConfigError where the file is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--profile {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--profile {path}: is no JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ConfigError(
            f"--profile {path}: its format is not {_FORMAT}; write one with: headrace bench --profile {path}"
        )
    try:
        return from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"--profile {path}: is no whole profile ({type(error).__name__}: {error}); write one with: "
            f"headrace bench --profile {path}"
        ) from None


def from_document(document: Mapping[str, Any]) -> Hardware:
    """Return the device of a profile that has been read."""
    step, overhead, engine = document["step_time"], document["overhead"], document["engine"]
    step_time = MeasuredStepTime(
        document.get("samples", ()),
        StepTimeFormula(**step),
        StepTimeFormula(
            base_seconds=overhead["engine_seconds_per_step"],
            # each further stream's token takes a core from the step for as long as the gateway needs
            seconds_per_sequence=overhead["engine_seconds_per_sequence"]
            + (overhead.get("gateway_seconds_per_token") or 0.0),
        ),
        _gaps(overhead.get("served_gaps", ())),
    )
    model = document["model"]
    per_token = model["kv_bytes_per_token"]
    names = ("max_model_len", "max_num_sequences", "max_batched_tokens", "block_size", "num_blocks")
    return Hardware(
        name=f"{model['name']} on {document['machine']['cpu']}",
        step_time=step_time,
        kv_bytes_per_token=per_token,
        kv_pool_bytes=engine["num_blocks"] * engine["block_size"] * per_token,
        max_position=engine["max_model_len"],
        request_seconds=max(
            overhead.get("gateway_seconds_per_request") or 0.0,
            overhead.get("served_seconds_per_request") or 0.0,
        ),
        engine={name: engine[name] for name in names},
    )


def _gaps(pairs: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """Return `served_gaps` in the order of their sequences. ValueError where one is no such pair."""
    found = sorted((int(count), float(seconds)) for count, seconds in pairs)
    for count, seconds in found:
        if count < 1 or not 0 <= seconds < math.inf:
            raise ValueError(
                f"served_gaps: [{count}, {seconds}] is no number of sequences and seconds"
            )
    return found
