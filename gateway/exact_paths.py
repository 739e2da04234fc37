"""The paths without parameters, found by one look-up: a router tries patterns one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send


@dataclass(frozen=True, slots=True)
class ExactPaths:
    """Answers (method, path) that it knows; everything else is the router's."""

    app: Starlette
    endpoints: Mapping[tuple[str, str], ASGIApp]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http":
            endpoint = self.endpoints.get((scope["method"], scope["path"]))
        await (endpoint or self.app)(scope, receive, send)
