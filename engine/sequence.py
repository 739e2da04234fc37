"""One choice of one request on its way through the engine, and the request that owns the choices.

Rows and positions are counted apart: a context whose beginning was compacted has fewer KV rows than
positions, and recomputation after preemption starts from its `base`, which is empty otherwise.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.types import GenerationRequest, RequestView, TokenLogprobs
from headrace.types.views import set_fact

if TYPE_CHECKING:
    from headrace.engine.batch import PlannedSequence
    from headrace.engine.block_pool import ParentKey
    from headrace.engine.output import SequenceOutput
    from headrace.engine.sampling_rows import SequenceSampling


def choice_seed(seed: int | None, index: int) -> int:
    """Return the 64-bit seed of choice `index`: a hash of the request's, or a random one without."""
    if seed is None:
        return secrets.randbits(64)
    data = (seed % 2**64).to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class Status(enum.Enum):
    PENDING = "pending"
    """A further choice, waiting for the first one to compute the prompt they share."""
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SequenceBase:
    """What a sequence starts from without computing it: tokens and the KV rows that stand for them."""

    num_tokens: int = 0
    num_rows: int = 0
    block_ids: tuple[int, ...] = ()


EMPTY_BASE = SequenceBase()


@dataclass(slots=True, eq=False)
class Sequence:
    """A choice's tokens, how many of them are computed, and the blocks that hold them."""

    family: Family
    index: int
    seed: int
    max_tokens: int
    output: SequenceOutput
    token_ids: array[int]
    """Typecode I: compared, hashed and gathered as memory."""
    view: RequestView
    sampling: SequenceSampling
    base: SequenceBase = EMPTY_BASE
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    """Tokens whose step gave its result."""
    num_flying_tokens: int = 0
    """Tokens behind them in steps that were launched ahead and gave no result yet."""
    flying_row: int = -1
    """The sample row of the newest such step that draws the next token; -1: none does."""
    has_begun: bool = False
    """Whether the prefix cache was asked since the sequence last started to run."""
    num_cached_tokens: int | None = None
    """What the prefix cache gave at the first start; None before it. Later hits do not count."""
    num_preemptions: int = 0
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    num_table_blocks: int = 0
    """Blocks already copied into the batch builder's table for this slot."""
    root_digest: bytes = b""
    block_digests: list[bytes] = field(default_factory=list)
    num_published: int = 0
    parent: ParentKey = b""
    """What the next block to be published follows."""
    found_blocks: list[int] = field(default_factory=list)
    """What the last look into the prefix cache found, and each block's serial then."""
    found_serials: list[int] = field(default_factory=list)
    found_at: tuple[int, int] = (-1, 0)
    """How often the cache had changed by then, and how many tokens there were."""
    decode_entry: PlannedSequence | None = None
    """What a step of it looks like once the prompt is computed, kept for the next one."""
    start_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def request(self) -> GenerationRequest:
        return self.family.request

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose keys and values no step computes yet; 1 for a sequence that decodes."""
        num_planned = self.num_computed_tokens + self.num_flying_tokens
        return len(self.token_ids) + (self.flying_row >= 0) - num_planned

    @property
    def num_expected_tokens(self) -> int:
        """Tokens known, and the one that a step in flight draws."""
        return len(self.token_ids) + (self.flying_row >= 0)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.family.request.prompt_token_ids)

    @property
    def next_position(self) -> int:
        """The rotary position of the next token to be computed."""
        return self.num_computed_tokens + self.num_flying_tokens

    def num_kv_rows(self, group: int = 0) -> int:
        """Rows the sequence holds in a KV group; the same in all groups while none drops rows."""
        base = self.base
        return base.num_rows + self.num_computed_tokens + self.num_flying_tokens - base.num_tokens

    def take_off(self, num_tokens: int, row: int) -> None:
        """Note that a step was launched that computes these tokens and draws in `row` (-1: nowhere)."""
        self.num_flying_tokens += num_tokens
        self.flying_row = row

    def land(self, num_tokens: int) -> None:
        """Note that the oldest such step gave its result."""
        self.num_flying_tokens -= num_tokens
        if not self.num_flying_tokens:
            self.flying_row = -1

    @property
    def is_last_token_flying(self) -> bool:
        """Whether the token that a step in flight draws is the last one the choice may have."""
        return self.flying_row >= 0 and self.output.num_tokens_left <= 1

    def forget_computed(self) -> None:
        """Go back to the base, as after preemption; the tokens themselves are kept."""
        self.num_computed_tokens = self.base.num_tokens
        self.has_begun = False
        self.block_ids.clear()
        self.num_table_blocks = 0
        self.num_published = 0
        self.parent = b""

    def refresh_view(self) -> RequestView:
        view = self.view
        if self.num_cached_tokens is not None:
            set_fact(view, "num_cached_tokens", self.num_cached_tokens)
        set_fact(view, "num_computed_tokens", self.num_computed_tokens)
        set_fact(view, "num_output_tokens", self.num_output_tokens)
        set_fact(view, "first_token_time", self.first_token_time)
        set_fact(view, "last_token_time", self.last_token_time)
        set_fact(view, "num_blocks", len(self.block_ids))
        set_fact(view, "num_preemptions", self.num_preemptions)
        return view


@dataclass(slots=True, eq=False)
class Family:
    """A request and its choices: the first computes the prompt, the others fork from it."""

    request: GenerationRequest
    arrival_time: float
    sequences: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    """What is known of the prompt's tokens so far; the first has no log probability."""
    is_prompt_reported: bool = False
    """Whether they have gone out, with the first event of any choice."""

    @property
    def num_scored(self) -> int:
        """Prompt tokens, from the first on, whose log probabilities are known or do not exist."""
        return len(self.prompt_logprobs)

    @property
    def leader(self) -> Sequence:
        return self.sequences[0]

    def disband(self) -> None:
        """Let go of the choices once all have ended: their tokens are free at once, not when a
        garbage collection finds that family and choices hold each other."""
        for sequence in self.sequences:
            sequence.decode_entry = None
        self.sequences.clear()

    def pending(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is Status.PENDING]
