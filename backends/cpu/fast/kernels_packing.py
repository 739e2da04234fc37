"""Turns stored rows into tiles: GGML's blocks keep their codes, plain numbers become bf16.

One group of 32 inputs of one output is read, then written into its lane of a tile. Formats: ggml-quants.h of
llama.cpp. Scales and minima become f16; where a K block multiplies two, that rounds by 2^-12 of a step.
"""

from __future__ import annotations

import numpy as np

from headrace.backends.cpu.fast.compiled import fast_kernel
from headrace.backends.cpu.fast.intrinsics import LANES
from headrace.backends.cpu.fast.kernels_coding import GROUP
from headrace.backends.cpu.fast.kernels_rowwise import byte_at, bytes_of, half_at, store_half
from headrace.backends.cpu.fast.kernels_tiles import BYTES_SIGNED, NIBBLES, PLAIN, TILE_BYTES
from headrace.backends.cpu.kernels_rows import bf16_of, floats, halves

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, F32, F16, BF16 = range(11)


@fast_kernel
def _nibbles(packed, codes):  # type: ignore[no-untyped-def]
    """32 codes of 16 bytes: low nibbles, then high ones."""
    for i in range(16):
        byte = byte_at(packed + i)
        codes[i] = byte & 15
        codes[16 + i] = byte >> 4


@fast_kernel
def _fifth_bits(words, codes):  # type: ignore[no-untyped-def]
    for i in range(GROUP):
        codes[i] |= (byte_at(words + i // 8) >> (i % 8) & 1) << 4


@fast_kernel
def _read_block(scheme, block, codes, scales):  # type: ignore[no-untyped-def]
    """A block of 32: codes as the tile holds them; scales: scale, and minimum or second scale."""
    scale = half_at(block)
    scales[0], scales[1] = scale, np.float32(0.0)
    if scheme == Q4_0:
        _nibbles(block + 2, codes)
        scales[1] = np.float32(-8.0) * scale
    elif scheme == Q4_1:
        _nibbles(block + 4, codes)
        scales[1] = half_at(block + 2)
    elif scheme == Q5_0:
        _nibbles(block + 6, codes)
        _fifth_bits(block + 2, codes)
        for i in range(GROUP):
            codes[i] += 128 - 16
    elif scheme == Q5_1:
        _nibbles(block + 8, codes)
        _fifth_bits(block + 4, codes)
        scales[1] = half_at(block + 2)
    else:
        for i in range(GROUP):
            codes[i] = byte_at(block + 2 + i) ^ 128


@fast_kernel
def _read_k_block(scheme, block, run, codes, scales):  # type: ignore[no-untyped-def]
    """Run `run` of 32 of a block of 256."""
    if scheme == Q6_K:
        part, inner = run // 4, run % 4
        for i in range(GROUP):
            low = byte_at(block + part * 64 + inner % 2 * 32 + i) >> (4 * (inner // 2)) & 15
            high = byte_at(block + 128 + part * 32 + i) >> (2 * inner) & 3
            codes[i] = (low | high << 4) + 128 - 32
        for half in range(2):
            byte = byte_at(block + 192 + 2 * run + half)
            signed = byte - 256 if byte > 127 else byte
            scales[half] = half_at(block + 208) * np.float32(signed)
        return
    packed = block + 4
    if run < 4:
        scale, minimum = byte_at(packed + run) & 63, byte_at(packed + 4 + run) & 63
    else:
        high = byte_at(packed + 4 + run)
        scale = high & 15 | byte_at(packed + run - 4) >> 2 & 48
        minimum = high >> 4 | byte_at(packed + run) >> 2 & 48
    scales[0] = half_at(block) * np.float32(scale)
    scales[1] = -half_at(block + 2) * np.float32(minimum)
    first = block + (16 if scheme == Q4_K else 48) + run // 2 * 32
    for i in range(GROUP):
        codes[i] = byte_at(first + i) >> (4 * (run % 2)) & 15
        if scheme == Q5_K:
            codes[i] |= (byte_at(block + 16 + i) >> run & 1) << 4


@fast_kernel
def _write_codes(tile, form, lane, codes, scales):  # type: ignore[no-untyped-def]
    target = bytes_of(tile, TILE_BYTES[form])
    for i in range(GROUP):
        if form == NIBBLES:
            place = i // 8 * 64 + lane * 4 + i % 4
            target[place] |= np.uint8(codes[i] << (4 * (i // 4 % 2)))
        else:
            target[i // 4 * 64 + lane * 4 + i % 4] = np.uint8(codes[i])
    end = 256 if form == NIBBLES else 512
    store_half(tile + end + 2 * lane, scales[0])
    if form != BYTES_SIGNED:
        store_half(tile + end + 32 + 2 * lane, scales[1])


@fast_kernel
def pack_blocks(scheme, source, row_bytes, num_rows, groups, first_row, tiles, form):  # type: ignore[no-untyped-def]
    """Write rows of blocks as rows first_row .. of zeroed tiles."""
    codes, scales = np.zeros(GROUP, np.int64), np.zeros(2, np.float32)
    for row in range(num_rows):
        output = first_row + row
        column = tiles + output // LANES * groups * TILE_BYTES[form]
        for group in range(groups):
            stored = source + row * row_bytes
            if scheme < Q4_K:
                _read_block(scheme, stored + group * (row_bytes // groups), codes, scales)
            else:
                block = stored + group // 8 * (row_bytes * 8 // groups)
                _read_k_block(scheme, block, group % 8, codes, scales)
            tile = column + group * TILE_BYTES[form]
            _write_codes(tile, form, output % LANES, codes, scales)


@fast_kernel
def pack_plain(scheme, source, row_bytes, num_rows, groups, first_row, tiles):  # type: ignore[no-untyped-def]
    """Write rows of f32, f16 or bf16 as bf16 tiles."""
    size = groups * GROUP
    for row in range(num_rows):
        output, stored = first_row + row, source + row * row_bytes
        column = tiles + output // LANES * groups * TILE_BYTES[PLAIN]
        lane = output % LANES
        for i in range(size):
            if scheme == F32:
                value = bf16_of(floats(stored, size)[i])
            elif scheme == F16:
                value = bf16_of(half_at(stored + 2 * i))
            else:
                value = halves(stored, size)[i]
            place = column + i // GROUP * TILE_BYTES[PLAIN] + i % GROUP // 2 * 64
            halves(place, GROUP)[lane * 2 + i % 2] = value
