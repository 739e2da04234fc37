"""A whole gateway in front of fake engines, and one raw request to it whose every move a test makes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message

from headrace.clock import SystemClock
from headrace.config import Config
from headrace.config.schema import GatewayConfig
from headrace.gateway.admission import AdmissionGate
from headrace.gateway.app import create_app
from headrace.gateway.auth import Authenticator
from headrace.gateway.metrics import GatewayMetrics
from headrace.gateway.observers import Observers
from headrace.gateway.replica import Replica
from headrace.gateway.router import ModelGroup, Router
from headrace.gateway.state import GatewayState, Limits
from headrace.gateway.tracing import Tracing
from headrace.interfaces import AdmissionPolicy, Clock, RoutingPolicy
from headrace.policies.routing.round_robin import RoundRobin
from headrace.testing.fake_client import FakeClient
from headrace.types import RequestSummary, RequestTimings


class RecordingMetrics(GatewayMetrics):
    """The real metrics, which also remember what they were told."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[str, str]] = []
        self.finished: list[RequestSummary] = []

    def request_started(self, model: str, endpoint: str) -> None:
        self.started.append((model, endpoint))
        super().request_started(model, endpoint)

    def request_finished(self, summary: RequestSummary, timings: Sequence[RequestTimings]) -> None:
        self.finished.append(summary)
        super().request_finished(summary, timings)


class FakeGateway:
    """One model per name among `engines`; an engine each is a replica. All are ready at once."""

    def __init__(
        self,
        *engines: FakeClient,
        config: GatewayConfig | None = None,
        admission: Sequence[AdmissionPolicy] = (),
        limits: Limits | None = None,
        clock: Clock | None = None,
        environ: Mapping[str, str] | None = None,
        routing: RoutingPolicy | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.engines = engines or (FakeClient(),)
        self.engine = self.engines[0]
        names = dict.fromkeys(engine.card_when_ready.name for engine in self.engines)
        groups = [ModelGroup(name, tuple(self._replicas(name))) for name in names]
        self.router = Router(groups, policy=routing or RoundRobin(), fallback=RoundRobin())
        self.metrics = RecordingMetrics()
        self.observed: list[RequestSummary] = []
        config = config or GatewayConfig()
        self.state = GatewayState(
            config=Config(gateway=config),
            router=self.router,
            metrics=self.metrics,
            clock=clock or SystemClock(),
            observers=Observers([self._observe]),
            admission=AdmissionGate(admission, ledger=self.router.ledger),
            authenticator=Authenticator(config, environ or {}),
            limits=limits or Limits(),
            tracing=tracing,
        )
        self.app = create_app(self.state)
        for engine in self.engines:
            engine.become_ready()

    def _replicas(self, name: str) -> Iterator[Replica]:
        for engine in self.engines:
            if engine.card_when_ready.name == name:
                yield Replica(engine.id, name, engine)

    def _observe(self, *, summary: RequestSummary) -> None:
        self.observed.append(summary)

    def assert_idle(self) -> None:
        """Nothing is held anywhere: what every abort and overload test ends with."""
        assert [engine.num_running for engine in self.engines] == [0] * len(self.engines)
        assert self.state.admission.num_tickets == 0
        assert self.state.admission.num_waiting == 0
        assert dict(self.state.admission.held) == {}
        loads = [self.router.ledger.load(engine.id).num_requests for engine in self.engines]
        assert loads == [0] * len(self.engines)
        reserved = [self.router.ledger.reserved_blocks(engine.id) for engine in self.engines]
        assert reserved == [0] * len(self.engines)


class RawExchange:
    """One ASGI request: the test says when the body ends, when the client reads and when it leaves."""

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        body: object = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._app = app
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        self.may_send = asyncio.Event()
        """Cleared: the client reads nothing, so every send waits."""
        self.may_send.set()
        self.sent: list[Message] = []
        self.news = asyncio.Event()
        pairs = {"content-length": str(len(raw)), **(headers or {})}.items()
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "scheme": "http",
            "server": ("testserver", 80),
            "client": ("testclient", 1),
            "headers": [(name.lower().encode(), value.encode()) for name, value in pairs],
        }
        self.task: asyncio.Task[None] | None = None

    def start(self) -> RawExchange:
        """Begin; needs a running event loop."""
        self.task = asyncio.get_running_loop().create_task(
            self._app(self._scope, self._incoming.get, self._send)  # type: ignore[arg-type]
        )
        return self

    async def _send(self, message: Message) -> None:
        await self.may_send.wait()
        self.sent.append(message)
        self.news.set()

    def disconnect(self) -> None:
        """The client closes the connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def finished(self) -> RawExchange:
        """Wait until the application returns."""
        assert self.task is not None
        await self.task
        return self

    async def until_sent(self, count: int) -> None:
        """Wait until that many ASGI messages were sent."""
        while len(self.sent) < count:
            self.news.clear()
            await self.news.wait()

    @property
    def status(self) -> int | None:
        return next((m["status"] for m in self.sent if m["type"] == "http.response.start"), None)

    @property
    def headers(self) -> dict[str, str]:
        start = next(m for m in self.sent if m["type"] == "http.response.start")
        return {name.decode(): value.decode() for name, value in start["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.sent if m["type"] == "http.response.body")

    @property
    def is_complete(self) -> bool:
        """Whether the body was closed."""
        last = self.sent[-1] if self.sent else {"type": ""}
        return last["type"] == "http.response.body" and not last.get("more_body", False)

    def json(self) -> Any:
        return json.loads(self.body)


async def until(condition: Callable[[], object]) -> None:
    """Wait until `condition()` holds."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


def parse_events(body: str | bytes) -> list[Any]:
    """Return the events of an SSE body in order, strictly: JSON each, and "[DONE]"; comments skipped."""
    text = body.decode() if isinstance(body, bytes) else body
    assert text.endswith("\n\n"), "an event stream ends with a blank line"
    events: list[Any] = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), f"not an event: {block!r}"
        assert "\n" not in block, f"more than one line: {block!r}"
        data = block[len("data: ") :]
        events.append(data if data == "[DONE]" else json.loads(data))
    return events
