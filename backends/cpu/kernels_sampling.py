"""The draw of one token per row of logits, by the rule that headrace.testing.numpy_sampling writes down.

Logits f32 [R, vocab]; bias, penalties and order in f32, the final comparison s + noise in float64.

Nothing is sorted that need not be. top_k and top_p each keep a prefix of the order (logit descending, id
ascending), so each is one boundary (logit, id). A histogram over [-32, 0] of s finds the bin in which
the boundary lies, and only that bin is sorted. Masses are f32 exponentials summed in float64.

Noise: token t can beat the best score b so far only if 1 - u < e^(s - b), since -ln u >= 1 - u. The
weights e^s are there already, so one multiplication and comparison replaces two logarithms.

Microseconds a row of 49,152 / 262,144 logits, one Zen 5 thread, 8 rows: greedy 6.7 / 14 (17 / 71 with one chain
of comparisons, NaN and the first of the largest looked for apart), temperature 42 / 200, top_k 50 122 / 650,
top_p 0.9 156 / 860, 20 log probabilities 39 / 195 (205 / 1,098 with the sum in float64).
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from headrace.backends.cpu.kernel_cache import kernel
from headrace.backends.cpu.kernels_rows import address_of, exp32, floats
from headrace.backends.cpu.kernels_vector import largest_of

GROUP = 64
"""Tokens that are looked at together: 16 Philox counters."""
BLOCK = 1024
"""Logits of which the largest is found at once: the best one is then looked for in one of these."""
BINS = 1024
RANGE = np.float32(32.0)
"""Bins cover s from -RANGE to 0; the last one holds everything below."""

_LOWEST = np.float32(-np.inf)
_U32 = np.uint64(0xFFFFFFFF)
_STEP = 2.0**-23
_inlined = kernel(inline="always")
"""For what has one caller: it is optimized once, not again in every caller of its caller."""


@kernel()
def _best_of(row):  # type: ignore[no-untyped-def]
    """The largest value, NaN if one is, and the lowest index that has it."""
    best, first = _LOWEST, 0
    for start in range(0, len(row), BLOCK):
        most = np.float32(largest_of(address_of(row) + start * 4, min(BLOCK, len(row) - start)))
        if not most <= best:
            best, first = most, start
        if best != best:
            return best, np.int64(0)
    for i in range(first, len(row)):
        if row[i] >= best:
            return best, np.int64(i)
    return best, np.int64(0)


@kernel()
def philox(counter, position, seed):  # type: ignore[no-untyped-def]
    """The four words of Philox4x32-10 for counter (counter, position, 0, 0)."""
    w0, w1 = np.uint64(counter), np.uint64(position) & _U32
    w2, w3 = np.uint64(0), np.uint64(0)
    k0, k1 = seed & _U32, seed >> np.uint64(32)
    for _ in range(10):
        a = w0 * np.uint64(0xD2511F53)
        b = w2 * np.uint64(0xCD9E8D57)
        w0, w1, w2, w3 = (
            (b >> np.uint64(32)) ^ w1 ^ k0,
            b & _U32,
            (a >> np.uint64(32)) ^ w3 ^ k1,
            a & _U32,
        )
        k0 = (k0 + np.uint64(0x9E3779B9)) & _U32
        k1 = (k1 + np.uint64(0xBB67AE85)) & _U32
    return w0, w1, w2, w3


@kernel()
def _noise_words(group, position, seed, words):  # type: ignore[no-untyped-def]
    """words[64] i4 = the upper 23 bits for the tokens of one group."""
    for i in range(GROUP // 4):
        w0, w1, w2, w3 = philox(group * (GROUP // 4) + i, position, seed)
        words[4 * i] = np.int32(w0 >> np.uint64(9))
        words[4 * i + 1] = np.int32(w1 >> np.uint64(9))
        words[4 * i + 2] = np.int32(w2 >> np.uint64(9))
        words[4 * i + 3] = np.int32(w3 >> np.uint64(9))


@kernel()
def _score(logit, best_logit, temperature, word):  # type: ignore[no-untyped-def]
    u = (np.float64(word) + 0.5) * _STEP
    s = (np.float64(logit) - np.float64(best_logit)) / np.float64(temperature)
    return s - math.log(-math.log(u))


@_inlined
def _may_win(weights, words, factor):  # type: ignore[no-untyped-def]
    """Whether a token of the group may beat the best score, whose exponential `factor` is."""
    found = 0
    for i in range(len(weights)):
        short = np.float32(1.0) - (np.float32(words[i]) + np.float32(0.5)) * np.float32(_STEP)
        found |= short * factor <= weights[i]
    return found != 0


@_inlined
def _draw_noisy(row, weights, best, temperature, position, seed):  # type: ignore[no-untyped-def]
    """The argmax of s + noise over tokens whose weight is above 0. `best` is the best logit's id."""
    words = np.empty(GROUP, np.int32)
    _noise_words(best // GROUP, position, seed, words)
    best_logit = row[best]
    token = np.int64(best)
    score = _score(row[best], best_logit, temperature, words[best % GROUP])
    factor = np.float32(min(math.exp(score) * 0.999, 3e38))
    floor = factor * np.float32(2.0**-24)
    for group in range((len(row) + GROUP - 1) // GROUP):
        first = group * GROUP
        count = min(GROUP, len(row) - first)
        if largest_of(address_of(weights) + first * 4, count) <= floor:
            continue
        _noise_words(group, position, seed, words)
        if not _may_win(weights[first : first + count], words, factor):
            continue
        for i in range(count):
            weight = weights[first + i]
            short = np.float32(1.0) - (np.float32(words[i]) + np.float32(0.5)) * np.float32(_STEP)
            if weight > np.float32(0.0) and short * factor <= weight:
                found = _score(row[first + i], best_logit, temperature, words[i])
                if found > score or (found == score and first + i < token):
                    score, token = found, np.int64(first + i)
                    factor = np.float32(min(math.exp(score) * 0.999, 3e38))
                    floor = factor * np.float32(2.0**-24)
    return token


@kernel()
def _comes_before(row, a, b):  # type: ignore[no-untyped-def]
    return row[a] > row[b] or (row[a] == row[b] and a < b)


@_inlined
def _sort_ids(row, ids):  # type: ignore[no-untyped-def]
    """Sort ids by (logit descending, id ascending): a heap sort, in place."""
    n = len(ids)
    for top in range(n // 2 - 1 + n):
        if top < n // 2:
            parent, end = n // 2 - 1 - top, n
        else:
            end = n - 1 - (top - n // 2)
            ids[0], ids[end] = ids[end], ids[0]
            parent = 0
        while 2 * parent + 1 < end:
            child = 2 * parent + 1
            if child + 1 < end and _comes_before(row, ids[child], ids[child + 1]):
                child += 1
            if not _comes_before(row, ids[parent], ids[child]):
                break
            ids[parent], ids[child] = ids[child], ids[parent]
            parent = child


@kernel()
def _bin_of(logit, best_logit, per_unit):  # type: ignore[no-untyped-def]
    """Bins count down from the best logit; the last holds everything far below."""
    return np.int64(min((best_logit - logit) * per_unit, np.float32(BINS - 1)))


@kernel()
def _ids_in_bin(row, weights, best_logit, per_unit, wanted, floor):  # type: ignore[no-untyped-def]
    """Ids of one bin in their order; dropped tokens (weight below `floor`) left out."""
    count = 0
    for i in range(len(row)):
        if weights[i] >= floor and _bin_of(row[i], best_logit, per_unit) == wanted:
            count += 1
    ids = np.empty(count, np.int32)
    count = 0
    for i in range(len(row)):
        if weights[i] >= floor and _bin_of(row[i], best_logit, per_unit) == wanted:
            ids[count] = i
            count += 1
    _sort_ids(row, ids)
    return ids


@kernel()
def _drop_after(row, weights, last):  # type: ignore[no-untyped-def]
    """Weight -1 for every token that comes after token `last`."""
    logit = row[last]
    for i in range(len(row)):
        if row[i] < logit or (row[i] == logit and i > last):
            weights[i] = np.float32(-1.0)


@_inlined
def _keep_top_k(row, weights, best_logit, per_unit, top_k):  # type: ignore[no-untyped-def]
    counts = np.zeros(BINS, np.int64)
    for i in range(len(row)):
        counts[_bin_of(row[i], best_logit, per_unit)] += 1
    before = 0
    for index in range(BINS):
        if before + counts[index] >= top_k:
            ids = _ids_in_bin(row, weights, best_logit, per_unit, index, np.float32(0.0))
            _drop_after(row, weights, ids[top_k - before - 1])
            return
        before += counts[index]


@_inlined
def _keep_top_p(row, weights, best_logit, per_unit, temperature, top_p):  # type: ignore[no-untyped-def]
    masses = np.zeros(BINS, np.float64)
    for i in range(len(row)):
        if weights[i] > np.float32(0.0):
            masses[_bin_of(row[i], best_logit, per_unit)] += np.float64(weights[i])
    total = masses.sum()
    mass, before, chosen = 0.0, 0.0, np.int64(0)
    for index in range(BINS):
        if masses[index] > 0.0 and (index == 0 or mass / total < top_p):
            before, chosen = mass, np.int64(index)
        mass += masses[index]
    ids = _ids_in_bin(row, weights, best_logit, per_unit, chosen, np.float32(1e-38))
    last = ids[0]
    for token in ids:
        if before / total >= top_p and token != ids[0]:
            break
        last = token
        s = (np.float64(row[token]) - np.float64(best_logit)) / np.float64(temperature)
        before += math.exp(s)
    _drop_after(row, weights, last)


@_inlined
def _filter(row, weights, best_logit, temperature, top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    """Set the weights of tokens that a filter drops to -1."""
    if 0 < top_k < len(row) or top_p < np.float32(1.0):
        lowest = best_logit
        for i in range(len(row)):
            lowest = row[i] if row[i] < lowest and row[i] > _LOWEST else lowest
        width = min(best_logit - lowest, RANGE * temperature)
        per_unit = np.float32(BINS) / width if width > np.float32(0.0) else np.float32(1.0)
        per_unit = min(per_unit, np.float32(1e30))
        if 0 < top_k < len(row):
            _keep_top_k(row, weights, best_logit, per_unit, top_k)
        if top_p < np.float32(1.0):
            _keep_top_p(row, weights, best_logit, per_unit, temperature, top_p)
    if min_p > np.float32(0.0):
        floor = math.log(np.float64(min_p))
        for i in range(len(row)):
            s = (np.float64(row[i]) - np.float64(best_logit)) / np.float64(temperature)
            if s < floor:
                weights[i] = np.float32(-1.0)


@kernel()
def _draw(row, weights, best, temperature, top_k, top_p, min_p, position, seed):  # type: ignore[no-untyped-def]
    best_logit = row[best]
    for i in range(len(row)):
        weights[i] = exp32((row[i] - best_logit) / temperature)
    _filter(row, weights, best_logit, temperature, top_k, top_p, min_p)
    return _draw_noisy(row, weights, best, temperature, position, seed)


@_inlined
def _adjust(row, bias_ids, bias_values):  # type: ignore[no-untyped-def]
    for i in range(len(bias_ids)):
        row[bias_ids[i]] += bias_values[i]


@_inlined
def _penalize(row, ids, counts, presence, frequency, repetition):  # type: ignore[no-untyped-def]
    for i in range(len(ids)):
        value = row[ids[i]]
        value = value / repetition if value > np.float32(0.0) else value * repetition
        value -= frequency * np.float32(counts[i])
        if counts[i] > 0:
            value -= presence
        row[ids[i]] = value


@_inlined
def _apply_mask(row, bits):  # type: ignore[no-untyped-def]
    for i in range(len(row)):
        if not (bits[i // 32] >> np.int32(i % 32)) & np.int32(1):
            row[i] = _LOWEST


@kernel(fastmath={"reassoc", "contract"})
def _sum_exp(values, largest):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(len(values)):
        total += exp32(values[i] - largest)
    return total


@_inlined
def _log_sum_exp(row, best_logit):  # type: ignore[no-untyped-def]
    """Sums of 256 in f32, their sum in float64: 1e-6 of the total at most."""
    total = 0.0
    for start in range(0, len(row), 256):
        total += np.float64(_sum_exp(row[start : start + 256], best_logit))
    return np.float64(best_logit) + math.log(total)


@_inlined
def _list_best(row, count, ids):  # type: ignore[no-untyped-def]
    """ids[:count] = the best tokens, best first, ties by lower id."""
    held = 0
    for i in range(len(row)):
        if held == count and row[i] <= row[ids[count - 1]]:
            continue
        place = held if held < count else count - 1
        while place > 0 and row[i] > row[ids[place - 1]]:
            ids[place] = ids[place - 1]
            place -= 1
        ids[place] = i
        held = min(held + 1, count)


@_inlined
def sample_row(  # type: ignore[no-untyped-def]
    r, raw, scratch, floats_of, ints_of, longs_of, seeds, history_ids, history_counts, bias_ids, bias_values,
    mask, token_ids, failed, logprobs, top_ids, top_logprobs,
):  # fmt: skip
    """Draw or score row r. Columns of floats_of: temperature, top_p, min_p, presence, frequency,
    repetition; of ints_of: top_k, num_logprobs, score_token_id, history start and end, bias start and end."""
    vocab = len(raw)
    raw_best, best = _best_of(raw)
    if not np.isfinite(raw_best):
        failed[r] = True
        return
    scored = ints_of[r, 2]
    temperature, repetition = floats_of[r, 0], floats_of[r, 5]
    token = np.int64(scored)
    if scored < 0:
        row, weights = raw, scratch[vocab:]
        bias_first, bias_last = ints_of[r, 5], ints_of[r, 6]
        first, last = ints_of[r, 3], ints_of[r, 4]
        if len(mask) > 0 or bias_last > bias_first or last > first:
            row = scratch[:vocab]
            for i in range(vocab):
                row[i] = raw[i]
            if len(mask) > 0:
                _apply_mask(row, mask)
            _adjust(row, bias_ids[bias_first:bias_last], bias_values[bias_first:bias_last])
            best_logit, best = _best_of(row)
            if not np.isfinite(best_logit):
                failed[r] = True
                return
            if last > first:
                _penalize(
                    row, history_ids[first:last], history_counts[first:last],
                    floats_of[r, 3], floats_of[r, 4], repetition,
                )  # fmt: skip
                best = _best_of(row)[1]
        token = best
        if temperature > np.float32(0.0):
            token = _draw(
                row, weights, token, temperature, ints_of[r, 0], floats_of[r, 1], floats_of[r, 2],
                longs_of[r], seeds[r],
            )  # fmt: skip
    token_ids[r] = token
    count = min(int(ints_of[r, 1]), vocab)
    if count >= 0:
        total = _log_sum_exp(raw, raw_best)
        logprobs[r] = np.float64(raw[token]) - total
        if count > 0:
            _list_best(raw, count, top_ids[r])
            for i in range(count):
                top_logprobs[r, i] = np.float64(raw[top_ids[r, i]]) - total


@kernel()
def sample_share(  # type: ignore[no-untyped-def]
    worker, num_workers, logits_at, stride, vocab, scratch, floats_of, ints_of, longs_of, seeds, history_ids,
    history_counts, bias_ids, bias_values, mask_of, masks, token_ids, failed, logprobs, top_ids, top_logprobs,
):  # fmt: skip
    """Rows worker, worker + num_workers, ... of logits f32 whose rows are `stride` bytes apart."""
    for r in range(worker, len(token_ids), num_workers):
        mask = masks[mask_of[r]] if mask_of[r] >= 0 else masks[0][:0]
        sample_row(
            r, floats(logits_at + r * stride, vocab), scratch[worker], floats_of, ints_of, longs_of,
            seeds, history_ids, history_counts, bias_ids, bias_values, mask, token_ids, failed,
            logprobs, top_ids, top_logprobs,
        )  # fmt: skip


@kernel(parallel=True)
def sample_parallel(  # type: ignore[no-untyped-def]
    num_workers, logits_at, stride, vocab, scratch, floats_of, ints_of, longs_of, seeds, history_ids,
    history_counts, bias_ids, bias_values, mask_of, masks, token_ids, failed, logprobs, top_ids, top_logprobs,
):  # fmt: skip
    for worker in prange(num_workers):
        sample_share(
            np.int64(worker), num_workers, logits_at, stride, vocab, scratch, floats_of, ints_of,
            longs_of, seeds, history_ids, history_counts, bias_ids, bias_values, mask_of, masks,
            token_ids, failed,
            logprobs, top_ids, top_logprobs,
        )  # fmt: skip
