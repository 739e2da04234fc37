"""A checkpoint whose weights a quantization policy converts as they are read, one tensor at a time.

Policies return named parts; here they become rows of a block scheme, which backends hold as if the file had
stored them so, or expand like any other. Large matrices are converted in runs of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import ModelError, PluginError
from headrace.interfaces import LoadedModel, QuantizationPolicy, TensorSource
from headrace.types import WeightPart

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_ELEMENTS = 4 << 20
"""Numbers that are in memory as float32 at once (16 MB), one row at least."""
BLOCK = 32


@dataclass(frozen=True, slots=True)
class BlockScheme:
    """A scheme that parts can be assembled to: blocks of 32 inputs."""

    parts: Mapping[str, np.dtype[Any]]
    """Name -> dtype; `codes` is [out, in], the others [out, in / 32]."""
    assemble: Callable[..., NDArray[Any]]
    """Takes the parts by name, [rows, groups, 32] and [rows, groups]; returns blocks [rows, groups]."""


def _assemble_q8_0(codes: NDArray[np.int8], scale: NDArray[np.float16]) -> NDArray[Any]:
    blocks = np.empty(scale.shape, np.dtype([("scale", "<f2"), ("codes", "i1", BLOCK)]))
    blocks["scale"], blocks["codes"] = scale, codes
    return blocks


def _assemble_q4_1(
    codes: NDArray[np.uint8], scale: NDArray[np.float16], minimum: NDArray[np.float16]
) -> NDArray[Any]:
    fields = [("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", BLOCK // 2)]
    blocks = np.empty(scale.shape, np.dtype(fields))
    blocks["scale"], blocks["minimum"] = scale, minimum
    blocks["codes"] = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
    return blocks


_HALF = np.dtype(np.float16)
SCHEMES: Mapping[str, BlockScheme] = {
    "q8_0": BlockScheme({"codes": np.dtype(np.int8), "scale": _HALF}, _assemble_q8_0),
    "q4_1": BlockScheme(
        {"codes": np.dtype(np.uint8), "scale": _HALF, "minimum": _HALF}, _assemble_q4_1
    ),
}
"""What a policy may choose."""


def quantized(model: LoadedModel, policy: QuantizationPolicy | None) -> LoadedModel:
    """Return the model with its matrices as `policy` wants them, having asked about each before any is read.

    ModelError names a tensor that cannot be held so; PluginError a policy that breaks its contract.
    """
    if policy is None:
        return model
    wanted = {}
    for name in model.tensors.names():
        stored, shape = model.tensors.scheme(name)
        if len(shape) != 2:
            continue
        scheme = _wanted(policy, name, shape, stored)
        if scheme is not None and scheme != stored:
            wanted[name] = scheme
    if not wanted:
        return model
    return replace(model, tensors=QuantizedTensors(model, policy, wanted))


def _wanted(
    policy: QuantizationPolicy, name: str, shape: tuple[int, ...], stored: str
) -> str | None:
    try:
        scheme = policy.scheme_for(name, shape, stored)
    except ValueError as error:
        raise ModelError(f"quantization policy '{policy.name}': {error}") from error
    if scheme is None or scheme == stored:
        return None
    if scheme not in SCHEMES:
        raise ModelError(
            f"quantization policy '{policy.name}' wants tensor '{name}' in {scheme}, which no backend "
            f"holds; it may be {' or '.join(SCHEMES)}, or use the policy 'none'"
        )
    if shape[1] % BLOCK:
        raise ModelError(
            f"quantization policy '{policy.name}' wants tensor '{name}' in {scheme}, but its rows of "
            f"{shape[1]} are not a multiple of {BLOCK}; return None for it"
        )
    return scheme


class QuantizedTensors:
    """Implements headrace.interfaces.TensorSource: what is read of it is converted then, and not kept."""

    def __init__(
        self, model: LoadedModel, policy: QuantizationPolicy, wanted: Mapping[str, str]
    ) -> None:
        self._tensors: TensorSource = model.tensors
        self._expand = model.expand
        self._policy = policy
        self._wanted = wanted

    def names(self) -> Iterable[str]:
        return self._tensors.names()

    def has(self, name: str) -> bool:
        return self._tensors.has(name)

    def scheme(self, name: str) -> tuple[str, tuple[int, ...]]:
        stored, shape = self._tensors.scheme(name)
        return self._wanted.get(name, stored), shape

    def read(self, name: str) -> WeightPart:
        part = self._tensors.read(name)
        if name not in self._wanted:
            return part
        scheme = self._wanted[name]
        out_size, in_size = part.shape
        stride = max(1, MAX_ELEMENTS // in_size)
        rows = []
        for first in range(0, out_size, stride):
            last = min(first + stride, out_size)
            some = replace(part, shape=(last - first, in_size), data=part.data[first:last])
            weight = self._expand(some).data
            if not np.isfinite(weight).all():
                raise ModelError(
                    f"tensor '{name}' holds a NaN or an infinity, which has no {scheme}; the checkpoint is "
                    "broken, or use the policy 'none'"
                )
            rows.append(assemble(self._policy, weight, scheme, name))
        data = rows[0] if len(rows) == 1 else np.concatenate(rows)
        return WeightPart(name, scheme, part.shape, data)


def assemble(
    policy: QuantizationPolicy, weight: NDArray[np.float32], scheme: str, name: str
) -> NDArray[np.uint8]:
    """Return whole rows [out, in] f32 as the scheme's rows of blocks [out, bytes] u1. PluginError where
    the policy's parts are not the scheme's.
    """
    known = SCHEMES[scheme]
    out_size, in_size = weight.shape
    groups = in_size // BLOCK
    parts = policy.quantize(weight, scheme, None)
    where = f"quantization policy '{policy.name}': quantize of '{name}' to {scheme}"
    if set(parts) != set(known.parts):
        raise PluginError(
            f"{where} gave the parts {', '.join(sorted(parts)) or 'none'}; "
            f"it must give {', '.join(known.parts)}"
        )
    arrays = {}
    for part_name, dtype in known.parts.items():
        array = np.asarray(parts[part_name].array)
        axes = parts[part_name].out_axis, parts[part_name].in_axis
        shape = (out_size, in_size if part_name == "codes" else groups)
        if axes == (1, 0):
            array = array.T
        if array.dtype != dtype or array.shape != shape or axes not in ((0, 1), (1, 0)):
            raise PluginError(
                f"{where} gave '{part_name}' as {array.dtype} {list(array.shape)} with the axes {axes}; "
                f"it must be {dtype} {list(shape)} with the axes (0, 1), or transposed with (1, 0)"
            )
        arrays[part_name] = array
    arrays["codes"] = arrays["codes"].reshape(out_size, groups, BLOCK)
    blocks = known.assemble(**arrays)
    return blocks.view(np.uint8).reshape(out_size, -1)
