"""Paged attention of up to 16 query rows (tokens x heads of a KV head) per piece on tensor cores.

Each warp has its own tiles of 16 rows of keys and values in shared memory, two stages of them, and meets the
others once, at the end. Scores of a tile are one 16 x 16 product; its weights stay in registers as the next
product's operand. 8-bit tiles are widened in shared memory. `attention.attention_merge` adds up the pieces.

| version | registers sm_90 (D 128, G 8, bf16) | H200 TB/s: group 8, fp8 |
|---|---|---|
| queries in registers | 207, spills with D 256 | |
| queries in shared memory, two stages of 16 rows per warp | see budget_numba.json | |
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import types

from headrace.backends.cuda_numba import primitives
from headrace.backends.cuda_numba.kernels.attention import LOG2_E, LOWEST, P
from headrace.backends.cuda_numba.kernels.formats import ELEMENTS, unpack_of
from headrace.backends.cuda_numba.kernels.source import (
    BF16,
    FP8,
    FULL_WARP,
    INT8,
    VECTOR,
    KernelSource,
)

copy_words, copy_word = primitives.copy_words, primitives.copy_word
commit_copies, wait_copies = primitives.commit_copies, primitives.wait_copies
load_words, load_transposed = primitives.load_words, primitives.load_transposed
word_as_float, float_as_word = primitives.word_as_float, primitives.float_as_word
exp2_fast, reciprocal_fast = primitives.exp2_fast, primitives.reciprocal_fast
f32, i32, i64, u32 = types.float32, types.int32, types.int64, types.uint32

WARPS, THREADS, STAGES, TILE = 4, 128, 2, 16
FACTORS = WARPS * STAGES * 3 * TILE
SUMS = WARPS * TILE


def tile_words(head_dim: int, kv: str) -> tuple[int, int, int]:
    """Return words from row to row of a stored tile and of a wide one, and what one warp needs in all."""
    wide = head_dim // 2 + 4  # 16 bytes more than a row: its neighbours lie in other banks
    if kv in (FP8, INT8):
        stored = head_dim // 4 + 4
        return stored, wide, 2 * TILE * (STAGES * stored + wide)
    return wide, wide, 2 * TILE * STAGES * wide


def shared_bytes(head_dim: int, kv: str) -> int:
    """Return the dynamic shared memory of a launch: all tiles, or the results that take their place."""
    return 4 * WARPS * max(tile_words(head_dim, kv)[2], TILE * head_dim)


def attention_tiles(
    head_dim: int, group: int, kv: str, act: str, block_size: int, tile_rows: int, scaled: int,
    biased: int, capped: int, native_fp8: int,
) -> KernelSource:  # fmt: skip
    """Partial results of every piece. Grid: pieces at most, KV heads. `scaled`: rows have scales of 8 bits."""
    D, G = head_dim, group
    VEC = VECTOR[kv]
    VECTORS = D // VEC
    STRIDE, WIDE, PER_WARP = tile_words(head_dim, kv)
    PLANE = TILE * STRIDE
    STEPS, PAIRS = D // 16, D // 16
    HALF, QUERY, STATE = D // 2, TILE * WIDE, D // 8 * 4
    WIDE_WORDS = VEC // 2
    mma, pack = (
        (primitives.mma_bf16, primitives.pack_bf16)
        if act == BF16
        else (primitives.mma_f16, primitives.pack_f16)
    )
    unpack, lacking = unpack_of(kv, bool(native_fp8))

    def kernel(  # type: ignore[no-untyped-def]
        q, q_stride, keys, values, key_scales, value_scales, bias, table, table_width, pieces, counts,
        partial_rows, partial_sums, num_kv_heads, factor, cap, window,
    ):  # fmt: skip
        piece = cuda.blockIdx.x
        head = cuda.blockIdx.y
        if piece >= counts[0]:
            return
        thread = cuda.threadIdx.x
        warp = thread // 32
        lane = thread % 32
        low_row = lane // 4
        column = lane % 4 * 2
        tiles = cuda.shared.array(0, u32)
        queries = cuda.shared.array(QUERY, u32)
        factors = cuda.shared.array(FACTORS, f32)
        sums = cuda.shared.array(SUMS, f32)
        maxima = cuda.shared.array(SUMS, f32)
        state = cuda.local.array(STATE, f32)
        scores = cuda.local.array(8, f32)
        codes = cuda.local.array(VEC, f32)
        largest = cuda.local.array(2, f32)
        total = cuda.local.array(2, f32)
        sequence = pieces[piece * 8]
        token = pieces[piece * 8 + 1]
        num_rows = pieces[piece * 8 + 2] * G
        oldest_limit = pieces[piece * 8 + 3] - pieces[piece * 8 + 2] + 1
        first = pieces[piece * 8 + 4]
        stop = pieces[piece * 8 + 5]
        partial = pieces[piece * 8 + 6]
        for i in range(thread, TILE * HALF, THREADS):
            r = i // HALF
            word = u32(0)
            if r < num_rows:
                at = i64(token + r // G) * q_stride + (head * G + r % G) * D + i % HALF * 2
                word = u32(q[at]) | u32(q[at + 1]) << u32(16)
            queries[r * WIDE + i % HALF] = word
        cuda.syncthreads()
        for e in range(STATE):
            state[e] = f32(0.0)
        for half in range(2):
            largest[half] = f32(LOWEST)
            total[half] = f32(0.0)
        mine = warp * PER_WARP
        rows_at = first + warp * TILE
        num_tiles = (stop - rows_at + WARPS * TILE - 1) // (WARPS * TILE)
        for step in range(-1, num_tiles):
            fetch = step + 1
            if fetch < num_tiles:
                start = rows_at + fetch * WARPS * TILE
                slot = fetch % STAGES
                for i in range(lane, TILE * VECTORS, 32):
                    row = min(start + i // VECTORS, stop - 1)
                    block_id = table[sequence * table_width + row // block_size]
                    line = (i64(block_id) * block_size + row % block_size) * num_kv_heads + head
                    origin = line * (VECTORS * 4) + i % VECTORS * 4
                    to = mine + slot * 2 * PLANE + i // VECTORS * STRIDE + i % VECTORS * 4
                    copy_words(tiles, to, keys, origin)
                    copy_words(tiles, to + PLANE, values, origin)
                if (scaled or biased) and lane < TILE:
                    row = min(start + lane, stop - 1)
                    block_id = table[sequence * table_width + row // block_size]
                    line = (i64(block_id) * block_size + row % block_size) * num_kv_heads + head
                    to = (warp * STAGES + slot) * 3 * TILE + lane
                    if scaled:
                        copy_word(factors, to, key_scales, line)
                        copy_word(factors, to + TILE, value_scales, line)
                    if biased:
                        copy_word(factors, to + 2 * TILE, bias, line)
            commit_copies()
            if step < 0:
                continue
            wait_copies(1)
            cuda.syncwarp()
            start = rows_at + step * WARPS * TILE
            slot = step % STAGES
            key_tile = mine + slot * 2 * PLANE
            value_tile = key_tile + PLANE
            if scaled:
                key_wide = mine + STAGES * 2 * PLANE
                for i in range(lane, 2 * TILE * VECTORS, 32):
                    row = i // VECTORS
                    unpack(load_words(tiles, key_tile + row * STRIDE + i % VECTORS * 4), codes)
                    to = key_wide + row * WIDE + i % VECTORS * WIDE_WORDS
                    for w in range(WIDE_WORDS):
                        tiles[to + w] = pack(codes[2 * w], codes[2 * w + 1])
                cuda.syncwarp()
                key_tile = key_wide
                value_tile = key_wide + TILE * WIDE
            for e in range(8):
                scores[e] = f32(0.0)
            for k in range(STEPS):
                at = low_row * WIDE + k * 8 + lane % 4
                q0, q1 = queries[at], queries[at + 8 * WIDE]
                q2, q3 = queries[at + 4], queries[at + 8 * WIDE + 4]
                for n in range(2):
                    at = key_tile + (n * 8 + low_row) * WIDE + k * 8 + lane % 4
                    scores[n * 4], scores[n * 4 + 1], scores[n * 4 + 2], scores[n * 4 + 3] = mma(
                        q0, q1, q2, q3, tiles[at], tiles[at + 4],
                        scores[n * 4], scores[n * 4 + 1], scores[n * 4 + 2], scores[n * 4 + 3],
                    )  # fmt: skip
            own = (warp * STAGES + slot) * 3 * TILE
            for n in range(2):
                for e in range(4):
                    place = n * 8 + column + e % 2
                    row = start + place
                    limit = oldest_limit + (low_row + e // 2 * 8) // G
                    score = scores[n * 4 + e] * (factor * f32(lacking))
                    if scaled:
                        score *= factors[own + place]
                    if capped:
                        grown = exp2_fast(score * f32(2.0 * LOG2_E)) + f32(1.0)
                        score = cap * (f32(1.0) - f32(2.0) * reciprocal_fast(grown))
                    if biased:
                        score += factors[own + 2 * TILE + place] * f32(LOG2_E)
                    if row >= stop or row >= limit or (window > 0 and row < limit - window):
                        score = f32(-float("inf"))
                    scores[n * 4 + e] = score
            for half in range(2):
                a, b = half * 2, half * 2 + 1
                top = max(max(scores[a], scores[b]), max(scores[4 + a], scores[4 + b]))
                for shuffle in range(2):
                    top = max(top, cuda.shfl_xor_sync(FULL_WARP, top, 1 << shuffle))
                top = max(top, largest[half])
                shrink = exp2_fast(largest[half] - top)
                largest[half] = top
                total[half] *= shrink
                for n in range(D // 8):
                    state[n * 4 + a] *= shrink
                    state[n * 4 + b] *= shrink
                for n in range(2):
                    for e in range(2):
                        weight = exp2_fast(scores[n * 4 + a + e] - top)
                        total[half] += weight
                        if scaled:
                            scale = factors[own + TILE + n * 8 + column + e]
                            weight *= scale * f32(lacking)
                        scores[n * 4 + a + e] = weight
            a0, a1 = pack(scores[0], scores[1]), pack(scores[2], scores[3])
            a2, a3 = pack(scores[4], scores[5]), pack(scores[6], scores[7])
            for pair in range(PAIRS):
                from_row = lane % 8 + lane // 8 % 2 * 8
                at = value_tile + from_row * WIDE + pair * 8 + lane // 16 * 4
                b0, b1, b2, b3 = load_transposed(tiles, at)
                s = pair * 8
                state[s], state[s + 1], state[s + 2], state[s + 3] = mma(
                    a0, a1, a2, a3, b0, b1, state[s], state[s + 1], state[s + 2], state[s + 3]
                )
                state[s + 4], state[s + 5], state[s + 6], state[s + 7] = mma(
                    a0, a1, a2, a3, b2, b3, state[s + 4], state[s + 5], state[s + 6], state[s + 7]
                )
            cuda.syncwarp()
        for half in range(2):
            for shuffle in range(2):
                total[half] += cuda.shfl_xor_sync(FULL_WARP, total[half], 1 << shuffle)
        wait_copies(0)
        cuda.syncthreads()
        for n in range(D // 8):
            for e in range(4):
                to = (warp * TILE + low_row + e // 2 * 8) * D + n * 8 + column + e % 2
                tiles[to] = float_as_word(state[n * 4 + e])
        if lane % 4 == 0:
            for half in range(2):
                maxima[warp * TILE + low_row + half * 8] = largest[half]
                sums[warp * TILE + low_row + half * 8] = total[half]
        cuda.syncthreads()
        target = (i64(partial) * num_kv_heads + head) * tile_rows
        for i in range(thread, num_rows * D, THREADS):
            r = i // D
            both = f32(LOWEST)
            for w in range(WARPS):
                both = max(both, maxima[w * TILE + r])
            found = f32(0.0)
            whole = f32(0.0)
            for w in range(WARPS):
                share = exp2_fast(maxima[w * TILE + r] - both)
                found += word_as_float(tiles[w * TILE * D + i]) * share
                whole += sums[w * TILE + r] * share
            partial_rows[target * D + i] = found
            if i % D == 0:
                partial_sums[(target + r) * 2] = both
                partial_sums[(target + r) * 2 + 1] = whole

    words = P(u32)
    signature = types.void(
        P(ELEMENTS[act]), i64, words, words, P(f32), P(f32), P(f32), P(i32), i32, P(i32), P(i32),
        P(f32), P(f32), i32, f32, f32, i32,
    )  # fmt: skip
    return KernelSource(kernel, signature, THREADS, shared_bytes(head_dim, kv))
