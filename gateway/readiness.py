"""Who is ready: what /ready says, and the 503 of everything under /v1 until then.

A model is ready while one of its replicas is; the server is ready when every model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.errors import InvalidRequest
from headrace.gateway.errors import NotReady
from headrace.gateway.state import GatewayState
from headrace.types import ModelCard

if TYPE_CHECKING:
    from headrace.gateway.replica import Replica
    from headrace.gateway.router import ModelGroup


_READY = {"state": "ready", "stage": "ready", "progress": 1.0}


def ready_card(group: ModelGroup, now: float) -> ModelCard | None:
    """Return the card of a replica that takes requests now."""
    for replica in group.replicas:
        if replica.takes_requests(now) and replica.client.card is not None:
            return replica.client.card
    return None


def is_ready(group: ModelGroup, now: float) -> bool:
    """Whether a replica takes requests for the model now, here or elsewhere."""
    return any(replica.takes_requests(now) for replica in group.replicas)


def groups(state: GatewayState) -> list[ModelGroup]:
    return [state.router.resolve(name) for name in state.router.models()]


def check_any_ready(state: GatewayState) -> None:
    """Raise NotReady where no model can be served at all, Stopping where the server is to end."""
    state.lifecycle.check()
    all_groups, now = groups(state), state.clock.now()
    if not any(is_ready(group, now) for group in all_groups):
        raise not_ready(all_groups, state)


def require_card(group: ModelGroup, state: GatewayState) -> ModelCard:
    """Return the card of a model that is ready here.

    Raises NotReady, or InvalidRequest where only other servers have the model.
    """
    card = ready_card(group, state.clock.now())
    if card is None and group.is_remote:
        raise InvalidRequest(
            f"the model '{group.name}' runs on another server, and its tokens are not known here; "
            "ask that server",
            param="model",
        )
    if card is None:
        raise not_ready([group], state)
    return card


def not_ready(waiting: Sequence[ModelGroup], state: GatewayState) -> NotReady:
    """Return the 503 that says how far the start of the slowest of these models is."""
    now = state.clock.now()
    late = [group for group in waiting if not is_ready(group, now)]
    # where none is late, they are ready elsewhere only, and tokens are needed here
    reports = [(group.name, group_status(group, now)) for group in late or waiting]
    name, status = min(reports, key=lambda report: float(report[1]["progress"]))
    message = f"model '{name}' is not ready: {status['state']}, {describe(status)}"
    return NotReady(
        message,
        retry_after_seconds=state.limits.retry_after_starting_seconds,
        extra={"model": name, **status},
    )


def describe(status: dict[str, Any]) -> str:
    """Return a status in words."""
    if status.get("reason"):
        return str(status["reason"])
    return f"{status['stage']} {round(100 * status['progress'])} %"


def group_status(group: ModelGroup, now: float) -> dict[str, Any]:
    """Return {state, stage, progress[, reason]} of the replica that is furthest."""
    if is_ready(group, now):
        return dict(_READY)
    if not group.replicas:
        return {"state": "failed", "stage": "", "progress": 0.0, "reason": "it has no replica"}
    return max(map(replica_status, group.replicas), key=_furthest)


def _furthest(status: dict[str, Any]) -> tuple[int, float]:
    order = ("stopped", "failed", "draining", "starting", "ready")
    return order.index(status["state"]), float(status["progress"])


def replica_status(replica: Replica) -> dict[str, Any]:
    """Return {state, stage, progress[, reason]} of one replica.

    Of a reason the first line: what an engine printed before it died is for the log, not for callers.
    """
    if replica.is_ready:
        return dict(_READY)
    progress = replica.client.progress
    status: dict[str, Any] = {
        "state": replica.state,
        "stage": progress.stage,
        "progress": round(progress.fraction, 4),
    }
    if replica.failure:
        status["reason"] = replica.failure.partition("\n")[0]
    return status
