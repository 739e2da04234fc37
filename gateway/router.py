"""Which models there are, and which replica serves a request: the policy chooses among those that are ready.

Plain and synchronous, with time as an argument, because the simulator drives the same object. Whoever
chooses takes a hold on the ledger before anything else runs, so that the next choice sees it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.errors import InvalidRequest, ModelNotFound, Unavailable, did_you_mean, shown
from headrace.gateway.ledger import Hold, Ledger, load_of
from headrace.gateway.prefix_index import PrefixIndex
from headrace.gateway.replica import Replica
from headrace.interfaces import RoutingPolicy
from headrace.policy_guard import GuardLimits, RoutingGuard
from headrace.types import ReplicaView, RoutingRequest

_RETRY_AFTER_STARTING_SECONDS = 2.0
_RETRY_AFTER_FAILED_SECONDS = 30.0
_DEFAULT_BLOCK_SIZE = 16
_NOTHING_MATCHED: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """A model and the replicas that serve it, as they are at one moment."""

    name: str
    replicas: tuple[Replica, ...]
    has_upstream: bool = field(init=False)
    """Whether another server serves it too."""
    is_remote: bool = field(init=False)
    """Whether only other servers serve it: nothing here has its tokenizer."""

    def __post_init__(self) -> None:
        kinds = {replica.upstream is not None for replica in self.replicas}
        object.__setattr__(self, "has_upstream", True in kinds)
        object.__setattr__(self, "is_remote", kinds == {True})


class Router:
    """Chooses among replicas. `fallback` decides where `policy` fails."""

    def __init__(
        self,
        groups: Sequence[ModelGroup],
        *,
        policy: RoutingPolicy,
        fallback: RoutingPolicy,
        limits: GuardLimits | None = None,
    ) -> None:
        """`limits`: of the guard; None: those of a server."""
        self._groups = {group.name: group for group in groups}
        self.has_upstream = any(group.has_upstream for group in groups)
        """Whether other servers serve any model."""
        self._guard = RoutingGuard(policy, fallback, limits)
        self.ledger = Ledger()
        self.prefixes = PrefixIndex()
        self._restarts: dict[str, int] = {}

    def models(self) -> list[str]:
        """Return the names of all models, in the order of the configuration."""
        return list(self._groups)

    def replicas(self) -> list[Replica]:
        """Return every replica of every model."""
        return [replica for group in self._groups.values() for replica in group.replicas]

    @property
    def guard(self) -> RoutingGuard:
        """What stands before the policy: its state, and the way to swap it."""
        return self._guard

    def resolve(self, model: str | None) -> ModelGroup:
        """Return the model of that name; None or "" means the only one.

        Raises ModelNotFound, or InvalidRequest where there are several and none is named.
        """
        if not model:
            if len(self._groups) == 1:
                return next(iter(self._groups.values()))
            raise InvalidRequest(
                f"model is needed: this server has {', '.join(self._groups)}", param="model"
            )
        group = self._groups.get(model)
        if group is None:
            raise ModelNotFound(
                f"the model '{shown(model)}' does not exist. {did_you_mean(model, self._groups)}",
                param="model",
            )
        return group

    def find(self, replica_id: str) -> Replica | None:
        """Return the replica of that id, of whatever model."""
        return next((replica for replica in self.replicas() if replica.id == replica_id), None)

    def set_replicas(self, model: str, replicas: Sequence[Replica]) -> None:
        """Change who serves a model, from the next choice on. What is known of those gone is dropped."""
        before = self._groups[model].replicas
        self._groups[model] = ModelGroup(model, tuple(replicas))
        self.has_upstream = any(group.has_upstream for group in self._groups.values())
        for replica in before:
            if replica not in replicas:
                self.prefixes.forget(replica.id)
                self._restarts.pop(replica.id, None)

    def choose(
        self, request: RoutingRequest, now: float, *, excluding: Collection[str] = ()
    ) -> Replica:
        """Return the replica that shall serve a request, none of the ids in `excluding`.

        Raises Unavailable where none is ready.
        """
        group = self.resolve(request.model)
        ready = {
            replica.id: replica
            for replica in group.replicas
            if replica.can_serve(now) and replica.id not in excluding
        }
        if not ready:
            raise none_ready(group, now)
        if len(ready) == 1:
            return next(iter(ready.values()))
        matched = self._matched_tokens(request, tuple(ready.values()))
        views = [self._view(replica, matched) for replica in ready.values()]
        return ready[self._guard.choose(request, views, now)]

    def place(self, replica: Replica, request: RoutingRequest) -> Hold:
        """Count a request in on the replica it is sent to, and remember that its prefix went there."""
        self._forget_restarted((replica,))
        matched = self.prefixes.record(replica.id, request.prefix_hashes) * _block_size(replica)
        load = load_of(request, matched_tokens=matched, block_size=_block_size(replica))
        return self.ledger.hold(replica.id, load)

    def matched_tokens(self, replica: Replica, request: RoutingRequest) -> int:
        """Return how much of the prompt a replica is known to have been sent."""
        self._forget_restarted((replica,))
        return self.prefixes.match_one(replica.id, request.prefix_hashes) * _block_size(replica)

    def _matched_tokens(
        self, request: RoutingRequest, replicas: Sequence[Replica]
    ) -> dict[str, int]:
        """Return how much of the prompt each replica was sent before, by id; a restarted one, nothing."""
        self._forget_restarted(replicas)
        matched = self.prefixes.match(request.prefix_hashes)
        return {
            replica.id: matched.get(replica.id, 0) * _block_size(replica) for replica in replicas
        }

    def _forget_restarted(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            restarts = replica.client.restarts_total
            if self._restarts.setdefault(replica.id, restarts) != restarts:
                self._restarts[replica.id] = restarts
                self.prefixes.forget(replica.id)

    def views(self, model: str = "") -> tuple[ReplicaView, ...]:
        """Return what policies may see of the replicas of a model, or of all where none is named."""
        groups = [self._groups[model]] if model else self._groups.values()
        return tuple(self._view(replica) for group in groups for replica in group.replicas)

    def _view(self, replica: Replica, matched: Mapping[str, int] = _NOTHING_MATCHED) -> ReplicaView:
        load = self.ledger.load(replica.id)
        card = replica.client.card
        return ReplicaView(
            id=replica.id,
            state=replica.state,
            num_requests=load.num_requests,
            num_tokens=load.num_tokens,
            block_size=_block_size(replica),
            num_blocks=card.num_blocks if card is not None else 0,
            reserved_blocks=self.ledger.reserved_blocks(replica.id),
            matched_tokens=matched.get(replica.id, 0),
            num_prefill_tokens=load.num_prefill_tokens,
            num_active_blocks=load.num_blocks,
        )


def _block_size(replica: Replica) -> int:
    card = replica.client.card
    return card.block_size if card is not None else _DEFAULT_BLOCK_SIZE


def none_ready(group: ModelGroup, now: float) -> Unavailable:
    """Return the refusal that says how far the replica is that comes next."""
    starting = [replica.client for replica in group.replicas if replica.client.state == "starting"]
    if not starting:
        states: list[str] = sorted({replica.state for replica in group.replicas})
        resting = [
            replica.breaker.seconds_to_trial(now)
            for replica in group.replicas
            if not replica.breaker.is_closed
        ]
        return Unavailable(
            f"the model '{group.name}' cannot be served: its replicas are {' or '.join(states or ['none'])}",
            retry_after_seconds=min(resting, default=_RETRY_AFTER_FAILED_SECONDS),
        )
    stage = max((client.progress for client in starting), key=lambda progress: progress.fraction)
    return Unavailable(
        f"the model '{group.name}' is starting ({stage.stage}, {stage.fraction:.0%})",
        retry_after_seconds=_RETRY_AFTER_STARTING_SECONDS,
    )
