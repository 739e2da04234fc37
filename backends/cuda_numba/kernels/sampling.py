"""The draw of one token per row by the rule of headrace.testing.numpy_sampling, without sorting the vocabulary.

Order is (logit descending, id ascending), held in one 54-bit key, so that top_k, top_p and the list of best
tokens are each one cut in it: the largest key at which what lies at or above it weighs what is wanted. A
cut is found 11 bits at a time from histograms; weights are integers, so that the order of additions does not
matter. Several blocks share a row and meet between launches only.

| version | H200 us, 64 x 128k: greedy / top-k + top-p |
|---|---|
| one launch per digit, noise in float64 for the few tokens that single precision cannot rule out | |
"""

from __future__ import annotations

import math
from typing import Any

from numba import cuda
from numba.cuda import types

from headrace.backends.cuda_numba import primitives
from headrace.backends.cuda_numba.kernels.formats import device
from headrace.backends.cuda_numba.kernels.source import FULL_WARP, KernelSource

load_words, word_as_float = primitives.load_words, primitives.word_as_float
float_as_word, multiply_high = primitives.float_as_word, primitives.multiply_high
atomic_add, exp2_fast, log2_fast = primitives.atomic_add, primitives.exp2_fast, primitives.log2_fast
f32, f64, i32, i64 = types.float32, types.float64, types.int32, types.int64
u32, u64 = types.uint32, types.uint64
P = types.CPointer

THREADS, WARPS = 256, 8
SHARED_MAXIMA = 3 * WARPS
BINS = 2048
BINS_PER_THREAD = BINS // THREADS
ID_BITS = 22
MAX_ID = (1 << ID_BITS) - 1
LEVELS = 5
FLOATS, INTS = 6, 8
BY_COUNT, BY_MASS, BEST = 0, 1, 2
CUT_WORDS = 4
"""A cut: digits found so far (once all are: the smallest key kept), weight above, weight wanted, 1 if done."""
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
UNIT = 1099511627776.0
"""2 ** 40: the weight of the best token."""
LARGEST_NOISE = 16.7
INFINITY = float("inf")


@device
def _shift_of(level):  # type: ignore[no-untyped-def]
    """The digits are 11, 11, 10 bits of the logit and 11, 11 of the id."""
    if level == 0:
        return 43
    if level == 1:
        return 32
    return 22 if level == 2 else (11 if level == 3 else 0)


@device
def _width_of(level):  # type: ignore[no-untyped-def]
    return 10 if level == 2 else 11


@device
def _key_of(logit, token):  # type: ignore[no-untyped-def]
    bits = float_as_word(logit + f32(0.0))  # -0 equals 0
    if bits & u32(0x80000000):
        ordered = i64(bits ^ u32(0xFFFFFFFF))
    else:
        ordered = i64(bits) + i64(0x80000000)
    return (ordered << i64(ID_BITS)) + (i64(MAX_ID) - i64(token))


@device
def _weight_of(s):  # type: ignore[no-untyped-def]
    return i64(exp2_fast(s * f32(LOG2_E)) * f32(UNIT))


@device
def _is_adjusted(ints, row):  # type: ignore[no-untyped-def]
    at = row * INTS
    return ints[at + 4] > ints[at + 3] or ints[at + 6] > ints[at + 5] or ints[at + 7] >= 0


@device
def _draws(floats, ints, row):  # type: ignore[no-untyped-def]
    return ints[row * INTS + 2] < 0 and floats[row * FLOATS] > f32(0.0)


@device
def _is_active(mode, floats, ints, row, vocab):  # type: ignore[no-untyped-def]
    if mode == BEST:
        return 0 < ints[row * INTS + 1] < vocab
    if not _draws(floats, ints, row):
        return False
    return ints[row * INTS] > 0 if mode == BY_COUNT else floats[row * FLOATS + 1] < f32(1.0)


