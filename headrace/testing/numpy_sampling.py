"""The sampling rule in float64 NumPy, one row at a time: what every backend's draw is compared with.

A row of logits is treated in this order:

1.  Log probabilities, where asked for, are log_softmax of the untouched row. The best `num_logprobs`
    tokens are listed best first, ties by lower id. A row that only scores a token (`score_token_ids`)
    ends here and draws nothing.
2.  A grammar's mask sets the tokens it forbids to -inf; `logit_bias` is added (-inf forbids).
3.  Penalties. Repetition: the logit of every token in the history (prompt or output) is divided by
    the penalty where it is above 0, else multiplied by it. Then frequency * count and, where count
    is above 0, presence are subtracted; counts are of the output only.
4.  Temperature 0: the token is the argmax of what is left, and nothing below applies.
    Else s = (logit - largest logit) / temperature.
5.  top_k keeps the k largest of s, exactly k, ties by lower id.
6.  top_p: over the softmax of the tokens kept so far, in the order of (s descending, id ascending),
    a token stays while the mass before it is below top_p. The first always stays.
7.  min_p drops the tokens whose probability is below min_p times the largest one: s < ln(min_p).
8.  The token is the argmax of s + Gumbel noise over the tokens kept.

All ties go to the lower id. Noise of token t at position p of a sequence with the 64-bit seed k:
Philox4x32-10 with key (k's low word, k's high word) and counter (t // 4, p, 0, 0); x is word t % 4 of its
output; u = ((x >> 9) + 0.5) * 2^-23, exact in float32 and never 0 or 1; noise = -ln(-ln u).

A row fails when its logits hold NaN or when, after step 2, its largest logit is not finite. It gets
token 0. Entries of the log probability arrays that no row asked for are 0 (-1 among the ids).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.types import SamplingBatch, StepResult, TokenMasks

if TYPE_CHECKING:
    from numpy.typing import NDArray

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
_LOW_WORD = np.uint64(0xFFFFFFFF)


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Return the four words for every counter [n, 4] (Philox4x32-10, Salmon et al., SC 2011)."""
    words = [counter[:, i].astype(np.uint64) for i in range(4)]
    key_low, key_high = key
    for _ in range(PHILOX_ROUNDS):
        product_0 = words[0] * np.uint64(PHILOX_MULTIPLIERS[0])
        product_1 = words[2] * np.uint64(PHILOX_MULTIPLIERS[1])
        words = [
            (product_1 >> np.uint64(32)) ^ words[1] ^ np.uint64(key_low),
            product_1 & _LOW_WORD,
            (product_0 >> np.uint64(32)) ^ words[3] ^ np.uint64(key_high),
            product_0 & _LOW_WORD,
        ]
        key_low = (key_low + PHILOX_WEYL[0]) & 0xFFFFFFFF
        key_high = (key_high + PHILOX_WEYL[1]) & 0xFFFFFFFF
    return np.stack(words, axis=1).astype(np.uint32)


