"""Sockets that the server listens on, and uvicorn as it is run here."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Iterator

import uvicorn

from headrace.errors import ConfigError

_SEND_BUFFER_BYTES = 128 << 10
"""What the kernel keeps for a client that does not read. Left alone it would grow to several MB each,
and a stream would be over before its writer felt that nobody takes it."""


def bind(host: str, port: int, *, key: str = "gateway") -> socket.socket:
    """Return a listening socket. ConfigError with the reason where the address cannot be had.

    `key` is the table of the configuration that the address is in.
    """
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
            f"{key}.host/port: cannot listen on {host}:{port}: {reason}. {remedy}"
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


class HttpServer(uvicorn.Server):
    """uvicorn, without its signal handlers: they would raise the signal again after a clean stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


_RESERVED_FILES = 128
"""Descriptors kept for engines, logs and connections that are being refused."""


def connection_limit(files_per_request: int) -> int:
    """Return how many connections fit the descriptors this process may have, raised as far as it may."""
    if sys.platform == "win32":
        return 1 << 30
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        return 1 << 30
    return int(max(16, (soft - _RESERVED_FILES) // files_per_request))
