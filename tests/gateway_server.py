"""A fake gateway behind a real uvicorn, for tests that need a socket."""

from __future__ import annotations

import socket
import threading
from typing import Any

import uvicorn

from headrace.testing.fake_gateway import FakeGateway


class Served:
    """A gateway on a free port of the loopback. `options` are uvicorn's; `send_bytes` bounds what the
    kernel takes for a client that does not read.
    """

    def __init__(
        self, *, gateway: FakeGateway | None = None, send_bytes: int | None = None, **options: Any
    ) -> None:
        self.gateway = gateway or FakeGateway()
        self.listener = socket.create_server(("127.0.0.1", 0))
        if send_bytes is not None:
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        self.port: int = self.listener.getsockname()[1]
        config = uvicorn.Config(self.gateway.app, log_config=None, lifespan="off", **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self.listener]}, daemon=True
        )
        self._thread.start()

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self.listener.close()
        self.gateway.state.observers.close()
