"""The contracts of the policies: small on purpose, synchronous, never waiting.

Every policy is built as `cls(options)` where `options` is an instance of the class's inner
`Options` dataclass, or as `cls()` where it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from headrace.types import (
    AdmissionView,
    Admit,
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


class SchedulingPolicy(Protocol):
    """Ranks requests. The scheduler owns memory and budgets.

    A policy may also have `observe(step: StepFacts) -> None`, told after each step who got how many
    tokens and who finished.
    """

    name: ClassVar[str]

    def rank_waiting(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Sequence[RequestView]:
        """Return the same views, best first. Called when the set changed or 50 ms passed.

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
        """Return the scheme to hold this tensor in; None: as stored."""
        ...

    def quantize(
        self,
        weight: NDArray[np.float32],
        scheme: str,
        statistics: Mapping[str, NDArray[np.float32]] | None,
    ) -> Mapping[str, Any]:
        """Return the parts of `weight` [out, in] in `scheme`: named headrace.interfaces.QuantizedPart."""
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
