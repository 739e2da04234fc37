"""The plain meaning of every name in `headrace.backends.cuda_numba.primitives`, for the simulator.

Behind them stand-ins for `kernels.formats.STAND_INS`: the same numbers by one NumPy call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from greenlet import getcurrent

from headrace.testing.cuda_simulator import FULL_MASK, DeviceArray, SimulatorError, meet

Words = tuple[np.uint32, np.uint32, np.uint32, np.uint32]


def load_words(array: DeviceArray, index: Any) -> Words:
    at = array.touch(index, 4, write=False)
    if array.values.itemsize != 4:
        raise SimulatorError(f"{array.name}: 16-byte loads are of 4-byte elements")
    a, b, c, d = array.values[at : at + 4].view(np.uint32)
    return a, b, c, d


load_words_once = load_words


def load_transposed(array: DeviceArray, index: Any) -> Words:
    lanes = meet("load_transposed", FULL_MASK, load_words(array, index))
    lane = getcurrent().index % 32
    found = []
    for matrix in range(4):
        pair = [int(lanes[8 * matrix + lane % 4 * 2 + k][lane // 8]) for k in range(2)]
        low, high = (word >> lane // 4 % 2 * 16 & 0xFFFF for word in pair)
        found.append(np.uint32(low | high << 16))
    a, b, c, d = found
    return a, b, c, d


def atomic_add(array: DeviceArray, index: Any, value: Any) -> Any:
    at = array.touch(index, write=True, is_atomic=True)
    old = array.values[at]
    array.values[at] = old + array.values.dtype.type(value)
    return old


def _copy(target: DeviceArray, index: Any, source: DeviceArray, source_index: Any, n: int) -> None:
    at, origin = target.touch(index, n, write=True), source.touch(source_index, n, write=False)
    words = source.values[origin : origin + n].view(np.uint32).copy()
    target.values[at : at + n].view(np.uint32)[:] = 0x7FC05A5A  # neither old nor new until it lands
    slot = target.values[at : at + n].view(np.uint32)
    if getcurrent().block.launch.order == "reverse":  # a device may land them at once
        slot[:] = words
        return

    def land() -> None:
        target.touch(at, n, write=True)
        slot[:] = words

    getcurrent().copies.append(land)


def copy_words(target: DeviceArray, index: Any, source: DeviceArray, source_index: Any) -> None:
    _copy(target, index, source, source_index, 4)


def copy_word(target: DeviceArray, index: Any, source: DeviceArray, source_index: Any) -> None:
    _copy(target, index, source, source_index, 1)


def commit_copies() -> None:
    thread = getcurrent()
    thread.groups.append(thread.copies)
    thread.copies = []


def wait_copies(newest: int) -> None:
    thread = getcurrent()
    count = max(0, len(thread.groups) - newest)
    for group in thread.groups[:count]:
        for land in group:
            land()
    del thread.groups[:count]


def word_as_float(value: Any) -> np.float32:
    return np.float32(np.uint32(value).view(np.float32))


def float_as_word(value: Any) -> np.uint32:
    return np.uint32(np.float32(value).view(np.uint32))


def bf16_low(word: Any) -> np.float32:
    return word_as_float(np.uint32(word) << np.uint32(16))


def bf16_high(word: Any) -> np.float32:
    return word_as_float(np.uint32(word) & np.uint32(0xFFFF0000))


def f16_low(word: Any) -> np.float32:
    return np.float32(np.uint16(int(word) & 0xFFFF).view(np.float16))


def f16_high(word: Any) -> np.float32:
    return np.float32(np.uint16(int(word) >> 16).view(np.float16))


def e4m3_pair(word: Any) -> np.uint32:
    codes = torch.tensor([int(word) & 255, int(word) >> 8 & 255], dtype=torch.uint8)
    halves = codes.view(torch.float8_e4m3fn).to(torch.float16).numpy().view(np.uint16)
    return np.uint32(int(halves[0]) | int(halves[1]) << 16)


def float_to_bf16(value: Any) -> np.uint16:
    if np.isnan(value):
        return np.uint16(0x7FFF)
    word = int(np.float32(value).view(np.uint32))
    return np.uint16((word + 0x7FFF + (word >> 16 & 1)) >> 16)


def float_to_f16(value: Any) -> np.uint16:
    return np.uint16(np.float16(value).view(np.uint16))


def float_to_e4m3(value: Any) -> np.uint16:
    number = torch.tensor(float(value)).clamp(-448.0, 448.0)
    return np.uint16(int(number.to(torch.float8_e4m3fn).view(torch.uint8)))


def round_even(value: Any) -> np.int32:
    return np.int32(0) if np.isnan(value) else np.int32(np.rint(value))


def exp2_fast(value: Any) -> np.float32:
    found = np.exp2(np.float32(value))
    return np.float32(0.0) if found < np.float32(2.0**-126) else np.float32(found)


def log2_fast(value: Any) -> np.float32:
    return np.float32(np.log2(np.float32(value)))


def reciprocal_fast(value: Any) -> np.float32:
    return np.float32(np.float32(1.0) / np.float32(value))


def inverse_root_fast(value: Any) -> np.float32:
    return np.float32(1.0 / np.sqrt(np.float32(value)))


def multiply_high(a: Any, b: Any) -> np.uint32:
    return np.uint32(int(a) * int(b) >> 32)


def pack_bf16(low: Any, high: Any) -> np.uint32:
    return np.uint32(int(float_to_bf16(low)) | int(float_to_bf16(high)) << 16)


def pack_f16(low: Any, high: Any) -> np.uint32:
    return np.uint32(int(float_to_f16(low)) | int(float_to_f16(high)) << 16)


def _mma(kind: str, low: Any, high: Any, operands: tuple[Any, ...]) -> tuple[np.float32, ...]:
    """PTX ISA, fragments of mma.m16n8k16 with 16-bit operands; the product is summed in float64."""
    lanes = meet(kind, FULL_MASK, operands)
    if len(lanes) < 32:
        raise SimulatorError(f"{kind}: a warp has 32 lanes, {len(lanes)} take part")
    if "product" not in lanes:
        a, b = np.zeros((16, 16)), np.zeros((16, 8))
        for lane in range(32):
            words, row, column = lanes[lane], lane // 4, lane % 4 * 2
            for k in range(4):
                at = row + 8 * (k % 2), column + 8 * (k // 2)
                a[at], a[at[0], at[1] + 1] = low(words[k]), high(words[k])
            for k in range(2):
                b[column + 8 * k, row], b[column + 8 * k + 1, row] = (
                    low(words[4 + k]),
                    high(words[4 + k]),
                )
        lanes["product"] = a @ b
    lane = getcurrent().index % 32
    row, column = lane // 4, lane % 4 * 2
    places = ((row, column), (row, column + 1), (row + 8, column), (row + 8, column + 1))
    return tuple(
        np.float32(lanes["product"][place] + operands[6 + k]) for k, place in enumerate(places)
    )


def mma_bf16(*operands: Any) -> tuple[np.float32, ...]:
    return _mma("mma_bf16", bf16_low, bf16_high, operands)


def mma_f16(*operands: Any) -> tuple[np.float32, ...]:
    return _mma("mma_f16", f16_low, f16_high, operands)


def _bits(words: Words, kind: Any) -> Any:
    return np.array(words, np.uint32).view(kind)


def unpack_f32(words: Words, values: Any) -> None:
    values[:] = _bits(words, np.float32)


def unpack_bf16(words: Words, values: Any) -> None:
    values[:] = (_bits(words, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def unpack_f16(words: Words, values: Any) -> None:
    values[:] = _bits(words, np.float16)


def unpack_e4m3(words: Words, values: Any) -> None:
    codes = torch.from_numpy(_bits(words, np.uint8))
    values[:] = codes.view(torch.float8_e4m3fn).float().numpy()


def unpack_e4m3_shifted(words: Words, values: Any) -> None:
    codes = _bits(words, np.uint8).astype(np.uint16)
    halves = (codes & np.uint16(0x80)) << np.uint16(8) | (codes & np.uint16(0x7F)) << np.uint16(7)
    values[:] = halves.view(np.float16)


def unpack_int8(words: Words, values: Any) -> None:
    values[:] = _bits(words, np.int8)


def unpack_nibbles(words: Words, values: Any) -> None:
    codes = _bits(words, np.uint8)
    values[:16], values[16:] = codes & np.uint8(15), codes >> np.uint8(4)


def dot(a: Any, at: int, b: Any, count: int) -> Any:
    return a[at : at + count] @ b[:count]


def add_scaled(target: Any, at: int, scale: Any, source: Any, count: int) -> None:
    target[at : at + count] += scale * source[:count]


def multiply_all(target: Any, at: int, factor: Any, count: int) -> None:
    target[at : at + count] *= factor
