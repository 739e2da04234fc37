"""Frames survive the wire, and nothing on it can make either side allocate without bound."""

from __future__ import annotations

import asyncio
import socket
import struct

import msgspec
import pytest

from headrace.engine import ipc
from headrace.errors import EngineFailed, ErrorInfo
from headrace.testing.fake_engine import fake_card
from headrace.types import (
    Abort,
    Accepted,
    CommitPolicy,
    DropPolicy,
    EngineStats,
    Failed,
    FromEngine,
    GenerationRequest,
    Ping,
    PolicyChoice,
    PolicyPrepared,
    PolicyReport,
    PolicyState,
    Pong,
    PreparePolicy,
    Progress,
    Ready,
    Refused,
    RequestTimings,
    SamplingParams,
    StartEngine,
    StepEvents,
    Stop,
    Submit,
    ToEngine,
    TokenAlternative,
    TokenEvent,
    TokenLogprobs,
    Usage,
)

REQUEST = GenerationRequest(
    request_id="r",
    model="m",
    prompt_token_ids=[1, 2, 3],
    sampling=SamplingParams(logit_bias={5: -1.5}, seed=2**64 - 1, stop=("ü",), n=2),
    prefix_hashes=(b"\x00\xff",),
)
ALTERNATIVE = TokenAlternative(7, -0.25, "�", b"\xe2\x82")
EVENT = TokenEvent(
    request_id="r",
    index=1,
    token_ids=[7],
    text="€",
    logprobs=[TokenLogprobs(ALTERNATIVE, [ALTERNATIVE])],
    prompt_logprobs=[None, TokenLogprobs(ALTERNATIVE, [])],
    finish_reason="stop",
    stop_reason="ü",
    usage=Usage(3, 1, 0),
    timings=RequestTimings(
        queue_seconds=0, prefill_seconds=1, decode_seconds=2, ttft_seconds=None, num_preemptions=0
    ),
)
TO_ENGINE: list[ToEngine] = [
    StartEngine(config={"models": [{"name": "m"}], "path": "/x"}),
    Submit(REQUEST),
    Abort("r"),
    PreparePolicy(1, "scheduling", PolicyChoice("./p.py:P", {"weight": 0.5})),
    CommitPolicy(1),
    DropPolicy(1),
    Ping(),
    Stop(),
]
FROM_ENGINE: list[FromEngine] = [
    Progress("load", 0.5),
    Ready(fake_card()),
    Accepted("r"),
    Refused("r", ErrorInfo(code="x", message="y", http_status=400, param="prompt")),
    StepEvents([EVENT], EngineStats(num_running=1), 0.5),
    PolicyPrepared(1, "it has no class P"),
    PolicyReport([PolicyState(kind="scheduling", name="fcfs", use="fcfs", strikes=1)], 1),
    Pong(0.25),
    Failed("why"),
]


@pytest.fixture
def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def payload(frame: ToEngine | FromEngine) -> bytes:
    return ipc.encode_frame(frame)[4:]


@pytest.mark.parametrize("frame", TO_ENGINE, ids=lambda frame: type(frame).__name__)
def test_every_frame_to_the_engine_round_trips(frame: ToEngine) -> None:
    assert ipc.decode_to_engine(payload(frame)) == frame


@pytest.mark.parametrize("frame", FROM_ENGINE, ids=lambda frame: type(frame).__name__)
def test_every_frame_from_the_engine_round_trips(frame: FromEngine) -> None:
    assert ipc.decode_from_engine(payload(frame)) == frame


def test_every_kind_of_frame_is_covered() -> None:
    assert {type(frame) for frame in TO_ENGINE} == set(ToEngine.__args__)
    assert {type(frame) for frame in FROM_ENGINE} == set(FromEngine.__args__)


