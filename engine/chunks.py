"""What a sequence computes in one step: how much of its pending tokens, and who draws at their end."""

from __future__ import annotations

from headrace.engine.batch import PlannedSequence
from headrace.engine.sequence import Sequence


def decodes(sequence: Sequence) -> bool:
    """Whether one token is left to compute, so that the next one is drawn."""
    return sequence.has_begun and sequence.num_pending_tokens == 1


def planned_decode(sequence: Sequence) -> PlannedSequence:
    """Return the entry of a sequence that computes its last token and draws the next.

    Where a request has one choice, that is the same entry every time.
    """
    if len(sequence.family.sequences) > 1:
        return planned(sequence, 1)
    entry = sequence.decode_entry
    if entry is None:
        entry = sequence.decode_entry = PlannedSequence(sequence, 1, 0, [sequence])
    return entry


def planned(sequence: Sequence, num_tokens: int, num_score_rows: int = 0) -> PlannedSequence:
    """Return an entry of a plan; at the end of its pending tokens a sequence draws, its family with it."""
    drawing: list[Sequence] = []
    if num_tokens == sequence.num_pending_tokens:
        drawing.append(sequence)
        choices = sequence.family.sequences
        if len(choices) > 1 and sequence is choices[0]:
            drawing.extend(sequence.family.pending())
    return PlannedSequence(sequence, num_tokens, num_score_rows, drawing)


def bound_by_scoring(sequence: Sequence, num_tokens: int, score_rows: int) -> tuple[int, int]:
    """Return the tokens and the score rows of a chunk that scores its prompt.

    The row of token i scores prompt token i + 1. Rows of logits are large, so a step takes a bounded
    number of them; tokens scored before a preemption are not scored again.
    """
    request = sequence.request
    if request.sampling.prompt_logprobs is None:
        return num_tokens, 0
    last = len(request.prompt_token_ids) - 1
    num_scored = sequence.family.num_scored
    if num_scored > last:
        return num_tokens, 0
    if num_scored + score_rows <= last:
        most = num_scored + score_rows - 1 - sequence.next_position
        num_tokens = min(num_tokens, most)
    end = min(sequence.next_position + num_tokens, last)
    return num_tokens, max(0, end - num_scored + 1)


def in_turn(prefilling: list[Sequence], budget: int) -> list[Sequence]:
    """Return who gets tokens first: short remainders for half the budget, long ones, other short ones."""
    if len(prefilling) == 1:
        return prefilling
    first: list[Sequence] = []
    long: list[Sequence] = []
    later: list[Sequence] = []
    room = budget // 2
    for sequence in prefilling:
        wanted = sequence.num_pending_tokens
        if not sequence.has_begun:
            wanted -= sequence.view.num_cached_tokens
        if wanted > budget // 4:
            long.append(sequence)
        elif wanted <= room:
            room -= wanted
            first.append(sequence)
        else:
            later.append(sequence)
    return [*first, *long, *later]
