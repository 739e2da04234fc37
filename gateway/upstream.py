"""Another OpenAI-compatible server as a replica: its state, and one exchange at a time with it.

Answers come through httpx-aiohttp's transport, called without httpx's client, which costs more than all
the rest. Probes are hints: they tell when a server that failed may be tried again, and find one that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from types import TracebackType

import aiohttp
import httpx
import msgspec
import structlog
from httpx_aiohttp import AiohttpTransport

from headrace.config import ReplicaEntry
from headrace.engine.client import ClientState
from headrace.errors import RequestError
from headrace.gateway.breaker import CircuitBreaker
from headrace.interfaces import Clock
from headrace.types import EngineStats, ModelCard, Progress

_KEEPALIVE_SECONDS = 4.0
"""Below the 5 s after which common servers close an idle connection: theirs would race our request."""
_PROBE_SECONDS = 1.0
_QUIET_PROBE_SECONDS = 5.0
"""While all is well."""
_MAX_FAILED_PROBES = 3
_PROBE_ANSWER_BYTES = 1 << 20


class UpstreamFailed(RequestError):
    """The other server could not be reached, or broke off."""

    code = "upstream_failed"
    http_status = 502


class UpstreamTimeout(UpstreamFailed):
    """The other server kept silent for too long."""

    code = "upstream_timeout"
    http_status = 504


class _Listed(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None


class _Listing(msgspec.Struct):
    data: list[_Listed] = msgspec.field(default_factory=list)


_LISTING = msgspec.json.Decoder(_Listing)


class Exchange:
    """One answer, its head read. `read` gives the body, piece by piece as it arrives."""

    def __init__(self, upstream: Upstream, response: httpx.Response, deadline: float) -> None:
        stream = response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        self.status = response.status_code
        self.headers = response.headers
        self.content_type: str = response.headers.get("content-type", "application/json")
        self._upstream = upstream
        self._chunks = stream.__aiter__()
        self._deadline = deadline
        self._has_begun = False

    async def read(self) -> bytes | None:
        """Return the next piece; None at the end. Raises UpstreamFailed or UpstreamTimeout."""
        upstream = self._upstream
        if self._has_begun:
            async with upstream.patience(asyncio.timeout(upstream.entry.idle_timeout)):
                return await anext(self._chunks, None)
        self._has_begun = True
        async with upstream.patience(asyncio.timeout_at(self._deadline), is_first=True):
            return await anext(self._chunks, None)

    async def read_all(self, max_bytes: int) -> bytes:
        """Return the rest of the body. Raises UpstreamFailed where it is longer than `max_bytes`."""
        pieces: list[bytes] = []
        size = 0
        while (piece := await self.read()) is not None:
            size += len(piece)
            if size > max_bytes:
                raise UpstreamFailed(
                    f"replica '{self._upstream.id}' answered more than {max_bytes} bytes"
                )
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _Patience:
    """A timeout whose end, like every fault of the connection, becomes a failure of the replica."""

    __slots__ = ("_timer", "_upstream", "_waiting")

    def __init__(
        self, upstream: Upstream, timer: asyncio.Timeout, waiting: set[asyncio.Timeout] | None
    ) -> None:
        self._upstream = upstream
        self._timer = timer
        self._waiting = waiting

    async def __aenter__(self) -> None:
        if self._waiting is not None:
            self._waiting.add(self._timer)
        await self._timer.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._waiting is not None:
            self._waiting.discard(self._timer)
        name = f"replica '{self._upstream.id}'"
        try:
            await self._timer.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise UpstreamTimeout(f"{name} kept silent for too long") from None
        if isinstance(error, httpx.ConnectError):
            raise UpstreamFailed(f"{name} cannot be reached") from error
        if isinstance(error, (httpx.HTTPError, aiohttp.ClientError, OSError)):
            raise UpstreamFailed(f"{name} broke off") from error


class Upstream:
    """The client of one other server. Every method belongs to one event loop."""

    def __init__(
        self,
        client_id: str,
        model_name: str,
        entry: ReplicaEntry,
        breaker: CircuitBreaker,
        *,
        clock: Clock,
        api_key: str = "",
    ) -> None:
        self.id = client_id
        self.model_name = model_name
        self.upstream_model = entry.model or model_name
        """What the other server calls the model."""
        self.max_model_len: int | None = None
        """What it says of itself in /v1/models, where it does."""
        self.entry = entry
        self._extensions = {"timeout": {"connect": entry.connect_timeout}}
        self._breaker = breaker
        self._clock = clock
        self._base = entry.url.rstrip("/").removesuffix("/v1")
        self._urls: dict[str, httpx.URL] = {}
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._state: ClientState = "starting"
        self._failure: str | None = None
        self._transport: AiohttpTransport | None = None
        self._prober: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._waiting: set[asyncio.Timeout] = set()
        self._num_failed_probes = 0
        self._log = structlog.get_logger("headrace.gateway").bind(replica=client_id)

    # --- what every client tells ------------------------------------------------

    @property
    def state(self) -> ClientState:
        return self._state

    @property
    def progress(self) -> Progress:
        return Progress("connect", 0.0)

    @property
    def card(self) -> ModelCard | None:
        return None

    @property
    def stats(self) -> EngineStats:
        return EngineStats()

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def restarts_total(self) -> int:
        return 0

    async def start(self) -> None:
        """Begin to probe, and return after the first answer or failure: a server may come later."""
        if self._prober is None and self._state != "stopped":
            self._prober = asyncio.get_running_loop().create_task(self._probe_for_ever())
        await self._settled.wait()

    async def close(self) -> None:
        """Stop; exchanges that run end with an error. A second close does nothing."""
        self._state = "stopped"
        self._settled.set()
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.wait({self._prober})
        if self._transport is not None:
            await self._transport.aclose()

    # --- exchanges --------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def open(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Exchange]:
        """Send a request and wait for the answer's head. Raises UpstreamFailed or UpstreamTimeout.

        Leaving early closes the connection, so that the other server sees that nobody waits. Its
        silence is bounded: the first piece of the body within `first_byte_timeout`, later ones within
        `idle_timeout`.
        """
        request = httpx.Request(
            "POST",
            self._url(path),
            content=body,
            headers={**self._headers, **headers},
            extensions=self._extensions,
        )
        deadline = asyncio.get_running_loop().time() + self.entry.first_byte_timeout
        async with self.patience(asyncio.timeout_at(deadline), is_first=True):
            response = await self._send(request)
        try:
            yield Exchange(self, response, deadline)
        finally:
            await response.stream.aclose()  # type: ignore[union-attr]

    def patience(self, timer: asyncio.Timeout, *, is_first: bool = False) -> _Patience:
        """Return the context of one wait; a `first` one also ends when probes find the server dead."""
        return _Patience(self, timer, self._waiting if is_first else None)

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """Send, a second time where a connection kept from before turned out to be closed."""
        transport = self._opened()
        try:
            return await transport.handle_async_request(request)
        except httpx.ConnectTimeout as error:
            is_stale = isinstance(
                error.__cause__, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
            )
            if not is_stale or isinstance(error.__cause__, aiohttp.ClientConnectorError):
                raise
        return await transport.handle_async_request(request)

    def _opened(self) -> AiohttpTransport:
        if self._transport is None:
            self._transport = AiohttpTransport(verify=False, client=_session)
        return self._transport

    def _url(self, path: str) -> httpx.URL:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(self._base + path)
        return url

    # --- probes -----------------------------------------------------------------

    async def _probe_for_ever(self) -> None:
        while True:
            problem = await self._probe()
            self._take_probe(problem)
            self._settled.set()
            is_quiet = problem is None and self._breaker.is_closed
            await asyncio.sleep(_QUIET_PROBE_SECONDS if is_quiet else _PROBE_SECONDS)

    async def _probe(self) -> str | None:
        """Ask for the models; return what went wrong."""
        request = httpx.Request(
            "GET",
            self._url("/v1/models"),
            headers=self._headers,
            extensions=self._extensions,
        )
        try:
            async with asyncio.timeout(self.entry.connect_timeout):
                response = await self._opened().handle_async_request(request)
                try:
                    content = b""
                    async for piece in response.stream:  # type: ignore[union-attr]
                        content = (content + piece)[:_PROBE_ANSWER_BYTES]
                finally:
                    await response.stream.aclose()  # type: ignore[union-attr]
        except TimeoutError:
            return f"no answer to GET /v1/models within {self.entry.connect_timeout:g} s"
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            return f"GET /v1/models: {error}"
        if response.status_code >= 500 or response.status_code in (401, 403):
            return f"GET /v1/models answers {response.status_code}"
        self._read_listing(content)
        return None

    def _read_listing(self, content: bytes) -> None:
        try:
            listed = _LISTING.decode(content).data
        except msgspec.MsgspecError:
            return
        for entry in listed:
            if entry.id == self.upstream_model:
                self.max_model_len = entry.max_model_len

    def _take_probe(self, problem: str | None) -> None:
        now = self._clock.now()
        self._failure = problem
        if problem is None:
            self._num_failed_probes = 0
            if self._state == "starting":
                self._state = "ready"
                self._log.info("server behind is ready", url=self._base)
            self._breaker.try_now(now)
            return
        self._num_failed_probes += 1
        if self._num_failed_probes == 1:
            self._log.warning("server behind does not answer", url=self._base, reason=problem)
        if self._num_failed_probes == _MAX_FAILED_PROBES and self._state == "ready":
            self._breaker.trip(now)
            for timer in tuple(self._waiting):
                timer.reschedule(0.0)


def _session() -> aiohttp.ClientSession:
    """Return a session without what a relay has no use for: limits, cookies, decoding, headers."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept"),
    )