def test_blocking_end_reads_frames_that_arrive_in_pieces(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    data = ipc.encode_frame(Abort("first")) + ipc.encode_frame(Submit(REQUEST))
    with ours, theirs:
        frames = ipc.FrameSocket(theirs)
        ours.sendall(data[:6])
        ours.sendall(data[6:])
        assert frames.receive() == Abort("first")
        assert frames.receive() == Submit(REQUEST)
        ours.sendall(data[:6])  # ends inside a frame
        ours.shutdown(socket.SHUT_WR)
        assert frames.receive() is None


def test_blocking_end_refuses_a_length_over_the_limit_before_reading_it(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    with ours, theirs:
        ours.sendall(struct.pack("<I", 2**32 - 1))
        with pytest.raises(EngineFailed, match="4294967295 bytes is larger than the limit of 100"):
            ipc.FrameSocket(theirs, max_bytes=100).receive()


def test_a_frame_over_the_limit_is_not_sent() -> None:
    with pytest.raises(EngineFailed, match="larger than the limit of 8 bytes"):
        ipc.encode_frame(Failed("x" * 100), max_bytes=8)


def receive_news(connection: socket.socket) -> list[StepEvents]:
    """Return the frames that are there."""
    frames = []
    rest = connection.recv(1 << 20)
    while rest:
        (length,) = struct.unpack("<I", rest[:4])
        frame = ipc.decode_from_engine(rest[4 : 4 + length])
        assert isinstance(frame, StepEvents)
        frames.append(frame)
        rest = rest[4 + length :]
    return frames


def test_what_is_sent_together_arrives_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    news = [StepEvents([EVENT], EngineStats(num_running=count)) for count in range(3)]
    with ours, theirs:
        ipc.FrameSocket(ours).send(*news)
        assert receive_news(theirs) == news


def test_news_over_the_limit_goes_in_several_frames(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """A step of many large events must not end the engine. Its time is told once."""
    ours, theirs = pair
    news = StepEvents([EVENT] * 5, EngineStats(num_running=1), 0.5)
    limit = len(payload(StepEvents([EVENT] * 2, EngineStats(num_running=1), 0.5)))
    with ours, theirs:
        ipc.FrameSocket(ours, max_bytes=limit).send(news)
        frames = receive_news(theirs)
    assert [event for frame in frames for event in frame.events] == news.events
    assert len(frames) > 1 and sum(frame.step_seconds for frame in frames) == 0.5
    assert {frame.stats for frame in frames} == {news.stats}


def test_news_of_one_choice_over_the_limit_ends_that_choice(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    large = msgspec.structs.replace(EVENT, request_id="large", index=3, text="x" * 2000)
    with ours, theirs:
        frames = ipc.FrameSocket(ours, max_bytes=1000)
        frames.send(StepEvents([EVENT, large, EVENT], EngineStats()))
        first, failed, last = [e for frame in receive_news(theirs) for e in frame.events]
        with pytest.raises(EngineFailed, match="limit of 1000 bytes"):
            frames.send(Failed("x" * 2000))
    assert first == last == EVENT
    assert (failed.request_id, failed.index, failed.finish_reason) == ("large", 3, "error")
    assert failed.error is not None and failed.error.code == "engine_failed"


@pytest.mark.parametrize(
    "data",
    [b"\xc1", msgspec.msgpack.encode({"type": "nonsense"}), payload(Ready(fake_card()))],
    ids=["not msgpack", "unknown tag", "a frame of the other direction"],
)
def test_what_is_no_frame_is_reported(data: bytes) -> None:
    with pytest.raises(EngineFailed, match="cannot be read"):
        ipc.decode_to_engine(data)


def test_async_end_reads_frames_and_their_end() -> None:
    async def read() -> list[FromEngine | None]:
        reader = asyncio.StreamReader()
        data = ipc.encode_frame(Accepted("a")) + ipc.encode_frame(Failed("b"))
        reader.feed_data(data + data[:7])
        reader.feed_eof()
        return [await ipc.read_frame(reader) for _ in range(3)]

    assert asyncio.run(read()) == [Accepted("a"), Failed("b"), None]


def test_async_end_refuses_a_length_over_the_limit() -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(struct.pack("<I", 101))
        await ipc.read_frame(reader, max_bytes=100)

    with pytest.raises(EngineFailed, match="101 bytes"):
        asyncio.run(read())
