"""Rotary position frequencies: one base, optionally stretched for longer contexts.

Frequencies are computed in float64 from the numbers the checkpoint states, so that every backend
starts from the same table; a GGUF file's `rope_freqs.weight` arrives here as divisors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError

SUPPORTED_SCALINGS = ("none", "linear", "llama3", "factors")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How one kind of layer rotates its queries and keys."""

    theta: float
    rotary_dim: int
    scaling: str = "none"
    """One of SUPPORTED_SCALINGS; "factors" divides each frequency by its entry in frequency_factors."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    frequency_factors: tuple[float, ...] = ()
    """[rotary_dim / 2], with scaling "factors"."""

    def inverse_frequencies(self) -> NDArray[np.float64]:
        """Return the angle per position of each rotated pair: [rotary_dim / 2] f64."""
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        frequencies: NDArray[np.float64] = 1.0 / self.theta**exponents
        if self.scaling == "linear":
            return frequencies / self.factor
        if self.scaling == "llama3":
            return self._stretch_low_frequencies(frequencies)
        if self.scaling == "factors":
            return frequencies / np.asarray(self.frequency_factors, dtype=np.float64)
        return frequencies

    def _stretch_low_frequencies(self, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
        """Llama 3.1: long wavelengths divided by factor, short ones kept, a ramp between them."""
        wavelengths = 2 * math.pi / frequencies
        turns = self.original_max_position / wavelengths
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


def rope_from_parameters(
    parameters: Mapping[str, Any], *, theta: float, rotary_dim: int, max_position: int
) -> RopeConfig:
    """Build from a `rope_scaling` or `rope_parameters` table of config.json (empty: plain rope)."""
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    theta = float(parameters.get("rope_theta") or theta)
    if kind in ("default", "none"):
        return RopeConfig(theta=theta, rotary_dim=rotary_dim)
    if kind not in ("linear", "llama3"):
        raise ModelError(
            f"rope scaling '{kind}' is not supported; supported are none, linear and llama3. "
            "Use a checkpoint without it, or remove rope_scaling from config.json to serve the "
            "model at its original context length"
        )
    try:
        factor = float(parameters["factor"])
        if kind == "linear":
            return RopeConfig(theta=theta, rotary_dim=rotary_dim, scaling=kind, factor=factor)
        rope = RopeConfig(
            theta=theta,
            rotary_dim=rotary_dim,
            scaling=kind,
            factor=factor,
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_position=int(
                parameters.get("original_max_position_embeddings") or max_position
            ),
        )
    except KeyError as missing:
        raise ModelError(f"rope scaling '{kind}' lacks {missing} in config.json") from missing
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise ModelError(
            f"rope scaling 'llama3': high_freq_factor {rope.high_freq_factor} must be above "
            f"low_freq_factor {rope.low_freq_factor}"
        )
    return rope
