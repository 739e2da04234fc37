"""Frames on a Unix socket: a length of 4 bytes (little-endian), then one msgpack struct.

Lengths are checked before there is room for the body, so that a stray writer cannot make either side
allocate without bound. A connection that ends inside a frame reads as one that ended: the frame is void.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.errors import EngineFailed
from headrace.types import FromEngine, StepEvents, ToEngine, TokenEvent

MAX_FRAME_BYTES = 256 << 20
"""The largest frame is a ModelCard, which carries a whole tokenizer.json (33 MB for Gemma 3)."""

_READ_BYTES = 64 << 10
_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromEngine)


def encode_frame(frame: ToEngine | FromEngine, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the frame as it goes on the wire, length included.

    Raises EngineFailed where it is larger than `max_bytes`, and UnicodeEncodeError or OverflowError
    where a value has no msgpack form (half a surrogate pair, an integer beyond 64 bits).
    """
    payload = _ENCODER.encode(frame)
    _check_length(len(payload), max_bytes)
    return _LENGTH.pack(len(payload)) + payload


def decode_to_engine(payload: bytes | bytearray) -> ToEngine:
    """Return a frame that a gateway sent. Raises EngineFailed where it is none."""
    frame: ToEngine = _decode(_TO_ENGINE, payload)
    return frame


def decode_from_engine(payload: bytes | bytearray) -> FromEngine:
    """Return a frame that an engine sent. Raises EngineFailed where it is none."""
    frame: FromEngine = _decode(_FROM_ENGINE, payload)
    return frame


def _decode(decoder: msgspec.msgpack.Decoder[Any], payload: bytes | bytearray) -> Any:
    try:
        return decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"a frame of {len(payload)} bytes cannot be read: {error}") from error


def _check_length(length: int, max_bytes: int) -> None:
    if length > max_bytes:
        raise EngineFailed(
            f"a frame of {length} bytes is larger than the limit of {max_bytes} bytes"
        )


def _split(frame: FromEngine) -> tuple[StepEvents, ...]:
    """Return a frame that is too large as smaller ones; () where there are none."""
    if isinstance(frame, StepEvents) and len(frame.events) > 1:
        middle = len(frame.events) // 2
        return (
            msgspec.structs.replace(frame, events=frame.events[:middle]),
            msgspec.structs.replace(frame, events=frame.events[middle:], step_seconds=0.0),
        )
    if isinstance(frame, StepEvents) and frame.events and frame.events[0].error is None:
        event = frame.events[0]
        error = EngineFailed(
            "the answer is too large to be sent; ask for fewer tokens or log probabilities"
        )
        failed = TokenEvent(
            request_id=event.request_id,
            index=event.index,
            finish_reason="error",
            error=error.info(),
        )
        return (msgspec.structs.replace(frame, events=[failed]),)
    return ()


class FrameSocket:
    """The engine's end: blocking, one thread that receives and one that sends."""

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._connection = connection
        self._max_bytes = max_bytes
        self._received = bytearray()

    def receive(self) -> ToEngine | None:
        """Wait for the next frame; None once the other side is gone."""
        if not self._read(_LENGTH.size):
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        _check_length(length, self._max_bytes)
        end = _LENGTH.size + length
        if not self._read(end):
            return None
        payload = self._received[_LENGTH.size : end]
        del self._received[:end]
        return decode_to_engine(payload)

    def send(self, *frames: FromEngine) -> None:
        """Wait until the frames are written. Raises OSError once the other side is gone."""
        self.send_all(self.encode(frames))

    def encode(self, frames: Iterable[FromEngine]) -> bytes:
        """Return the frames as they go on the wire.

        News too large for one frame goes in several; a choice whose own news is too large ends with
        an error, because one request must not cost the others their engine.
        """
        encoded: list[bytes] = []
        for frame in frames:
            self._encode(frame, encoded)
        return encoded[0] if len(encoded) == 1 else b"".join(encoded)

    def send_all(self, data: bytes) -> None:
        """Wait until encoded frames are written. Raises OSError once the other side is gone."""
        self._connection.sendall(data)

    def send_some(self, data: bytes, flags: int) -> int:
        """Write what the socket takes without waiting, given its flags for that; return how many bytes."""
        try:
            return self._connection.send(data, flags)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        self._connection.close()

    def _encode(self, frame: FromEngine, encoded: list[bytes]) -> None:
        try:
            encoded.append(encode_frame(frame, self._max_bytes))
        except EngineFailed:
            parts = _split(frame)
            if not parts:
                raise
            for part in parts:
                self._encode(part, encoded)

    def _read(self, length: int) -> bool:
        """Wait until so many bytes are there; False once the other side is gone."""
        received = self._received
        while len(received) < length:
            try:
                data = self._connection.recv(max(_READ_BYTES, length - len(received)))
            except ConnectionError:
                return False
            if not data:
                return False
            received += data
        return True


async def read_frame(
    reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES
) -> FromEngine | None:
    """Wait, without blocking the event loop, for an engine's next frame; None once it is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        _check_length(length, max_bytes)
        payload = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return decode_from_engine(payload)
