"""GET /health, /ready and /metrics: for orchestrators and scrapers, never behind slow work."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.gateway.errors import JSONBytes
from headrace.gateway.readiness import group_status, groups, is_ready, ready_card
from headrace.gateway.state import GatewayState

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Health:
    """Liveness: 200 for as long as the process runs its event loop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await JSONBytes({"status": "ok"})(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Ready:
    """Readiness: 200 when every model can be served, its text side included; else 503."""

    state: GatewayState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self.state
        all_groups, now = groups(state), state.clock.now()
        cards = [ready_card(group, now) for group in all_groups]
        is_stopping = state.lifecycle.is_stopping
        all_ready = (
            bool(all_groups)
            and all(is_ready(group, now) for group in all_groups)
            and not is_stopping
        )
        if all_ready:
            for card in cards:
                if card is not None:
                    await state.texts.get(card)
        headers = {}
        if not all_ready:
            headers["retry-after"] = str(round(state.limits.retry_after_starting_seconds))
        body = {
            "ready": all_ready,
            "models": {group.name: group_status(group, now) for group in all_groups},
        }
        if is_stopping:
            body["stopping"] = True
        status = 200 if all_ready else 503
        await JSONBytes(body, status_code=status, headers=headers)(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Metrics:
    """The Prometheus page."""

    state: GatewayState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = self.state.metrics.render()
        headers = {"content-type": _METRICS_TYPE}
        await Response(page, headers=headers)(scope, receive, send)
