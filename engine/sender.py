"""What an engine says on its way to the socket: from the engine's own thread while that takes no waiting.

A thread beside it writes what the socket does not take at once, and what others say while the engine is
inside a step. Handing every step's news to that thread cost more than writing it.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from headrace.engine.ipc import FrameSocket
from headrace.engine.outbox import Outbox

_AT_ONCE = getattr(socket, "MSG_DONTWAIT", None)


class Sender:
    """Sends an outbox's frames in order. `flush` belongs to the engine's thread, `run` to the writer's."""

    def __init__(self, outbox: Outbox, frames: FrameSocket) -> None:
        self._outbox = outbox
        self._frames = frames
        self._sending = threading.Lock()
        self._rest = b""
        """What the socket did not take at once."""

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it; the rest is the writer's. Never waits.

        Raises EngineFailed where a frame cannot be sent. While the other side does not read, news
        merges in the outbox.
        """
        if not self._outbox.has_frames:
            return
        if _AT_ONCE is None or not self._sending.acquire(blocking=False):
            self._outbox.wake()
            return
        try:
            if not self._rest:
                data = self._frames.encode(self._outbox.take())
                with contextlib.suppress(OSError):  # the other side is gone: the reader knows
                    self._rest = data[self._frames.send_some(data, _AT_ONCE) :]
        finally:
            self._sending.release()
        if self._rest:
            self._outbox.wake()

    def run(self) -> None:
        """Send until the outbox is closed and empty. Raises what sending raises."""
        while True:
            self._outbox.wait()
            with self._sending:
                data = self._rest + self._frames.encode(self._outbox.take())
                self._rest = b""
                if data:
                    self._frames.send_all(data)
                elif self._outbox.is_closed:
                    return
