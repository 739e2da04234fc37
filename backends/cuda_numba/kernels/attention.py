"""Attention over paged keys and values on CUDA cores: one query token per piece of work, any group size.

A block takes one piece (a run of rows of one sequence, `headrace.backends.gpu.work_list`) for one KV head and
the query heads that share it, 8 at most. LANES threads share a row, 16 bytes each; every thread copies its
own bytes into its own slot of a ring in shared memory, so that the loop has no barrier, and STAGES rows
per thread are in flight without registers. Softmax is online, in base 2.

| version | registers sm_90 (D 128, G 4, bf16) | loads in flight | H200 TB/s |
|---|---|---|---|
| rows loaded straight into registers, rescaling at each row | 96 | 2 | |
| ring of 4 stages, rescaling only at a new maximum | 114 | 6 (3 groups of K and V) | |
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import types

from headrace.backends.cuda_numba import primitives
from headrace.backends.cuda_numba.kernels.formats import (
    ELEMENTS,
    LOADS,
    STORES,
    add_scaled,
    dot,
    multiply_all,
    unpack_of,
)
from headrace.backends.cuda_numba.kernels.source import (
    FULL_WARP,
    VECTOR,
    KernelSource,
    power_of_two_at_least,
)

copy_words, copy_word = primitives.copy_words, primitives.copy_word
commit_copies, wait_copies = primitives.commit_copies, primitives.wait_copies
load_words, exp2_fast = primitives.load_words, primitives.exp2_fast
reciprocal_fast = primitives.reciprocal_fast
f32, i32, i64, u32 = types.float32, types.int32, types.int64, types.uint32
P = types.CPointer

WARPS = 4
THREADS = 32 * WARPS
STAGES = 4
NEWEST = STAGES - 1
LOWEST = -1e30
LOG2_E = 1.4426950408889634


def attention_pieces(
    head_dim: int, group: int, heads: int, kv: str, act: str, block_size: int, scaled: int,
    biased: int, capped: int, native_fp8: int,
) -> KernelSource:  # fmt: skip
    """Partial results of every piece. Grid: pieces at most, KV heads, parts of a group.

    A block takes `heads` of the `group` query heads that share a KV head; `scaled`: rows have scales.
    """
    D, G = head_dim, heads
    VEC = VECTOR[kv]
    VECTORS = D // VEC
    LANES = min(32, power_of_two_at_least(VECTORS))
    PER_LANE = -(-VECTORS // LANES)
    SHUFFLES = LANES.bit_length() - 1
    PLACES = 32 // LANES
    ROWS_AT_ONCE = PLACES * WARPS
    WORDS = VECTORS * 4
    MINE = PER_LANE * VEC
    STATE = G * MINE
    RING = STAGES * 2 * PER_LANE * THREADS * 4
    NUMBERS = STAGES * 3 * THREADS if scaled or biased else 1
    MERGED, SUMS = WARPS * G * D, WARPS * G
    load = LOADS[act]
    unpack, lacking = unpack_of(kv, bool(native_fp8))

    def kernel(  # type: ignore[no-untyped-def]
        q, q_stride, keys, values, key_scales, value_scales, bias, table, table_width, pieces, counts,
        partial_rows, partial_sums, num_kv_heads, factor, cap,
    ):  # fmt: skip
        piece = cuda.blockIdx.x
        head = cuda.blockIdx.y
        first_head = cuda.blockIdx.z * G
        if piece >= counts[0]:
            return
        thread = cuda.threadIdx.x
        warp = thread // 32
        sub = thread % LANES
        place = thread // LANES
        ring = cuda.shared.array(RING, u32)
        numbers = cuda.shared.array(NUMBERS, f32)
        merged = cuda.shared.array(MERGED, f32)
        sums = cuda.shared.array(SUMS, f32)
        maxima = cuda.shared.array(SUMS, f32)
        query = cuda.local.array(STATE, f32)
        state = cuda.local.array(STATE, f32)
        row = cuda.local.array(VEC, f32)
        largest = cuda.local.array(G, f32)
        total = cuda.local.array(G, f32)
        scores = cuda.local.array(G, f32)
        sequence = pieces[piece * 8]
        token = pieces[piece * 8 + 1]
        first = pieces[piece * 8 + 4]
        stop = pieces[piece * 8 + 5]
        partial = pieces[piece * 8 + 6]
        for g in range(G):
            largest[g] = f32(LOWEST)
            total[g] = f32(0.0)
            for v in range(PER_LANE):
                for e in range(VEC):
                    vector = v * LANES + sub
                    at = (
                        i64(token) * q_stride
                        + (head * group + first_head + g) * D
                        + vector * VEC
                        + e
                    )
                    query[(g * PER_LANE + v) * VEC + e] = (
                        load(q, at) * factor
                        if vector < VECTORS and first_head + g < group
                        else f32(0.0)
                    )
                    state[(g * PER_LANE + v) * VEC + e] = f32(0.0)
        steps = (stop - first + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
        block_id = i32(0)
        if steps > 0:
            block_id = table[sequence * table_width + min(first + place, stop - 1) // block_size]
        for step in range(-NEWEST, steps):
            fetch = step + NEWEST
            if fetch < steps:
                at_row = min(first + fetch * ROWS_AT_ONCE + place, stop - 1)
                slot = fetch % STAGES
                line = (i64(block_id) * block_size + at_row % block_size) * num_kv_heads + head
                if fetch + 1 < steps:
                    following = min(at_row + ROWS_AT_ONCE, stop - 1)
                    block_id = table[sequence * table_width + following // block_size]
                for v in range(PER_LANE):
                    vector = min(v * LANES + sub, VECTORS - 1)
                    to = ((slot * 2 * PER_LANE + v) * THREADS + thread) * 4
                    copy_words(ring, to, keys, line * WORDS + vector * 4)
                    copy_words(ring, to + PER_LANE * THREADS * 4, values, line * WORDS + vector * 4)
                if scaled:
                    copy_word(numbers, slot * 3 * THREADS + thread, key_scales, line)
                    copy_word(numbers, (slot * 3 + 1) * THREADS + thread, value_scales, line)
                if biased:
                    copy_word(numbers, (slot * 3 + 2) * THREADS + thread, bias, line)
            commit_copies()
            if step >= 0:
                wait_copies(NEWEST)
                slot = step % STAGES
                is_row = first + step * ROWS_AT_ONCE + place < stop
                for g in range(G):
                    scores[g] = f32(0.0)
                for v in range(PER_LANE):
                    origin = ((slot * 2 * PER_LANE + v) * THREADS + thread) * 4
                    unpack(load_words(ring, origin), row)
                    for g in range(G):
                        scores[g] += dot(query, (g * PER_LANE + v) * VEC, row, VEC)
                value_scale = f32(lacking)
                if scaled:
                    value_scale *= numbers[(slot * 3 + 1) * THREADS + thread]
                for g in range(G):
                    for shuffle in range(SHUFFLES):
                        scores[g] += cuda.shfl_xor_sync(FULL_WARP, scores[g], 1 << shuffle)
                for g in range(G):
                    score = scores[g]
                    if scaled:
                        score *= numbers[slot * 3 * THREADS + thread]
                    if capped:
                        # tanh(x) = 1 - 2 / (e^2x + 1)
                        grown = exp2_fast(score * f32(2.0 * LOG2_E)) + f32(1.0)
                        score = cap * (f32(1.0) - f32(2.0) * reciprocal_fast(grown))
                    if biased:
                        score += numbers[(slot * 3 + 2) * THREADS + thread] * f32(LOG2_E)
                    if not is_row:
                        score = f32(-float("inf"))
                    if score > largest[g]:
                        shrink = exp2_fast(largest[g] - score)
                        largest[g] = score
                        total[g] *= shrink
                        multiply_all(state, g * MINE, shrink, MINE)
                    weight = exp2_fast(score - largest[g])
                    total[g] += weight
                    scores[g] = weight * value_scale if is_row else f32(0.0)
                for v in range(PER_LANE):
                    origin = ((slot * 2 * PER_LANE + PER_LANE + v) * THREADS + thread) * 4
                    unpack(load_words(ring, origin), row)
                    for g in range(G):
                        add_scaled(state, (g * PER_LANE + v) * VEC, scores[g], row, VEC)
        for g in range(G):
            for shuffle in range(SHUFFLES, 5):
                distance = 1 << shuffle
                theirs = cuda.shfl_xor_sync(FULL_WARP, largest[g], distance)
                both = max(largest[g], theirs)
                mine = exp2_fast(largest[g] - both)
                other = exp2_fast(theirs - both)
                largest[g] = both
                total[g] = (
                    total[g] * mine + cuda.shfl_xor_sync(FULL_WARP, total[g], distance) * other
                )
                for e in range(MINE):
                    held = state[g * MINE + e]
                    state[g * MINE + e] = (
                        held * mine + cuda.shfl_xor_sync(FULL_WARP, held, distance) * other
                    )
            if thread % 32 < LANES:
                for v in range(PER_LANE):
                    vector = v * LANES + sub
                    if vector < VECTORS:
                        for e in range(VEC):
                            merged[(warp * G + g) * D + vector * VEC + e] = state[
                                (g * PER_LANE + v) * VEC + e
                            ]
                if sub == 0:
                    maxima[warp * G + g] = largest[g]
                    sums[warp * G + g] = total[g]
        cuda.syncthreads()
        target = (i64(partial) * num_kv_heads + head) * group + first_head
        for i in range(thread, min(G, group - first_head) * D, THREADS):
            g = i // D
            both = f32(LOWEST)
            for w in range(WARPS):
                both = max(both, maxima[w * G + g])
            found = f32(0.0)
            whole = f32(0.0)
            for w in range(WARPS):
                share = exp2_fast(maxima[w * G + g] - both)
                found += merged[w * G * D + i] * share
                whole += sums[w * G + g] * share
            partial_rows[target * D + i] = found
            if i % D == 0:
                partial_sums[(target + g) * 2] = both
                partial_sums[(target + g) * 2 + 1] = whole

    element, words = P(ELEMENTS[act]), P(u32)
    signature = types.void(
        element, i64, words, words, P(f32), P(f32), P(f32), P(i32), i32, P(i32), P(i32),
        P(f32), P(f32), i32, f32, f32,
    )  # fmt: skip
    return KernelSource(kernel, signature, THREADS)


def attention_merge(head_dim: int, group: int, act: str, tile_rows: int) -> KernelSource:
    """A token's partial results to its output. Grid: tokens at most, KV heads."""
    D, G = head_dim, group
    store = STORES[act]

    def kernel(merges, counts, partial_rows, partial_sums, out, out_stride, num_kv_heads):  # type: ignore[no-untyped-def]
        index = cuda.blockIdx.x
        head = cuda.blockIdx.y
        if index >= counts[1]:
            return
        thread = cuda.threadIdx.x
        token = merges[index * 4]
        first = merges[index * 4 + 1]
        count = merges[index * 4 + 2]
        place = merges[index * 4 + 3]
        for i in range(thread, G * D, THREADS):
            g = i // D
            both = f32(LOWEST)
            found = f32(0.0)
            whole = f32(0.0)
            for part in range(first, first + count):
                at = (i64(part) * num_kv_heads + head) * tile_rows + place * G + g
                theirs = partial_sums[at * 2]
                if theirs > both:
                    shrink = exp2_fast(both - theirs)
                    both = theirs
                    found *= shrink
                    whole *= shrink
                share = exp2_fast(theirs - both)
                whole += partial_sums[at * 2 + 1] * share
                found += partial_rows[at * D + i % D] * share
            # a token that sees nothing gives zeros; a NaN stays one
            result = f32(0.0) if whole == f32(0.0) else found * reciprocal_fast(whole)
            store(out, i64(token) * out_stride + head * G * D + i, result)

    signature = types.void(P(i32), P(i32), P(f32), P(f32), P(ELEMENTS[act]), i64, i32)
    return KernelSource(kernel, signature, THREADS)
