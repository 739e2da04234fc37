"""The engine sends from its own thread and never waits; what the socket does not take, the writer sends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.engine import ipc
from headrace.engine.outbox import Outbox
from headrace.engine.sender import Sender
from headrace.errors import EngineFailed
from headrace.types import Accepted, EngineStats, Failed, FromEngine, Pong, StepEvents, TokenEvent


class Wire:
    """A sender, its outbox and the other end of its socket."""

    def __init__(self, max_bytes: int = ipc.MAX_FRAME_BYTES) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.theirs.settimeout(10)
        self.outbox = Outbox()
        self.sender = Sender(self.outbox, ipc.FrameSocket(self.ours, max_bytes))
        self._received = b""

    def say(self, frame: FromEngine) -> None:
        self.outbox.put(frame, wakes=False)

    def hear(self) -> FromEngine:
        while len(self._received) < 4 or len(self._received) < self._end:
            data = self.theirs.recv(1 << 16)
            assert data, "the connection ended"
            self._received += data
        end = self._end
        frame = ipc.decode_from_engine(self._received[4:end])
        self._received = self._received[end:]
        return frame

    @property
    def _end(self) -> int:
        return 4 + int.from_bytes(self._received[:4], "little")


@contextmanager
def wire(max_bytes: int = ipc.MAX_FRAME_BYTES) -> Iterator[Wire]:
    end = Wire(max_bytes)
    with end.ours, end.theirs:
        yield end


@contextmanager
def writing(end: Wire) -> Iterator[None]:
    writer = threading.Thread(target=end.sender.run)
    writer.start()
    try:
        yield
    finally:
        end.outbox.close()
        writer.join(10)
        assert not writer.is_alive()


def news(name: str, token: int, text: str = "") -> StepEvents:
    return StepEvents([TokenEvent(request_id=name, token_ids=[token], text=text)], EngineStats())


def test_what_the_socket_takes_is_sent_without_the_writer() -> None:
    with wire() as end:
        end.say(Accepted("a"))
        end.say(news("a", 1))
        end.sender.flush()
        assert [end.hear(), end.hear()] == [Accepted("a"), news("a", 1)]
        end.sender.flush()  # nothing waits
        assert not end.outbox.has_frames


def test_a_reader_that_stays_away_holds_nobody_up_and_misses_nothing() -> None:
    text = "x" * 60_000
    with wire() as end, writing(end):
        for token in range(200):
            end.say(news("a", token, text))
            end.sender.flush()
        tokens: list[int] = []
        num_frames = num_characters = 0
        while len(tokens) < 200:
            frame = end.hear()
            assert isinstance(frame, StepEvents)
            num_frames += 1
            for event in frame.events:
                tokens += event.token_ids
                num_characters += len(event.text)
        assert tokens == list(range(200)) and num_characters == 200 * len(text)
        assert num_frames < 200  # news merged while nobody read


def test_others_are_heard_while_the_engine_is_inside_a_step() -> None:
    with wire() as end, writing(end):
        end.outbox.put(Pong(3.0))
        assert end.hear() == Pong(3.0)


def test_what_waits_is_sent_before_the_end() -> None:
    with wire() as end:
        end.say(news("a", 1))
        with writing(end):
            end.outbox.put(Failed("the device is lost"))
        assert [end.hear(), end.hear()] == [news("a", 1), Failed("the device is lost")]


def test_a_frame_that_cannot_be_sent_is_an_error_and_a_reader_that_left_is_none() -> None:
    with wire(max_bytes=300) as end:
        end.theirs.close()
        end.say(Accepted("a"))
        end.sender.flush()
        end.say(Failed("x" * 1000))
        with pytest.raises(EngineFailed, match="limit of 300 bytes"):
            end.sender.flush()
