"""The arrays of a step, number by number."""

from __future__ import annotations

from headrace.engine.batch import BatchBuilder, BatchPlan, PlannedSequence
from headrace.engine.intake import Intake, ServedModel
from headrace.engine.sequence import Sequence
from headrace.testing.engine_driver import driver_tokenizer
from headrace.types import GenerationRequest, SamplingParams

BLOCK = 4


def make_sequence(tokens: list[int], blocks: list[int], slot: int, computed: int) -> Sequence:
    tokenizer = driver_tokenizer()
    intake = Intake(
        ServedModel("m", "r", tokenizer, (0,), tokenizer.vocab_size),
        max_model_len=64,
        block_size=BLOCK,
        num_blocks=64,
    )
    request = GenerationRequest(
        request_id="r", model="m", prompt_token_ids=tokens, sampling=SamplingParams(seed=slot)
    )
    sequence = intake.family(request, 0.0).leader
    sequence.block_ids = blocks
    sequence.slot = slot
    sequence.num_computed_tokens = computed
    return sequence


def make_builder() -> BatchBuilder:
    return BatchBuilder(num_slots=4, num_groups=2, block_size=BLOCK, max_model_len=64)


def test_a_decode_beside_two_chunks() -> None:
    decode = make_sequence([10, 11, 12, 13, 14, 15], [7, 2], slot=3, computed=5)
    chunk = make_sequence(list(range(20, 32)), [5, 9, 1], slot=0, computed=3)
    last = make_sequence([40, 41], [6], slot=1, computed=0)
    plan = BatchPlan(
        [
            PlannedSequence(decode, 1, drawing=[decode]),
            PlannedSequence(chunk, 6),
            PlannedSequence(last, 2, drawing=[last]),
        ],
        num_decodes=1,
    )
    batch = make_builder().build(plan)
    assert plan.num_prefill_tokens == 8
    assert batch.token_ids.tolist() == [15, 23, 24, 25, 26, 27, 28, 40, 41]
    assert batch.positions.tolist() == [5, 3, 4, 5, 6, 7, 8, 0, 1]
    assert batch.query_starts.tolist() == [0, 1, 7, 9]
    assert batch.kv_lens.tolist() == [[6, 9, 2]] * 2
    slots = [9, 23, 36, 37, 38, 39, 4, 24, 25]
    assert batch.slots.tolist() == [slots, slots]
    assert batch.block_tables[0, 0, :2].tolist() == [7, 2]
    assert batch.block_tables[1, 1].tolist() == [5, 9, 1]
    assert batch.sample_rows.tolist() == [0, 8]
    assert batch.sample_starts.tolist() == [0, 1, 1, 2]
    assert batch.token_sources.tolist() == [-1] * 9
    assert batch.draft_token_ids.tolist() == [-1, -1]
    assert batch.sampling.positions.tolist() == [6, 2]
    assert batch.sampling.seeds.tolist() == [decode.seed, last.seed]
    assert all(
        array.flags.c_contiguous for array in (batch.slots, batch.kv_lens, batch.block_tables)
    )


def test_a_slot_that_changes_hands_shows_its_new_owner() -> None:
    builder = make_builder()
    first = make_sequence(list(range(1, 10)), [3, 4, 5], slot=2, computed=8)
    builder.build(BatchPlan([PlannedSequence(first, 1)], 1))
    second = make_sequence([1, 2, 3, 4, 5], [8, 9], slot=2, computed=0)
    batch = builder.build(BatchPlan([PlannedSequence(second, 5)], 0))
    assert batch.block_tables.tolist() == [[[8, 9]]] * 2


def test_new_blocks_are_added_to_the_table_of_a_running_sequence() -> None:
    builder = make_builder()
    sequence = make_sequence(list(range(1, 6)), [3], slot=0, computed=3)
    builder.build(BatchPlan([PlannedSequence(sequence, 1)], 1))
    sequence.num_computed_tokens = 4
    sequence.block_ids.append(11)
    batch = builder.build(BatchPlan([PlannedSequence(sequence, 1)], 1))
    assert batch.block_tables[0].tolist() == [[3, 11]]
    assert batch.slots[0].tolist() == [44]


def test_a_compacted_context_has_fewer_rows_than_positions() -> None:
    sequence = make_sequence(list(range(1, 22)), [3, 4], slot=0, computed=20)
    sequence.base = type(sequence.base)(num_tokens=16, num_rows=3, block_ids=(3,))
    batch = make_builder().build(BatchPlan([PlannedSequence(sequence, 1)], 1))
    assert batch.positions.tolist() == [20]
    assert batch.kv_lens[0].tolist() == [8]
    assert batch.slots[0].tolist() == [4 * BLOCK + 3]


def test_all_choices_of_a_prompt_draw_from_its_last_row() -> None:
    sequence = make_sequence([1, 2, 3], [3], slot=1, computed=0)
    twin = make_sequence([1, 2, 3], [3], slot=2, computed=0)
    entry = PlannedSequence(sequence, 3, drawing=[sequence, twin])
    batch = make_builder().build(BatchPlan([entry]))
    assert batch.sample_rows.tolist() == [2, 2]
    assert batch.sample_starts.tolist() == [0, 2]
    assert batch.sampling.seeds.tolist() == [sequence.seed, twin.seed]
