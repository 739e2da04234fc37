"""What tests do to a running server: read its numbers, wait until it is idle, talk to it by raw socket.

A raw socket, because only there a test decides when the client reads and when it is gone.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families


class Numbers:
    """The metrics of a server at one moment."""

    def __init__(self, url: str) -> None:
        page = _page(url)
        self._samples = [
            sample for family in text_string_to_metric_families(page) for sample in family.samples
        ]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of `headrace_{name}` that have these labels; 0 without any."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == f"headrace_{name}" and labels.items() <= sample.labels.items()
        )

    def lowest(self) -> float:
        """Return the smallest value of all samples: a gauge below zero was given back twice."""
        return min(sample.value for sample in self._samples)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds a block."""
        names = ("requests_running", "requests_waiting", "requests_active")
        is_quiet = all(self.value(name) == 0 for name in names)
        return is_quiet and self.value("kv_blocks_free") == self.value("kv_blocks") > 0


def _page(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=30, verify=False).text


def until_numbers(
    url: str, condition: Callable[[Numbers], object], seconds: float = 20.0
) -> Numbers:
    """Poll the metrics until they meet the condition and return them. AssertionError where they do not."""
    deadline = time.monotonic() + seconds
    while True:
        numbers = Numbers(url)
        if condition(numbers):
            return numbers
        if time.monotonic() > deadline:
            raise AssertionError(_page(url))
        time.sleep(0.02)


def until_idle(url: str, seconds: float = 20.0) -> Numbers:
    """Wait until nothing runs, waits or holds a block: what every abort test ends with."""
    return until_numbers(url, lambda numbers: numbers.is_idle, seconds)


class RawClient:
    """One connection. Reads what it is told to, when it is told to."""

    def __init__(self, url: str, *, receive_buffer_bytes: int | None = None) -> None:
        parts = urlsplit(url)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(60)
        self.socket.connect((parts.hostname, parts.port))
        self._host = parts.netloc

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> RawClient:
        """Send a request and read nothing."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", f"Host: {self._host}", f"Content-Length: {len(raw)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self.socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
        return self

    def read_to_end(self) -> bytes:
        """Return what arrives until the server closes or resets the connection."""
        pieces: list[bytes] = []
        with contextlib.suppress(ConnectionResetError):
            while piece := self.socket.recv(1 << 16):
                pieces.append(piece)
        return b"".join(pieces)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Close the connection at once, as a killed client does."""
        self.socket.close()


def stream_events(
    url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """Yield the events of a streamed request as they arrive: JSON each, and "[DONE]"."""
    options: dict[str, Any] = {"json": {**body, "stream": True}, "headers": headers}
    with httpx.stream("POST", url + path, timeout=120, verify=False, **options) as response:
        if response.status_code != 200:
            raise AssertionError((response.status_code, response.read()))
        for line in response.iter_lines():
            if line.startswith("data: "):
                data = line[len("data: ") :]
                yield data if data == "[DONE]" else json.loads(data)
