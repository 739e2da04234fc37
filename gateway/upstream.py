"""Another OpenAI-compatible server as a replica: its state, and one exchange at a time with it.

Answers come through httpx-aiohttp's transport, called without httpx's client, which costs more than all
the rest. Probes are hints: they tell when a server that failed may be tried again, and find one that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import NoReturn

import aiohttp
import httpx
import msgspec
import structlog
from httpx_aiohttp import AiohttpTransport

from headrace.config import ReplicaEntry
from headrace.engine.client import ClientState
from headrace.gateway.breaker import CircuitBreaker
from headrace.gateway.upstream_errors import UpstreamFailed, UpstreamTimeout
from headrace.interfaces import Clock
from headrace.types import EngineStats, ModelCard, Progress

_KEEPALIVE_SECONDS = 4.0
"""Below the 5 s after which common servers close an idle connection: theirs would race our request."""
_FINISH_SECONDS = 0.05
_PROBE_SECONDS = 1.0
_PROBES_SKIPPED = 5
"""One of so many is sent while all is well."""
_MAX_FAILED_PROBES = 3
_PROBE_ANSWER_BYTES = 1 << 20


class _Listed(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None


class _Listing(msgspec.Struct):
    data: list[_Listed] = msgspec.field(default_factory=list)


_LISTING = msgspec.json.Decoder(_Listing)


class _PlainRequest(httpx.Request):
    """What the transport reads of a request, without the work that httpx's own constructor does."""

    def __init__(
        self,
        method: str,
        url: httpx.URL,
        headers: Mapping[str, str],
        content: bytes,
        timeout: float,
    ) -> None:
        self.method = method
        self.url = url
        self.headers = headers  # type: ignore[assignment]
        self.extensions = {"timeout": {"connect": timeout}}
        self._content = content


class Exchange:
    """One request to another server and its answer, piece by piece as it arrives.

    Only time spent waiting for the other server counts as its silence: until the first piece of the
    body `first_byte_timeout` in all, between two pieces `idle_timeout`.
    """

    def __init__(self, upstream: Upstream, waiting: set[Exchange]) -> None:
        self.status = 0
        self.content_type = "application/json"
        self.headers = httpx.Headers()
        self._upstream = upstream
        self._waiting = waiting
        self._limit = upstream.entry.first_byte_timeout
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._since: float | None = self._loop.time()
        self._timer = self._loop.call_later(self._limit, self._check)
        self._is_expired = False
        self._has_begun = False
        self._stream: httpx.AsyncByteStream | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        waiting.add(self)

    async def send(self, request: httpx.Request) -> None:
        """Send the request and wait for the answer's head. Raises UpstreamFailed or UpstreamTimeout."""
        try:
            response = await self._upstream.send(request)
        except BaseException as error:
            self._raise(error)
        self.status = response.status_code
        self.headers = response.headers
        self.content_type = response.headers.get("content-type", self.content_type)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._stream = response.stream
        self._chunks = self._stream.__aiter__()

    async def read(self) -> bytes | None:
        """Return the next piece; None at the end. Raises UpstreamFailed or UpstreamTimeout."""
        assert self._chunks is not None
        if self._has_begun:
            self._since = self._loop.time()
        try:
            chunk = await anext(self._chunks, None)
        except BaseException as error:
            self._raise(error)
        self._since = None
        if not self._has_begun:
            self._begin()
        return chunk

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

    async def finish(self) -> None:
        """Read to the end of a body whose last event has come, so that its connection can serve again.

        Not for long: what a server does after its last event is nothing to wait for.
        """
        with contextlib.suppress(TimeoutError, UpstreamFailed):
            async with asyncio.timeout(_FINISH_SECONDS):
                while await self.read() is not None:
                    pass

    async def close(self) -> None:
        """End the exchange; one that is not over closes its connection, which tells the other server."""
        self._timer.cancel()
        self._waiting.discard(self)
        if self._stream is not None:
            await self._stream.aclose()

    def expire(self) -> None:
        """End the wait that is under way: the other server is taken for dead."""
        if self._since is not None and self._task is not None:
            self._is_expired = True
            self._task.cancel()

    def _begin(self) -> None:
        self._has_begun = True
        self._waiting.discard(self)
        self._limit = self._upstream.entry.idle_timeout
        self._timer.cancel()
        self._timer = self._loop.call_later(self._limit, self._check)

    def _check(self) -> None:
        """Expire where the other server has been silent for too long; else look again when it could be."""
        now = self._loop.time()
        left = self._limit if self._since is None else self._since + self._limit - now
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self.expire()

    def _raise(self, error: BaseException) -> NoReturn:
        """Raise what a fault of the connection means."""
        self._since = None
        name = f"replica '{self._upstream.id}'"
        if isinstance(error, asyncio.CancelledError) and self._is_expired:
            assert self._task is not None
            self._is_expired = False
            if self._task.uncancel() == 0:
                raise UpstreamTimeout(f"{name} kept silent for too long") from None
        if isinstance(error, httpx.ConnectError):
            raise UpstreamFailed(f"{name} cannot be reached") from error
        if isinstance(error, (httpx.HTTPError, aiohttp.ClientError, OSError)):
            raise UpstreamFailed(f"{name} broke off") from error
        raise error


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
        self._breaker = breaker
        self._clock = clock
        self._base = entry.url.rstrip("/").removesuffix("/v1")
        self._urls: dict[str, httpx.URL] = {}
        self._headers = {
            "content-type": "application/json",
            "accept": "*/*",
            "accept-encoding": "identity",
            "user-agent": "headrace",
        }
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._state: ClientState = "starting"
        self._failure: str | None = None
        self._transport: AiohttpTransport | None = None
        self._prober: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._waiting: set[Exchange] = set()
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
        """None: only an engine here opens a checkpoint."""
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

    def begin(self) -> Exchange:
        """Return an exchange that is not sent yet. Whoever begins one closes it."""
        return Exchange(self, self._waiting)

    def request(self, path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Request:
        """Return a request for a path under the other server's base URL."""
        return _PlainRequest(
            "POST", self._url(path), {**self._headers, **headers}, body, self.entry.connect_timeout
        )

    async def send(self, request: httpx.Request) -> httpx.Response:
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
        num_quiet = 0
        while True:
            is_due = num_quiet % _PROBES_SKIPPED == 0
            if is_due or not self._breaker.is_closed or self._failure is not None:
                self.take_probe(await self._probe())
                self._settled.set()
            is_well = self._breaker.is_closed and self._failure is None
            num_quiet = num_quiet + 1 if is_well else 0
            await asyncio.sleep(_PROBE_SECONDS)

    async def _probe(self) -> str | None:
        """Ask for the models; return what went wrong."""
        url, patience = self._url("/v1/models"), self.entry.connect_timeout
        request = _PlainRequest("GET", url, self._headers, b"", patience)
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
        except (httpx.HTTPError, aiohttp.ClientError, OSError, ValueError) as error:
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

    def take_probe(self, problem: str | None) -> None:
        """Note the outcome of a probe: None, or what went wrong."""
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
            for exchange in tuple(self._waiting):
                exchange.expire()


def _session() -> aiohttp.ClientSession:
    """Return a session without what a relay has no use for: limits, cookies, decoding."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )
