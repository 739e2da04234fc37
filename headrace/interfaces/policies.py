"""The contracts of the policies: small on purpose, synchronous, never waiting.

Every policy is built as `cls(options)` where `options` is an instance of the class's inner
`Options` dataclass, or as `cls()` where it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from headrace.types import (
    AdmissionView,
    Admit,
    BlockView,
    Queue,
    Reject,
    ReplicaView,
    RequestView,
    RoutingRequest,
    SchedulerView,
    TicketView,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.interfaces.model import QuantizedPart


class SchedulingPolicy(Protocol):
    """Ranks requests. The scheduler owns memory and budgets.

    What a policy may have besides, none of it needed:

    - `observe(step: StepFacts) -> None`: told after each step who got how many tokens and who finished.
    - `next_decision_at(view: SchedulerView) -> float | None`: when the order should be asked for again
      though nothing changed; None: never. Asked after each ranking. Without it the order is asked
      for again every 50 ms while a slot is free and the best waiting request does not fit.
    - `num_to_start(view: SchedulerView) -> int`: how many of the order just given may start; asked after
      each ranking. The others start one by one, when no prompt is being computed. Without it: all.
    - `is_order_fixed = True` (class): which of two waiting requests goes first changes at the time of
      `next_decision_at` only, or never, so that a place that becomes free asks for no new order.
    - `needs_prefixes = True` (class): `num_cached_tokens` of the waiting is brought up to date before
      they are ranked; otherwise it is what the cache held when they came.
    - `meets_tpot_targets = True` (class): `prefill_budget` looks after the decodes' TPOT targets, so the
      scheduler does not cap it for them.
    """

    name: ClassVar[str]

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        """Return the same views, best first. Called when someone came or a place became free.

        Also asked where the best waiting request finds no place while requests of lower `priority`
        run: about those and the waiting one together. Whoever is ranked behind it may be taken back.
        """
        ...

    def choose_victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Return the one of `running` (never empty) to be taken back: it loses its blocks and waits.

        Asked when memory runs out, and to make way for a waiting request that was ranked before all
        of `running`. `running` is in the order in which they started and leaves out the oldest of all
        where memory is at stake, so that one request always gets on.
        """
        ...

    def prefill_budget(self, view: SchedulerView) -> int:
        """Return how many prompt tokens this step may compute at most (bounded by view.token_budget)."""
        ...


class QuantizationPolicy(Protocol):
    """Chooses how weights are held."""

    name: ClassVar[str]

    def scheme_for(self, tensor_name: str, shape: tuple[int, ...], stored_as: str) -> str | None:
        """Return the scheme to hold this matrix in (q8_0 or q4_1); None: as stored.

        Asked about every matrix before any is read; a ValueError refuses the model with its message.
        """
        ...

    def quantize(
        self,
        weight: NDArray[np.float32],
        scheme: str,
        statistics: Mapping[str, NDArray[np.float32]] | None,
    ) -> Mapping[str, QuantizedPart]:
        """Return the scheme's parts of whole rows of a weight, [rows, in] f32; docs/plugins.md lists them.

        A large matrix comes in several calls. `statistics` of activations are None: none are gathered.
        """
        ...


class EvictionPolicy(Protocol):
    """Orders the reusable blocks that hold known prefixes. It never forbids: references do.

    A policy with the class attribute `is_release_order = True` says that its order is the one in
    which blocks become reusable; then `key` is never called and the pool keeps a plain list.
    """

    name: ClassVar[str]

    def key(self, block: BlockView, now: float) -> tuple[float | tuple[float, ...], float | None]:
        """Return (value, ask_again_at); the lowest value is evicted first, ties in order of release.

        Asked when a block becomes reusable, and again at `ask_again_at` (later than `now`, on the
        engine's clock) where that is not None. A value is a number or a tuple of numbers.
        """
        ...


class RoutingPolicy(Protocol):
    """Chooses a replica."""

    name: ClassVar[str]

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        """Return the id of one of `replicas` (never empty). Must change nothing outside the policy."""
        ...


class AdmissionPolicy(Protocol):
    """Decides who may come in, who waits and who is refused."""

    name: ClassVar[str]

    def admit(self, ticket: TicketView, view: AdmissionView, now: float) -> Admit | Queue | Reject:
        """Judge one ticket; called at "arrival" and again when "parsed"."""
        ...