@device
def _row_maxima(maxima, row, num_shares):  # type: ignore[no-untyped-def]
    """Largest logit of the row untouched and adjusted, 1 where it holds NaN; all lanes take part."""
    share = min(cuda.threadIdx.x % 32, num_shares - 1)
    at = (i64(row) * num_shares + share) * 4
    raw, adjusted, nan = maxima[at], maxima[at + 1], maxima[at + 2]
    for shuffle in range(5):
        raw = max(raw, cuda.shfl_xor_sync(FULL_WARP, raw, 1 << shuffle))
        adjusted = max(adjusted, cuda.shfl_xor_sync(FULL_WARP, adjusted, 1 << shuffle))
        nan = max(nan, cuda.shfl_xor_sync(FULL_WARP, nan, 1 << shuffle))
    return raw, adjusted, nan


@device
def _is_finite(value):  # type: ignore[no-untyped-def]
    return abs(value) < f32(INFINITY)


@device
def _philox(four, position, seed, words):  # type: ignore[no-untyped-def]
    """Philox4x32-10 (Salmon et al., SC 2011): the words of counter (four, position, 0, 0)."""
    key_0, key_1 = u32(seed & u64(0xFFFFFFFF)), u32(seed >> u64(32))
    c0, c1, c2, c3 = u32(four), u32(position), u32(0), u32(0)
    for _ in range(10):
        high_0, low_0 = multiply_high(u32(0xD2511F53), c0), u32(u32(0xD2511F53) * c0)
        high_1, low_1 = multiply_high(u32(0xCD9E8D57), c2), u32(u32(0xCD9E8D57) * c2)
        c0, c1 = u32(high_1 ^ c1 ^ key_0), low_1
        c2, c3 = u32(high_0 ^ c3 ^ key_1), low_0
        key_0, key_1 = u32(key_0 + u32(0x9E3779B9)), u32(key_1 + u32(0xBB67AE85))
    words[0], words[1], words[2], words[3] = c0, c1, c2, c3


def _four_loader(vector: int) -> Any:
    """Logits 4 * four .. of the row at `base`; what lies past its end is -inf."""
    if vector == 4:

        @device
        def load_four(logits, base, vocab, four, x):  # type: ignore[no-untyped-def]
            a, b, c, d = load_words(logits, base + 4 * four)
            x[0], x[1], x[2], x[3] = (
                word_as_float(a), word_as_float(b), word_as_float(c), word_as_float(d),
            )  # fmt: skip
    else:

        @device
        def load_four(logits, base, vocab, four, x):  # type: ignore[no-untyped-def]
            for i in range(4):
                x[i] = logits[base + 4 * four + i] if 4 * four + i < vocab else f32(-INFINITY)

    return load_four


