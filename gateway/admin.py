"""/admin: the replicas of a running server. Every change answers at once; what it takes goes on behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from headrace.config import ReplicaEntry
from headrace.gateway.auth import Access
from headrace.gateway.errors import JSONBytes
from headrace.gateway.fleet import Fleet, Reload
from headrace.gateway.json_body import decode_body, read_body
from headrace.gateway.operation import Operation

MAX_BODY_BYTES = 64 << 10


class NewReplica(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /admin/replicas: the keys of an entry of `replicas` in the YAML, and the model's name.

    Times are in seconds.
    """

    model: str
    kind: str = "process"
    count: int = 1
    url: str = ""
    upstream_model: str = ""
    api_key_env: str = ""
    send_cache_salt: bool = True
    connect_timeout: float | None = None
    first_byte_timeout: float | None = None
    idle_timeout: float | None = None
    hang_timeout: float | None = None


NEW_REPLICA = msgspec.json.Decoder(NewReplica)
Answer = tuple[int, Any]
"""(status, what the body says)."""


@dataclass(frozen=True, slots=True)
class AdminEndpoint:
    """One operation: a function from the path's parameters and the body to an answer."""

    handle: Callable[[dict[str, str], bytes], Awaitable[Answer]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(scope, receive, MAX_BODY_BYTES)
        status, content = await self.handle(scope.get("path_params", {}), raw)
        await JSONBytes(content, status_code=status)(scope, receive, send)


@dataclass(frozen=True, slots=True)
class ReplicaAdmin:
    """What /admin does with replicas. `read_again` reads the configuration's file again."""

    fleet: Fleet
    read_again: Callable[[], Awaitable[Reload]]

    async def listed(self, parameters: dict[str, str], raw: bytes) -> Answer:
        return 200, {"replicas": self.fleet.describe()}

    async def shown(self, parameters: dict[str, str], raw: bytes) -> Answer:
        return 200, self.fleet.describe_one(self.fleet.find(parameters["replica"]))

    async def add(self, parameters: dict[str, str], raw: bytes) -> Answer:
        body = decode_body(raw, NEW_REPLICA)
        return 202, {"added": self.fleet.add(body.model, entry_of(body))}

    async def drain(self, parameters: dict[str, str], raw: bytes) -> Answer:
        return 202, self.fleet.describe_one(self.fleet.drain(parameters["replica"]))

    async def resume(self, parameters: dict[str, str], raw: bytes) -> Answer:
        return 202, self.fleet.describe_one(self.fleet.resume(parameters["replica"]))

    async def restart(self, parameters: dict[str, str], raw: bytes) -> Answer:
        return 202, self.fleet.describe_one(self.fleet.restart(parameters["replica"]))

    async def remove(self, parameters: dict[str, str], raw: bytes) -> Answer:
        return 202, self.fleet.describe_one(self.fleet.remove(parameters["replica"]))

    async def reload(self, parameters: dict[str, str], raw: bytes) -> Answer:
        return 200, msgspec.to_builtins(await self.read_again())


def replica_operations(admin: ReplicaAdmin, access: Access) -> list[Operation]:
    """Return the operations on replicas, for the main port or one of their own."""
    one = "/admin/replicas/{replica:path}"
    table = [
        ("GET", "/admin/replicas", admin.listed, 200, "Every replica and how it is"),
        ("POST", "/admin/replicas", admin.add, 202, "Add replicas"),
        ("POST", f"{one}/drain", admin.drain, 202, "Send a replica nothing new"),
        ("POST", f"{one}/resume", admin.resume, 202, "Send a drained replica requests again"),
        ("POST", f"{one}/restart", admin.restart, 202, "Drain a replica and start it again"),
        ("GET", one, admin.shown, 200, "One replica"),
        ("DELETE", one, admin.remove, 202, "Drain a replica and take it out"),
        ("POST", "/admin/reload", admin.reload, 200, "Read the configuration's file again"),
    ]
    return [
        Operation(
            method,
            path,
            access,
            AdminEndpoint(handle),
            summary,
            body=NewReplica if handle == admin.add else None,
            status=status,
        )
        for method, path, handle, status, summary in table
    ]


def entry_of(body: NewReplica) -> ReplicaEntry:
    """Return the body as an entry of the configuration. Raises InvalidRequest where it is none."""
    given = {
        name: getattr(body, name)
        for name in ReplicaEntry.__struct_fields__
        if name != "model" and getattr(body, name) is not None
    }
    data = msgspec.json.encode({**given, "model": body.upstream_model})
    return decode_body(data, _ENTRY)


_ENTRY = msgspec.json.Decoder(ReplicaEntry)
