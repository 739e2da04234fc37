"""The gateway process: bind, answer from the first moment, start the engines, serve until told to stop."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pluggy
import uvicorn
from anyio.abc import TaskGroup
from starlette.types import ASGIApp

from headrace import __version__
from headrace.announce import curl_line, memory_arithmetic, say, show_progress
from headrace.assembly import (
    build_admission,
    build_policy_desk,
    build_router,
    make_replica,
    script_paths,
)
from headrace.cli.progress import stage_progress
from headrace.clock import SystemClock
from headrace.config import Config, LoadedConfig
from headrace.config.check import check_choices
from headrace.errors import ConfigError, HeadraceError, InvalidRequest
from headrace.gateway.admin import ReplicaAdmin, replica_operations
from headrace.gateway.admin_policies import PolicyAdmin, policy_operations
from headrace.gateway.app import application, create_app
from headrace.gateway.auth import Access, Authenticator
from headrace.gateway.fleet import Fleet, Reload
from headrace.gateway.http_protocol import HttpProtocol
from headrace.gateway.lifecycle import until_idle
from headrace.gateway.metrics import GatewayMetrics
from headrace.gateway.observers import Observers
from headrace.gateway.operation import Operation
from headrace.gateway.policy_watch import watch_scripts
from headrace.gateway.state import GatewayState
from headrace.gateway.tls import tls_options
from headrace.gateway.tracing import create_tracing
from headrace.heap import keep_what_is_loaded, return_free_memory
from headrace.listening import HttpServer, bind, connection_limit
from headrace.logs import configure_logging, get_logger
from headrace.plugins.manager import create_plugin_manager, notify
from headrace.plugins.registry import Registries
from headrace.types import ServerInfo

_GRACE_SECONDS = 1
_CUT_OFF_SECONDS = 1.0
"""A stream that stalls ends by itself, and says so in the log, before its connection is cut off."""
ReadConfig = Callable[[], LoadedConfig]
"""Reads the configuration again, from where it was read first."""


def run_server(loaded: LoadedConfig, read_config: ReadConfig, *, watch: bool = False) -> int:
    """Serve until a signal; return the exit code. Raises HeadraceError where it cannot start.

    `watch`: policies that come from files are swapped in again when those are saved.
    """
    config = loaded.config
    configure_logging(config.logging.format, config.logging.level)
    manager = create_plugin_manager(
        discover=config.plugins.discover, blocked=config.plugins.blocked
    )
    registries = Registries.from_manager(manager)
    check_choices(loaded, registries)
    listener = bind(config.gateway.host, config.gateway.port)
    gateway = Gateway(config, registries, manager, listener, read_config)
    gateway.watches_scripts = watch
    if sys.platform == "win32":
        return asyncio.run(gateway.run())
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(gateway.run())


class Gateway:
    """One gateway process: its state, its engines, its HTTP server."""

    def __init__(
        self,
        config: Config,
        registries: Registries,
        manager: pluggy.PluginManager,
        listener: socket.socket,
        read_config: ReadConfig,
    ) -> None:
        self._config = config
        self._read_config = read_config
        self._manager = manager
        self._listener = listener
        self._exit_code = 0
        self.watches_scripts = False
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
        is_observed = manager.hook.headrace_request_finished.get_hookimpls()
        told = functools.partial(notify, manager, "headrace_request_finished")
        self._observers = Observers([told] if is_observed else [])
        state = GatewayState(
            config=config,
            router=self._router,
            metrics=GatewayMetrics(),
            clock=SystemClock(),
            observers=self._observers,
            admission=build_admission(config, registries, self._router.ledger),
            authenticator=authenticator,
            tracing=self._tracing,
        )
        self._state = state
        self._desk = build_policy_desk(config, registries, self._router, state.admission)
        self._fleet = Fleet(
            config, self._router, lambda *place: self._desk.adopt(make_replica(*place)), state.texts
        )
        self._admin_http: HttpServer | None = None
        self._http = self._main_server(tls)
        if config.gateway.admin.port is not None:
            self._admin_http = self._admin_server(config.gateway.admin.port)

    def _main_server(self, tls: dict[str, Any]) -> HttpServer:
        """Return the server of the main port, with /admin where it has no port of its own."""
        gateway = self._config.gateway
        has_own_port = gateway.admin.port is not None
        operations = [] if has_own_port else self._admin_operations("admin")
        return self._server(create_app(self._state, operations), **tls)

    def _admin_server(self, port: int) -> HttpServer:
        admin = self._config.gateway.admin
        self._admin_listener = bind(admin.host, port, key="gateway.admin")
        operations = self._admin_operations("admin_port")
        return self._server(application(self._state, operations))

    def _admin_operations(self, access: Access) -> list[Operation]:
        return [
            *replica_operations(ReplicaAdmin(self._fleet, self._reload), access),
            *policy_operations(PolicyAdmin(self._desk), access),
        ]

    def _server(self, app: ASGIApp, **options: Any) -> HttpServer:
        gateway = self._config.gateway
        return HttpServer(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                http=functools.partial(  # type: ignore[arg-type]
                    HttpProtocol,
                    stall_timeout=gateway.stall_timeout + _CUT_OFF_SECONDS,
                    receive_timeout=gateway.receive_timeout,
                    max_connections=connection_limit(2 if self._router.has_upstream else 1),
                ),
                ws="none",
                timeout_graceful_shutdown=_GRACE_SECONDS,
                **options,
            )
        )

    async def run(self) -> int:
        """Serve until a signal or a failed start; return the exit code."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch_signals, group)
            group.start_soon(self._watch_hangups)
            group.start_soon(self._start_engines)
            group.start_soon(self._state.admission.store.run)
            if self.watches_scripts:
                group.start_soon(watch_scripts, self._desk, script_paths(self._config))
            if self._admin_http is not None:
                group.start_soon(self._serve_admin, self._admin_http)
            await self._http.serve(sockets=[self._listener])
            await self._fleet.close()
            group.cancel_scope.cancel()
        self._observers.close()
        if self._tracing is not None:
            await anyio.to_thread.run_sync(self._tracing.close)
        return self._exit_code

    async def _serve_admin(self, server: HttpServer) -> None:
        host, port = self._admin_listener.getsockname()[:2]
        say(f"admin API listening on http://{host}:{port}")
        await server.serve(sockets=[self._admin_listener])

    async def _watch_signals(self, group: TaskGroup) -> None:
        """The first signal stops: nothing new is taken, what runs may finish. A second one forces."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            say(f"Headrace {__version__} listening on {self.url}")
            async for _ in signals:
                if self._state.lifecycle.is_stopping:
                    self._http.force_exit = True
                    await self._end()
                else:
                    self._state.lifecycle.stop()
                    group.start_soon(self._finish)

    async def _finish(self) -> None:
        """Let requests finish within the grace period; end what is left with an error."""
        admission, grace = self._state.admission, self._config.gateway.grace_period
        await until_idle(lambda: admission.num_tickets, grace)
        await self._end()

    async def _end(self) -> None:
        self._http.should_exit = True
        if self._admin_http is not None:
            self._admin_http.should_exit = True
        await self._fleet.close()

    async def _watch_hangups(self) -> None:
        """SIGHUP: read the configuration's file and the API keys again."""
        if sys.platform == "win32":
            return
        log = get_logger("headrace.server")
        with anyio.open_signal_receiver(signal.SIGHUP) as signals:
            async for _ in signals:
                try:
                    await self._reload()
                except HeadraceError as error:
                    log.error("configuration not read again", reason=str(error))

    async def _reload(self) -> Reload:
        """Read the configuration again and change the replicas. All or nothing where it is wrong."""
        try:
            loaded = await anyio.to_thread.run_sync(self._read_config)
            keys = self._state.authenticator.keys
            known = await anyio.to_thread.run_sync(keys.read)
            outcome = self._fleet.reload(loaded.config)
            keys.use(known)
            return outcome
        except ConfigError as error:
            raise InvalidRequest(f"the configuration is as before: {error}") from error

    async def _start_engines(self) -> None:
        """Start every replica at once; announce when all are ready, stop where one cannot start."""
        with stage_progress() as report:
            async with anyio.create_task_group() as watchers:
                watchers.start_soon(show_progress, self._router.replicas(), report)
                failures = await self._fleet.start()
                watchers.cancel_scope.cancel()
        if self._http.should_exit or self._state.lifecycle.is_stopping:
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
        return_free_memory()  # cards and tokenizers left pages behind
        keep_what_is_loaded()

    def _announce(self) -> None:
        cards = {replica.model_name: replica.client.card for replica in self._router.replicas()}
        for card in cards.values():
            if card is not None:
                say(memory_arithmetic(card))
        name = self._config.models[0].name
        say(f"ready at {self.url}; try:\n\n  {curl_line(self.url, name)}\n")
