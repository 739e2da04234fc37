"""What a connection gets that is one too many: a polite refusal, before the process runs out of descriptors."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.errors import Unavailable
from headrace.gateway.errors import error_response

_ALWAYS_ANSWERED = ("/health", "/ready", "/metrics", "/admin")


class TooManyConnections(Unavailable):
    """The process may open no more files."""

    code = "too_many_connections"


@dataclass(frozen=True, slots=True)
class Surplus:
    """Stands before the application on a surplus connection. Orchestrators and operators get through."""

    app: ASGIApp
    limit: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(_ALWAYS_ANSWERED):
            await self.app(scope, receive, send)
            return
        error = TooManyConnections(
            f"the server has {self.limit} connections open and may open no more files; "
            "wait and send again",
            retry_after_seconds=1.0,
        )
        response = error_response(error)
        response.headers["connection"] = "close"
        await response(scope, receive, send)