def adjust_rows() -> KernelSource:
    """The adjusted copy of rows that have a mask, a bias or penalties. Grid: rows."""

    def kernel(  # type: ignore[no-untyped-def]
        raw, adjusted, floats, ints, history_ids, history_counts, bias_ids, bias_values, masks,
        adjust_failed, vocab,
    ):  # fmt: skip
        row = cuda.blockIdx.x
        if not _is_adjusted(ints, row):
            return
        thread = cuda.threadIdx.x
        largest_of = cuda.shared.array(WARPS, f32)
        base = i64(row) * vocab
        at = row * INTS
        mask = i64(ints[at + 7]) * ((vocab + 31) // 32)
        for i in range(thread, vocab, THREADS):
            allowed = True
            if ints[at + 7] >= 0:
                allowed = (masks[mask + i // 32] >> u32(i % 32)) & u32(1) != 0
            adjusted[base + i] = raw[base + i] if allowed else f32(-INFINITY)
        cuda.syncthreads()
        for i in range(ints[at + 5] + thread, ints[at + 6], THREADS):
            adjusted[base + bias_ids[i]] += bias_values[i]
        cuda.syncthreads()
        largest = f32(-INFINITY)
        for i in range(thread, vocab, THREADS):
            largest = max(largest, adjusted[base + i])
        for shuffle in range(5):
            largest = max(largest, cuda.shfl_xor_sync(FULL_WARP, largest, 1 << shuffle))
        if thread % 32 == 0:
            largest_of[thread // 32] = largest
        cuda.syncthreads()
        for w in range(WARPS):
            largest = max(largest, largest_of[w])
        if thread == 0:
            adjust_failed[row] = i32(0) if _is_finite(largest) else i32(1)
        presence = floats[row * FLOATS + 3]
        frequency = floats[row * FLOATS + 4]
        repetition = floats[row * FLOATS + 5]
        for i in range(ints[at + 3] + thread, ints[at + 4], THREADS):
            x = adjusted[base + history_ids[i]]
            x = x / repetition if x > f32(0.0) else x * repetition
            x -= frequency * f32(history_counts[i])
            adjusted[base + history_ids[i]] = x - presence if history_counts[i] > 0 else x

    ints, floats = P(i32), P(f32)
    signature = types.void(
        floats, floats, floats, ints, ints, ints, ints, floats, P(u32), ints, i32
    )
    return KernelSource(kernel, signature, THREADS)


def row_statistics(vector: int) -> KernelSource:
    """Each share's largest logits, and whether it holds NaN. Grid: blocks of a row, rows."""
    load_four = _four_loader(vector)

    def kernel(raw, adjusted, ints, maxima, vocab):  # type: ignore[no-untyped-def]
        row = cuda.blockIdx.y
        thread = cuda.threadIdx.x
        shared = cuda.shared.array(SHARED_MAXIMA, f32)
        x = cuda.local.array(4, f32)
        base = i64(row) * vocab
        fours = (vocab + 3) // 4
        share = (fours + cuda.gridDim.x - 1) // cuda.gridDim.x
        first = cuda.blockIdx.x * share
        last = min(fours, first + share)
        largest = f32(-INFINITY)
        nan = f32(0.0)
        for four in range(first + thread, last, THREADS):
            load_four(raw, base, vocab, four, x)
            for i in range(4):
                largest = max(largest, x[i])
                if x[i] != x[i]:
                    nan = f32(1.0)
        moved = largest
        if _is_adjusted(ints, row):
            moved = f32(-INFINITY)
            for four in range(first + thread, last, THREADS):
                load_four(adjusted, base, vocab, four, x)
                for i in range(4):
                    moved = max(moved, x[i])
        for shuffle in range(5):
            largest = max(largest, cuda.shfl_xor_sync(FULL_WARP, largest, 1 << shuffle))
            moved = max(moved, cuda.shfl_xor_sync(FULL_WARP, moved, 1 << shuffle))
            nan = max(nan, cuda.shfl_xor_sync(FULL_WARP, nan, 1 << shuffle))
        if thread % 32 == 0:
            shared[thread // 32 * 3] = largest
            shared[thread // 32 * 3 + 1] = moved
            shared[thread // 32 * 3 + 2] = nan
        cuda.syncthreads()
        if thread == 0:
            for w in range(WARPS):
                largest = max(largest, shared[w * 3])
                moved = max(moved, shared[w * 3 + 1])
                nan = max(nan, shared[w * 3 + 2])
            at = (i64(row) * cuda.gridDim.x + cuda.blockIdx.x) * 4
            maxima[at] = largest
            maxima[at + 1] = moved
            maxima[at + 2] = nan

    signature = types.void(P(f32), P(f32), P(i32), P(f32), i32)
    return KernelSource(kernel, signature, THREADS)


def cut_rows(vector: int) -> KernelSource:
    """Level 0 begins a cut; each next one chooses a digit and counts the one after; level 5 chooses the last.

    Grid: blocks of a row (1 at level 5), rows.
    """
    load_four = _four_loader(vector)

    def kernel(  # type: ignore[no-untyped-def]
        raw, adjusted, floats, ints, cuts, histograms, maxima, vocab, num_rows, mode, level, num_shares,
    ):  # fmt: skip
        row = cuda.blockIdx.y
        thread = cuda.threadIdx.x
        counts = cuda.shared.array(BINS, i64)
        totals = cuda.shared.array(WARPS, i64)
        chosen = cuda.shared.array(CUT_WORDS, i64)
        x = cuda.local.array(4, f32)
        raw_largest, adjusted_largest, nan = _row_maxima(maxima, row, num_shares)
        if not _is_active(mode, floats, ints, row, vocab) or nan != f32(0.0):
            return
        if not _is_finite(raw_largest if mode == BEST else adjusted_largest):
            return
        prefix = i64(0)
        above = i64(0)
        done = i64(0)
        wanted = i64(ints[row * INTS + 1] if mode == BEST else ints[row * INTS])
        if level > 0:
            cut = ((i64(mode) * (LEVELS + 1) + level - 1) * num_rows + row) * CUT_WORDS
            prefix, above, wanted, done = cuts[cut], cuts[cut + 1], cuts[cut + 2], cuts[cut + 3]
            if done == 0:
                histogram = ((i64(mode) * LEVELS + level - 1) * num_rows + row) * BINS
                top = BINS - 1 - thread * BINS_PER_THREAD  # bins from the best down
                mine = i64(0)
                for i in range(BINS_PER_THREAD):
                    mine += histograms[histogram + top - i]
                before = mine
                for shuffle in range(5):
                    other = cuda.shfl_up_sync(FULL_WARP, before, 1 << shuffle)
                    if thread % 32 >= 1 << shuffle:
                        before += other
                if thread % 32 == 31:
                    totals[thread // 32] = before
                cuda.syncthreads()
                before -= mine
                total = i64(0)
                for w in range(WARPS):
                    if w == thread // 32:
                        before += total
                    total += totals[w]
                if mode == BY_MASS and level == 1:
                    # a token stays while the mass before it is below top_p of all mass
                    part = i64(math.ceil(f64(floats[row * FLOATS + 1]) * f64(total)))
                    wanted = min(max(part, i64(1)), total)
                before += above
                if before < wanted <= before + mine:
                    place = i64(top)
                    while before + histograms[histogram + place] < wanted:
                        before += histograms[histogram + place]
                        place -= 1
                    chosen[0] = prefix + (place << i64(_shift_of(level - 1)))
                    chosen[1] = before
                    chosen[2] = wanted
                    chosen[3] = i64(1 if before + histograms[histogram + place] == wanted else 0)
                cuda.syncthreads()
                prefix, above, wanted, done = chosen[0], chosen[1], chosen[2], chosen[3]
        if cuda.blockIdx.x == 0 and thread == 0:
            cut = ((i64(mode) * (LEVELS + 1) + level) * num_rows + row) * CUT_WORDS
            cuts[cut], cuts[cut + 1], cuts[cut + 2], cuts[cut + 3] = prefix, above, wanted, done
        if level == LEVELS or done != 0:
            return
        for i in range(thread, BINS, THREADS):
            counts[i] = i64(0)
        cuda.syncthreads()
        floor = i64(0)
        if mode == BY_MASS and _is_active(BY_COUNT, floats, ints, row, vocab):
            floor = cuts[(i64(LEVELS) * num_rows + row) * CUT_WORDS]
        coldness = f32(1.0)
        if mode == BY_MASS:
            coldness = f32(1.0) / floats[row * FLOATS]
        shift = i64(_shift_of(level))
        width = i64(_width_of(level))
        base = i64(row) * vocab
        moved = mode != BEST and _is_adjusted(ints, row)
        fours = (vocab + 3) // 4
        share = (fours + cuda.gridDim.x - 1) // cuda.gridDim.x
        first = cuda.blockIdx.x * share
        for four in range(first + thread, min(fours, first + share), THREADS):
            if moved:
                load_four(adjusted, base, vocab, four, x)
            else:
                load_four(raw, base, vocab, four, x)
            for i in range(4):
                key = _key_of(x[i], 4 * four + i)
                same = key >> (shift + width) == prefix >> (shift + width)
                if same and key >= floor and 4 * four + i < vocab:
                    weight = i64(1)
                    if mode == BY_MASS:
                        weight = _weight_of((x[i] - adjusted_largest) * coldness)
                    if weight != 0:
                        digit = (key >> shift) & ((i64(1) << width) - 1)
                        atomic_add(counts, digit, weight)
        cuda.syncthreads()
        histogram = ((i64(mode) * LEVELS + level) * num_rows + row) * BINS
        for i in range(thread, BINS, THREADS):
            if counts[i] != 0:
                atomic_add(histograms, histogram + i, counts[i])

    signature = types.void(
        P(f32), P(f32), P(f32), P(i32), P(i64), P(i64), P(f32), i32, i32, i32, i32, i32
    )
    return KernelSource(kernel, signature, THREADS)


def draw_shares(vector: int) -> KernelSource:
    """Each share's best token, and what the row's log probabilities need. Grid: blocks of a row, rows."""
    load_four = _four_loader(vector)

    def kernel(  # type: ignore[no-untyped-def]
        raw, adjusted, floats, ints, cuts, maxima, seeds, positions, scores, tokens, sums, listed,
        num_listed, vocab, num_rows, most,
    ):  # fmt: skip
        row = cuda.blockIdx.y
        thread = cuda.threadIdx.x
        best_scores = cuda.shared.array(WARPS, f64)
        best_tokens = cuda.shared.array(WARPS, i64)
        x = cuda.local.array(4, f32)
        words = cuda.local.array(4, u32)
        raw_largest, largest, nan = _row_maxima(maxima, row, cuda.gridDim.x)
        if nan != f32(0.0) or not _is_finite(raw_largest):
            return
        base = i64(row) * vocab
        fours = (vocab + 3) // 4
        share = (fours + cuda.gridDim.x - 1) // cuda.gridDim.x
        first = cuda.blockIdx.x * share
        last = min(fours, first + share)
        num_logprobs = ints[row * INTS + 1]
        if num_logprobs >= 0:
            best_cut = i64(0)
            if _is_active(BEST, floats, ints, row, vocab):
                best_cut = cuts[((i64(BEST) * (LEVELS + 1) + LEVELS) * num_rows + row) * CUT_WORDS]
            mass = i64(0)
            for four in range(first + thread, last, THREADS):
                load_four(raw, base, vocab, four, x)
                for i in range(4):
                    mass += _weight_of(x[i] - raw_largest)  # nothing past the end: it is -inf
                    key = _key_of(x[i], 4 * four + i)
                    if num_logprobs > 0 and key >= best_cut and 4 * four + i < vocab:
                        listed[i64(row) * most + atomic_add(num_listed, row, i32(1))] = key
            atomic_add(sums, row, mass)
        if ints[row * INTS + 2] >= 0 or not _is_finite(largest):
            return
        floor = i64(0)
        for mode in range(2):
            if _is_active(mode, floats, ints, row, vocab):
                cut = ((i64(mode) * (LEVELS + 1) + LEVELS) * num_rows + row) * CUT_WORDS
                floor = max(floor, cuts[cut])
        temperature = floats[row * FLOATS]
        coldness = f32(1.0) / max(temperature, f32(1e-30))
        lowest = f64(-INFINITY)
        if floats[row * FLOATS + 2] > f32(0.0):
            lowest = math.log(f64(floats[row * FLOATS + 2]))
        seed = seeds[row]
        position = u32(positions[row] & i64(0xFFFFFFFF))
        moved = _is_adjusted(ints, row)
        noisy = _draws(floats, ints, row)
        score = f64(-INFINITY)
        token = i64(0x7FFFFFFFFFFFFFFF)
        for four in range(first + thread, last, THREADS):
            if moved:
                load_four(adjusted, base, vocab, four, x)
            else:
                load_four(raw, base, vocab, four, x)
            if noisy:
                near = max(max(x[0], x[1]), max(x[2], x[3]))
                if (near - largest) * coldness + f32(LARGEST_NOISE) < f32(score):
                    continue
                _philox(four, position, seed, words)
            for i in range(4):
                at = i64(4 * four + i)
                if at >= vocab:
                    continue
                found = f64(x[i])
                if noisy:
                    # noise is at most -ln(1 - u), which is exact enough to rule out nearly all
                    u = (f32(words[i] >> u32(9)) + f32(0.5)) * f32(1.1920928955078125e-7)
                    s = (x[i] - largest) * coldness
                    if s - log2_fast(f32(1.0) - u) * f32(LN_2) + f32(0.01) < f32(score):
                        continue
                    exact = (f64(x[i]) - f64(largest)) / f64(temperature)
                    if exact < lowest or _key_of(x[i], at) < floor:
                        continue
                    found = exact - math.log(-math.log(f64(u)))
                if found > score or (found == score and at < token):
                    score, token = found, at
        for shuffle in range(5):
            other = cuda.shfl_xor_sync(FULL_WARP, score, 1 << shuffle)
            theirs = cuda.shfl_xor_sync(FULL_WARP, token, 1 << shuffle)
            if other > score or (other == score and theirs < token):
                score, token = other, theirs
        if thread % 32 == 0:
            best_scores[thread // 32] = score
            best_tokens[thread // 32] = token
        cuda.syncthreads()
        if thread == 0:
            for w in range(WARPS):
                other, theirs = best_scores[w], best_tokens[w]
                if other > score or (other == score and theirs < token):
                    score, token = other, theirs
            at = i64(row) * cuda.gridDim.x + cuda.blockIdx.x
            scores[at] = score
            tokens[at] = token

    signature = types.void(
        P(f32), P(f32), P(f32), P(i32), P(i64), P(f32), P(u64), P(i64), P(f64), P(i64), P(i64),
        P(i64), P(i32), i32, i32, i32,
    )  # fmt: skip
    return KernelSource(kernel, signature, THREADS)


def finish_rows() -> KernelSource:
    """The best of a row's shares, and its log probabilities. Grid: rows; one warp."""

    def kernel(  # type: ignore[no-untyped-def]
        raw, ints, maxima, scores, tokens, sums, listed, adjust_failed, token_ids, failed, logprobs,
        top_token_ids, top_logprobs, vocab, most, num_shares,
    ):  # fmt: skip
        row = cuda.blockIdx.x
        lane = cuda.threadIdx.x
        raw_largest, _, nan = _row_maxima(maxima, row, num_shares)
        scored = ints[row * INTS + 2]
        bad = nan != f32(0.0) or not _is_finite(raw_largest)
        if scored < 0 and _is_adjusted(ints, row) and adjust_failed[row] != 0:
            bad = True
        if lane == 0:
            failed[row] = i32(1 if bad else 0)
            token_ids[row] = i32(0)
        if bad:
            return
        token = i64(scored)
        if scored < 0:
            at = i64(row) * num_shares + min(lane, num_shares - 1)
            score, token = scores[at], tokens[at]
            for shuffle in range(5):
                other = cuda.shfl_xor_sync(FULL_WARP, score, 1 << shuffle)
                theirs = cuda.shfl_xor_sync(FULL_WARP, token, 1 << shuffle)
                if other > score or (other == score and theirs < token):
                    score, token = other, theirs
        if lane == 0:
            token_ids[row] = i32(token)
        count = ints[row * INTS + 1]
        if count < 0:
            return
        base = i64(row) * vocab
        rest = math.log(f64(sums[row]) / UNIT)
        if lane == 0:
            logprobs[row] = f32(f64(raw[base + token]) - f64(raw_largest) - rest)
        start = i64(row) * most
        for i in range(lane, count, 32):
            key = listed[start + i]
            place = i64(0)  # the number of better ones
            for j in range(count):
                if listed[start + j] > key:
                    place += 1
            best = i64(MAX_ID) - (key & i64(MAX_ID))
            top_token_ids[start + place] = i32(best)
            top_logprobs[start + place] = f32(f64(raw[base + best]) - f64(raw_largest) - rest)

    signature = types.void(
        P(f32), P(i32), P(f32), P(f64), P(i64), P(i64), P(i64), P(i32), P(i32), P(i32), P(f32),
        P(i32), P(f32), i32, i32, i32,
    )  # fmt: skip
    return KernelSource(kernel, signature, 32)
