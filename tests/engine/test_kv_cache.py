"""KV cache: hits, growth, forks and return, with exact block ids."""

from __future__ import annotations

import random

import pytest

from headrace import prefix_hash
from headrace.engine.intake import Intake, ServedModel
from headrace.engine.kv_cache import KVCache
from headrace.engine.sequence import Sequence
from headrace.testing.engine_driver import driver_tokenizer
from headrace.types import GenerationRequest, SamplingParams

BLOCK = 4


def make_cache(num_blocks: int = 16, *, prefix_caching: bool = True) -> KVCache:
    return KVCache(num_blocks, BLOCK, model_revision="r", prefix_caching=prefix_caching)


def make_sequence(
    tokens: list[int], *, salt: str = "", hashes: tuple[bytes, ...] = (), **sampling: object
) -> Sequence:
    tokenizer = driver_tokenizer()
    intake = Intake(
        ServedModel("m", "r", tokenizer, (0,), tokenizer.vocab_size),
        max_model_len=256,
        block_size=BLOCK,
        num_blocks=64,
    )
    request = GenerationRequest(
        request_id="r",
        model="m",
        prompt_token_ids=tokens,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        cache_salt=salt,
        prefix_hashes=hashes,
    )
    return intake.family(request, 0.0).leader


def compute(cache: KVCache, sequence: Sequence, num_tokens: int | None = None) -> None:
    """Let a step compute pending tokens, as the engine does."""
    if not sequence.has_begun:
        cache.begin(sequence)
    count = sequence.num_pending_tokens if num_tokens is None else num_tokens
    assert cache.try_grow(sequence, count)
    sequence.num_computed_tokens += count
    cache.publish(sequence)


def test_a_waiting_prompt_finds_what_was_published_since_its_last_look() -> None:
    cache = make_cache()
    tokens = list(range(1, 14))
    waiting, running = make_sequence(tokens), make_sequence(tokens)
    assert cache.cached_blocks(waiting) == []
    compute(cache, running, 5)
    assert cache.cached_blocks(waiting) == running.block_ids[:1]
    compute(cache, running)
    assert cache.cached_blocks(waiting) == running.block_ids[:3]
    cache.withdraw(running)
    assert cache.cached_blocks(waiting) == []