def gumbel_noise(seed: int, position: int, num_tokens: int) -> NDArray[np.float64]:
    """Return the noise of tokens 0 .. num_tokens - 1."""
    counter = np.zeros(((num_tokens + 3) // 4, 4), np.uint32)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1] = position & 0xFFFFFFFF
    x = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:num_tokens]
    u = ((x >> np.uint32(9)).astype(np.float64) + 0.5) * 2.0**-23
    return -np.log(-np.log(u))


def log_softmax(row: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = row - row.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def best_first(row: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return token ids by value descending, ties by lower id."""
    return np.argsort(-row, kind="stable")


def allowed_tokens(bits: NDArray[np.int32], num_tokens: int) -> NDArray[np.bool_]:
    """Unpack one row of TokenMasks: bit t % 32 of word t // 32 allows token t."""
    tokens = np.arange(num_tokens)
    words = bits.view(np.uint32)[tokens // 32]
    return np.asarray((words >> (tokens % 32).astype(np.uint32)) & 1 == 1)


def add_bias(row: NDArray[np.float64], sampling: SamplingBatch, index: int) -> None:
    first, last = sampling.bias_starts[index], sampling.bias_starts[index + 1]
    np.add.at(row, sampling.bias_ids[first:last], sampling.bias_values[first:last])


def apply_penalties(row: NDArray[np.float64], sampling: SamplingBatch, index: int) -> None:
    first, last = sampling.history_starts[index], sampling.history_starts[index + 1]
    ids = sampling.history_ids[first:last]
    counts = sampling.history_counts[first:last].astype(np.float64)
    repetition = float(sampling.repetition_penalty[index])
    seen = row[ids]
    seen = np.where(seen > 0, seen / repetition, seen * repetition)
    seen -= float(sampling.frequency_penalty[index]) * counts
    seen -= float(sampling.presence_penalty[index]) * (counts > 0)
    row[ids] = seen


def kept_tokens(s: NDArray[np.float64], sampling: SamplingBatch, index: int) -> NDArray[np.intp]:
    """Return the ids that top_k, top_p and min_p leave, best first. `s` has 0 as its largest value."""
    order = best_first(s)
    top_k = int(sampling.top_k[index])
    if top_k > 0:
        order = order[:top_k]
    top_p = float(sampling.top_p[index])
    if top_p < 1:
        mass = np.exp(s[order])
        mass_before = (np.cumsum(mass) - mass) / mass.sum()
        keep = mass_before < top_p
        keep[0] = True
        order = order[keep]
    min_p = float(sampling.min_p[index])
    if min_p > 0:
        order = order[s[order] >= np.log(min_p)]
    return order[s[order] > -np.inf]


def draw(row: NDArray[np.float64], sampling: SamplingBatch, index: int) -> int | None:
    """Return the drawn token, None where the row fails. `row` is overwritten."""
    add_bias(row, sampling, index)
    if not np.isfinite(row.max()):
        return None
    apply_penalties(row, sampling, index)
    temperature = float(sampling.temperature[index])
    if temperature == 0:
        return int(row.argmax())
    s = (row - row.max()) / temperature
    kept = np.sort(kept_tokens(s, sampling, index))
    noise = gumbel_noise(int(sampling.seeds[index]), int(sampling.positions[index]), len(row))
    return int(kept[np.argmax(s[kept] + noise[kept])])


def sample(
    logits: NDArray[np.floating], sampling: SamplingBatch, masks: TokenMasks | None
) -> StepResult:
    """Draw one token per row of logits [R, vocab]; the logits are left as they are."""
    num_rows, num_tokens = logits.shape
    token_ids = np.zeros(num_rows, np.int32)
    failed = np.zeros(num_rows, np.bool_)
    with_logprobs = bool((sampling.num_logprobs >= 0).any())
    most = max(0, int(sampling.num_logprobs.max(initial=0)))
    logprobs = np.zeros(num_rows, np.float32)
    top_token_ids = np.full((num_rows, most), -1, np.int32)
    top_logprobs = np.zeros((num_rows, most), np.float32)
    mask_of = {} if masks is None else {int(row): i for i, row in enumerate(masks.rows)}
    for index in range(num_rows):
        raw = logits[index].astype(np.float64)
        if np.isnan(raw).any():
            failed[index] = True
            continue
        scored = int(sampling.score_token_ids[index])
        row = raw.copy()
        if index in mask_of and masks is not None:
            row[~allowed_tokens(masks.bits[mask_of[index]], num_tokens)] = -np.inf
        token = scored if scored >= 0 else draw(row, sampling, index)
        if token is None or not np.isfinite(raw.max()):
            failed[index] = True
            continue
        token_ids[index] = token
        k = min(int(sampling.num_logprobs[index]), num_tokens)
        if k >= 0:
            row_logprobs = log_softmax(raw)
            logprobs[index] = row_logprobs[token]
            top_token_ids[index, :k] = best_first(raw)[:k]
            top_logprobs[index, :k] = row_logprobs[top_token_ids[index, :k]]
    if not with_logprobs:
        return StepResult(token_ids, None, None, None, failed)
    return StepResult(token_ids, logprobs, top_token_ids, top_logprobs, failed)
