"""One line of the table of what a port answers: routes, access and the OpenAPI document come from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp

from headrace.gateway.auth import Access


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path, who may use it, and the endpoint. The rest is for the document."""

    method: str
    path: str
    access: Access
    endpoint: ASGIApp
    summary: str = ""
    body: type[msgspec.Struct] | None = None
    """What the body is decoded as; None where there is none."""
    answer: type[Any] | None = None
    """The JSON of an answer; None is any object."""
    status: int = 200
    """Of an answer."""
    media_type: str = "application/json"
    may_stream: bool = False
    """Whether an answer may be server-sent events."""
    may_be_unready: bool = False
    """Whether 503 has the same body as 200."""

    @property
    def operation_id(self) -> str:
        """A name that no other operation of the port has."""
        words = [part.strip("{}").partition(":")[0] for part in self.path.split("/") if part]
        return "_".join([self.method.lower(), *(word.replace(".", "_") for word in words)])
