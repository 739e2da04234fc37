"""The router names models, chooses among ready replicas only, and cannot be misled by its policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from headrace.engine.streams import ClientState
from headrace.errors import InvalidRequest, ModelNotFound, Unavailable
from headrace.gateway.ledger import Ledger, Load
from headrace.gateway.replica import Replica
from headrace.gateway.router import ModelGroup, Router
from headrace.policies.routing.round_robin import RoundRobin
from headrace.testing.fake_engine import fake_card
from headrace.types import EngineStats, ModelCard, Progress, ReplicaView, RoutingRequest


@dataclass
class StillClient:
    """A client that is in whatever state a test puts it."""

    id: str
    state: ClientState = "ready"
    progress: Progress = Progress("start", 0.0)
    card: ModelCard | None = field(default_factory=fake_card)
    stats: EngineStats = EngineStats()
    failure: str | None = None
    restarts_total: int = 0

    async def start(self) -> None: ...

    def stream(self, request: object) -> Any: ...

    async def close(self) -> None: ...


class LeastTokens:
    name: ClassVar[str] = "least_tokens"

    def __init__(self) -> None:
        self.seen: list[Sequence[ReplicaView]] = []

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        self.seen.append(replicas)
        return min(replicas, key=lambda replica: replica.num_tokens).id


class Stubborn:
    name: ClassVar[str] = "stubborn"

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        return "elsewhere"


def group(name: str, *states: ClientState) -> ModelGroup:
    clients = [StillClient(f"{name}-{i}", state) for i, state in enumerate(states)]
    return ModelGroup(name, tuple(Replica(client.id, name, client) for client in clients))


def router(*groups: ModelGroup, policy: Any = None) -> Router:
    return Router(groups, policy=policy or RoundRobin(), fallback=RoundRobin())


def test_models_keep_their_order_and_null_means_the_only_one() -> None:
    two = router(group("b", "ready"), group("a", "ready"))
    one = router(group("only", "starting"))

    assert two.models() == ["b", "a"]
    assert [replica.id for replica in two.replicas()] == ["b-0", "a-0"]
    assert two.resolve("a").name == "a"
    assert one.resolve(None).name == one.resolve("").name == "only"
    with pytest.raises(InvalidRequest, match="this server has b, a") as error:
        two.resolve(None)
    assert error.value.param == "model"


def test_an_unknown_model_is_not_found_and_the_nearest_is_named() -> None:
    with pytest.raises(ModelNotFound, match=r"'smolm2' does not exist. Did you mean 'smollm2'\?"):
        router(group("smollm2", "ready")).resolve("smolm2")


def test_only_ready_replicas_of_the_model_are_offered() -> None:
    policy = LeastTokens()
    chosen = router(
        group("m", "starting", "ready", "failed", "ready", "stopped"),
        group("other", "ready"),
        policy=policy,
    ).choose(RoutingRequest("m"), 0.0)

    assert chosen.id == "m-1"
    assert [view.id for view in policy.seen[0]] == ["m-1", "m-3"]
    assert policy.seen[0][0].block_size == 16 and policy.seen[0][0].num_blocks == 64


def test_the_policy_sees_what_was_routed_a_moment_ago() -> None:
    route = router(group("m", "ready", "ready", "ready"), policy=LeastTokens())
    holds = []
    for tokens in (100, 10, 50):
        replica = route.choose(RoutingRequest("m"), 0.0)
        holds.append((replica.id, route.ledger.hold(replica.id, Load(1, tokens, tokens))))

    assert [replica_id for replica_id, _ in holds] == ["m-0", "m-1", "m-2"]
    assert route.choose(RoutingRequest("m"), 0.0).id == "m-1"
    holds[0][1].release()
    assert route.choose(RoutingRequest("m"), 0.0).id == "m-0"


def test_a_policy_that_names_no_replica_is_overruled_and_counted() -> None:
    route = router(group("m", "ready", "ready"), policy=Stubborn())

    assert [route.choose(RoutingRequest("m"), 0.0).id for _ in range(3)] == ["m-0", "m-1", "m-0"]
    assert route.guard.failures_total > 0


def test_none_ready_is_unavailable_with_the_stage_of_the_one_that_comes_next() -> None:
    waiting = group("m", "starting", "starting", "failed")
    near = waiting.replicas[1].client
    assert isinstance(near, StillClient)
    near.progress = Progress("load", 0.42)

    with pytest.raises(Unavailable, match=r"'m' is starting \(load, 42%\)") as starting:
        router(waiting).choose(RoutingRequest("m"), 0.0)
    with pytest.raises(Unavailable, match="its replicas are failed") as failed:
        router(group("m", "failed")).choose(RoutingRequest("m"), 0.0)
    assert starting.value.retry_after_seconds == 2.0
    assert failed.value.retry_after_seconds == 30.0


def test_a_hold_is_released_exactly_once_whatever_ends_it() -> None:
    ledger = Ledger()
    hold = ledger.hold("a", Load(1, 7, 7))
    other = ledger.hold("a", Load(1, 5, 5))
    with pytest.raises(KeyError), hold:
        assert ledger.load("a") == Load(2, 12, 12)
        raise KeyError
    hold.release()
    hold.release()

    assert ledger.load("a") == Load(1, 5, 5)
    other.release()
    assert ledger.load("a") == ledger.load("never") == Load(0, 0)
