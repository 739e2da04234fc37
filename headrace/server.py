"""The gateway process: bind, answer from the first moment, start the engines, serve until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import pathlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import anyio
import anyio.to_thread
import pluggy
import uvicorn

from headrace import __version__
from headrace.cli.progress import stage_progress
from headrace.clock import SystemClock
from headrace.config import Config, LoadedConfig, replica_config
from headrace.config.check import check_choices
from headrace.engine.client import ProcessEngine
from headrace.errors import ConfigError, RequestError
from headrace.gateway.admission import AdmissionGate
from headrace.gateway.app import create_app
from headrace.gateway.auth import Authenticator
from headrace.gateway.http_protocol import HttpProtocol
from headrace.gateway.metrics import GatewayMetrics
from headrace.gateway.observers import Observers
from headrace.gateway.replica import Replica
from headrace.gateway.router import ModelGroup, Router
from headrace.gateway.state import GatewayState
from headrace.gateway.tls import tls_options
from headrace.gateway.tracing import create_tracing
from headrace.logs import configure_logging
from headrace.plugins.manager import create_plugin_manager, notify
from headrace.plugins.registry import Registries
from headrace.policies.admission.unlimited import Unlimited
from headrace.policies.routing.round_robin import RoundRobin
from headrace.policy_guard import AdmissionGuard
from headrace.types import ModelCard, ServerInfo

_GRACE_SECONDS = 1
_CUT_OFF_SECONDS = 1.0
"""A stream that stalls ends by itself, and says so in the log, before its connection is cut off."""
_SEND_BUFFER_BYTES = 128 << 10
"""What the kernel keeps for a client that does not read. Left alone it would grow to several MB each,
and a stream would be over before its writer felt that nobody takes it."""


def run_server(loaded: LoadedConfig) -> int:
    """Serve until a signal; return the exit code. Raises HeadraceError where it cannot start."""
    config = loaded.config
    configure_logging(config.logging.format, config.logging.level)
    manager = create_plugin_manager(
        discover=config.plugins.discover, blocked=config.plugins.blocked
    )
    registries = Registries.from_manager(manager)
    check_choices(loaded, registries)
    listener = bind(config.gateway.host, config.gateway.port)
    gateway = Gateway(config, registries, manager, listener)
    if sys.platform == "win32":
        return asyncio.run(gateway.run())
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(gateway.run())


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. ConfigError with the reason where the address cannot be had."""
    try:
        return _listen(host, port)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "Name an address of this machine with --host, such as 127.0.0.1, 0.0.0.0 or ::"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            remedy = "Stop what uses the port, or choose another with --port (0 takes a free one)"
        elif isinstance(error, PermissionError):
            remedy = "Choose a port above 1023 with --port (0 takes a free one)"
        raise ConfigError(
            f"gateway.host/port: cannot listen on {host}:{port}: {reason}. {remedy}"
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.set_inheritable(False)
    return listener


class Gateway:
    """One gateway process: its state, its engines, its HTTP server."""

    def __init__(
        self,
        config: Config,
        registries: Registries,
        manager: pluggy.PluginManager,
        listener: socket.socket,
    ) -> None:
        self._config = config
        self._manager = manager
        self._listener = listener
        self._exit_code = 0
        authenticator = Authenticator(config.gateway, os.environ)
        tls = tls_options(config.gateway.tls)
        self._tracing = create_tracing(config.telemetry)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if tls else 'http'}://{shown}:{port}"
        self._info = ServerInfo(
            host=host, port=port, models=tuple(model.name for model in config.models)
        )
        self._router = build_router(config, registries)
        self._observers = Observers(
            [functools.partial(notify, manager, "headrace_request_finished")]
        )
        state = GatewayState(
            config=config,
            router=self._router,
            metrics=GatewayMetrics(self._router),
            clock=SystemClock(),
            observers=self._observers,
            admission=build_admission(config, registries),
            authenticator=authenticator,
            tracing=self._tracing,
        )
        self._texts = state.texts
        self._http = HttpServer(
            uvicorn.Config(
                create_app(state),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                http=functools.partial(  # type: ignore[arg-type]
                    HttpProtocol,
                    stall_timeout=config.gateway.stall_timeout + _CUT_OFF_SECONDS,
                    receive_timeout=config.gateway.receive_timeout,
                ),
                ws="none",
                **tls,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )

    async def run(self) -> int:
        """Serve until a signal or a failed start; return the exit code."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch_signals)
            group.start_soon(self._start_engines)
            await self._http.serve(sockets=[self._listener])
            await self._stop_engines()
            group.cancel_scope.cancel()
        self._observers.close()
        if self._tracing is not None:
            await anyio.to_thread.run_sync(self._tracing.close)
        return self._exit_code

    async def _watch_signals(self) -> None:
        """The first signal stops, a second one forces. Engines are told at once, so that streams end."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            say(f"Headrace {__version__} listening on {self.url}")
            async for _ in signals:
                if self._http.should_exit:
                    self._http.force_exit = True
                self._http.should_exit = True
                await self._stop_engines()

    async def _start_engines(self) -> None:
        """Start every replica at once; announce when all are ready, stop where one cannot start."""
        replicas = self._router.replicas()
        failures: list[str] = []

        async def start(replica: Replica) -> None:
            try:
                await replica.client.start()
            except RequestError as error:
                failures.append(str(error))
            if replica.client.card is not None:
                await self._texts.get(
                    replica.client.card
                )  # warns now, and spares the first request

        with stage_progress() as report:
            async with anyio.create_task_group() as watchers:
                watchers.start_soon(_show_progress, replicas, report)
                async with anyio.create_task_group() as starts:
                    for replica in replicas:
                        starts.start_soon(start, replica)
                watchers.cancel_scope.cancel()
        if self._http.should_exit:
            return
        if failures:
            for reason in failures:
                sys.stderr.write(f"headrace: cannot start: {reason}\n")
            self._exit_code = 1
            self._http.should_exit = True
            return
        self._observers.submit(
            functools.partial(notify, self._manager, "headrace_server_started", info=self._info)
        )
        self._announce()

    async def _stop_engines(self) -> None:
        async with anyio.create_task_group() as group:
            for replica in self._router.replicas():
                group.start_soon(replica.client.close)

    def _announce(self) -> None:
        cards = {replica.model_name: replica.client.card for replica in self._router.replicas()}
        for card in cards.values():
            if card is not None:
                say(memory_arithmetic(card))
        name = self._config.models[0].name
        say(f"ready at {self.url}; try:\n\n  {curl_line(self.url, name)}\n")


class HttpServer(uvicorn.Server):
    """uvicorn, without its signal handlers: they would raise the signal again after a clean stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def build_router(config: Config, registries: Registries) -> Router:
    """Return the router over one engine process per replica of every model; nothing is started."""
    groups = []
    for index, model in enumerate(config.models):
        data = replica_config(config, index)
        replicas = tuple(
            Replica(name, model.name, ProcessEngine(name, data))
            for name in (f"{model.name}-{number}" for number in range(model.replicas))
        )
        groups.append(ModelGroup(model.name, replicas))
    choice = config.routing
    policy = registries.create("routing", choice.use, choice.options, pathlib.Path(config.base_dir))
    return Router(groups, policy=policy, fallback=RoundRobin())


def build_admission(config: Config, registries: Registries) -> AdmissionGate:
    base_dir = pathlib.Path(config.base_dir)
    policies = [
        registries.create("admission", choice.use, choice.options, base_dir)
        for choice in config.admission
    ]
    return AdmissionGate([AdmissionGuard(policy, Unlimited()) for policy in policies])


async def _show_progress(replicas: list[Replica], report: Callable[[str, float], None]) -> None:
    while True:
        for replica in replicas:
            progress = replica.client.progress
            if replica.client.state == "starting" and progress.stage:
                report(progress.stage, progress.fraction)
        await anyio.sleep(0.1)


def memory_arithmetic(card: ModelCard) -> str:
    """Say how the memory is used: weights, KV bytes per token x context, how many requests fit."""
    pool_tokens = card.num_blocks * card.block_size
    per_request = card.kv_bytes_per_token * card.max_model_len
    return (
        f"{card.name} ({card.architecture}, {card.backend}, {card.dtype}): "
        f"weights {human_bytes(card.weight_bytes)}; "
        f"KV {human_bytes(card.kv_bytes_per_token)} per token x {card.max_model_len:,} tokens "
        f"= {human_bytes(per_request)} per full-length request; "
        f"pool {human_bytes(pool_tokens * card.kv_bytes_per_token)} "
        f"({pool_tokens:,} tokens in {card.num_blocks:,} blocks) "
        f"-> {pool_tokens // card.max_model_len} full-length requests fit, "
        f"{pool_tokens // min(pool_tokens, 500)} of 500 tokens"
    )


def human_bytes(size: int) -> str:
    """Return a size with three digits and a unit: "97.5 MiB"."""
    value, unit = float(size), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"


def curl_line(url: str, model: str) -> str:
    """Return a command that can be pasted."""
    body = (
        f'{{"model": "{model}", "stream": true, "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}]}'
    )
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def say(line: str) -> None:
    """Print for whoever started the server."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