@pytest.mark.parametrize(
    ("length", "cached"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_a_repeated_prompt_hits_all_full_blocks_but_leaves_a_token(
    length: int, cached: int
) -> None:
    cache = make_cache()
    tokens = list(range(1, length + 1))
    for expected in (0, cached, cached):
        sequence = make_sequence(tokens)
        cache.begin(sequence)
        assert sequence.num_computed_tokens == sequence.num_cached_tokens == expected
        compute(cache, sequence)
        cache.free(sequence)
    assert cache.pool.num_free == 16
    assert cache.query_tokens_total == 3 * length
    assert cache.hit_tokens_total == 2 * cached


def test_digests_that_came_with_the_request_are_used_where_they_are_all() -> None:
    cache = make_cache()
    tokens = list(range(1, 11))
    root = prefix_hash.root_digest(model_revision="r")
    hashes = tuple(prefix_hash.block_digests(root, tokens, BLOCK))
    compute(cache, make_sequence(tokens, hashes=hashes))
    for given in (hashes, (), hashes[:1], (*hashes, b"x" * 32)):
        sequence = make_sequence(tokens, hashes=given)
        compute(cache, sequence)
        assert sequence.num_cached_tokens == 8
        assert tuple(sequence.block_digests[:2]) == hashes
        cache.free(sequence)
    strange = make_sequence(tokens, hashes=(b"x" * 32, b"y" * 32))
    compute(cache, strange)
    assert strange.num_cached_tokens == 0 and strange.block_digests[0] == b"x" * 32


def test_block_ids_are_those_of_the_prefix_then_the_free_list() -> None:
    cache = make_cache(8)
    first = make_sequence(list(range(1, 11)))
    compute(cache, first)
    assert first.block_ids == [0, 1, 2]
    cache.free(first)
    assert cache.pool.free_ids() == [2, 3, 4, 5, 6, 7, 1, 0]
    second = make_sequence([*range(1, 9), 99, 98])
    compute(cache, second)
    assert second.block_ids == [0, 1, 2]
    other = make_sequence([*range(1, 5), 77, 76, 75])
    compute(cache, other)
    assert other.block_ids == [0, 3]
    assert cache.pool.block(0).ref_count == 2


def test_only_computed_full_blocks_are_found() -> None:
    cache = make_cache()
    half = make_sequence(list(range(1, 20)))
    compute(cache, half, 6)
    twin = make_sequence(list(range(1, 20)))
    assert cache.cached_blocks(twin) == half.block_ids[:1]
    cache.free(half)
    assert len(cache.cached_blocks(twin)) == 1


def test_growth_takes_a_block_only_when_a_row_needs_it() -> None:
    cache = make_cache(2)
    sequence = make_sequence([1, 2, 3])
    compute(cache, sequence)
    assert len(sequence.block_ids) == 1
    assert cache.try_grow(sequence, 1)
    assert len(sequence.block_ids) == 1
    assert cache.try_grow(sequence, 2)
    assert len(sequence.block_ids) == 2
    assert not cache.try_grow(sequence, 6)
    assert cache.rows_available(sequence) == 5


def test_salts_revisions_and_prompts_share_nothing() -> None:
    cache = make_cache()
    compute(cache, make_sequence(list(range(1, 12)), salt="a"))
    assert cache.cached_blocks(make_sequence(list(range(1, 12)), salt="a"))
    assert not cache.cached_blocks(make_sequence(list(range(1, 12)), salt="b"))
    assert not cache.cached_blocks(make_sequence(list(range(2, 13)), salt="a"))


def test_caching_off_and_prompt_logprobs_read_nothing() -> None:
    cache = make_cache(prefix_caching=False)
    compute(cache, make_sequence(list(range(1, 12))))
    assert cache.pool.num_published == 0
    cache = make_cache()
    compute(cache, make_sequence(list(range(1, 12))))
    assert not cache.cached_blocks(make_sequence(list(range(1, 12)), prompt_logprobs=0))


def test_a_fork_shares_full_blocks_and_gets_its_own_last_one() -> None:
    cache = make_cache()
    source = make_sequence(list(range(1, 11)), n=2)
    compute(cache, source)
    target = source.family.sequences[1]
    assert cache.try_fork(source, target) == [(2, 3)]
    assert target.block_ids == [0, 1, 3]
    assert target.num_computed_tokens == 10
    cache.free(source)
    cache.free(target)
    assert cache.pool.num_free == 16


def test_a_fork_of_whole_blocks_copies_nothing_and_needs_no_free_block() -> None:
    cache = make_cache(2)
    source = make_sequence(list(range(1, 9)), n=2)
    compute(cache, source)
    assert cache.try_fork(source, source.family.sequences[1]) == []


def test_a_fork_without_a_free_block_changes_nothing() -> None:
    cache = make_cache(3)
    source = make_sequence(list(range(1, 11)), n=2)
    compute(cache, source)
    target = source.family.sequences[1]
    assert cache.try_fork(source, target) is None
    assert target.block_ids == []
    assert [cache.pool.block(block_id).ref_count for block_id in range(3)] == [1, 1, 1]


def test_withdrawn_blocks_are_not_found_again() -> None:
    cache = make_cache()
    sequence = make_sequence(list(range(1, 12)))
    compute(cache, sequence)
    cache.withdraw(sequence)
    cache.free(sequence)
    assert cache.cached_blocks(make_sequence(list(range(1, 12)))) == []
    assert cache.pool.num_free == 16


def test_a_prefix_whose_head_was_evicted_is_found_again_once_recomputed() -> None:
    cache = make_cache(4)
    tokens = list(range(1, 14))
    first = make_sequence(tokens)
    compute(cache, first)
    head, *rest = first.block_ids
    cache.free(first)
    cache.pool.withdraw([head])  # the head alone is gone, as an eviction policy may choose
    assert cache.cached_blocks(make_sequence(tokens)) == []
    again = make_sequence(tokens)
    compute(cache, again)
    assert cache.cached_blocks(make_sequence(tokens)) == again.block_ids[:3]


def test_resumption_counts_neither_as_query_nor_as_hit() -> None:
    cache = make_cache()
    sequence = make_sequence(list(range(1, 12)))
    compute(cache, sequence)
    cache.free(sequence)
    compute(cache, sequence)
    assert sequence.num_computed_tokens == 11
    assert (cache.query_tokens_total, cache.hit_tokens_total) == (11, 0)
    assert sequence.num_cached_tokens == 0


def test_colliding_digests_never_give_another_prompts_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C01: with digests of 8 bits, tokens are still verified."""
    real = prefix_hash.block_digest

    def truncated(parent: bytes, token_ids: list[int]) -> bytes:
        return real(parent, token_ids)[:1]

    monkeypatch.setattr(prefix_hash, "block_digest", truncated)
    cache = make_cache(64)
    computed: dict[int, tuple[int, ...]] = {}  # block id -> the prefix whose rows it holds
    num_hits = 0
    choice = random.Random(1)
    for _ in range(500):
        tokens = [choice.randrange(1, 3) for _ in range(13)]
        sequence = make_sequence(tokens)
        cache.begin(sequence)
        for index, block_id in enumerate(sequence.block_ids):
            assert computed[block_id] == tuple(tokens[: (index + 1) * BLOCK])
            num_hits += 1
        compute(cache, sequence)
        for index, block_id in enumerate(sequence.block_ids):
            computed[block_id] = tuple(tokens[: (index + 1) * BLOCK])
        cache.free(sequence)
    assert num_hits > 100
