"""Events pass through however they are cut into pieces; only usage that nobody asked for stays behind."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.gateway.relay_body import read_relayed
from headrace.gateway.relay_events import RelayedEvents, renamed
from headrace.gateway.upstream_errors import UpstreamFailed
from headrace.testing.fake_upstream import DONE, USAGE, delta, event

STREAM = [delta("Hel"), delta("lo \U0001fae0"), delta("", finish_reason="stop"), USAGE, DONE]


def fed(events: RelayedEvents, pieces: list[bytes]) -> bytes:
    return b"".join(events.feed(piece) for piece in pieces) + events.finish()


@given(st.lists(st.integers(0, len(b"".join(STREAM))), max_size=12), st.booleans())
def test_however_it_is_cut_the_same_goes_out(cuts: list[int], asked: bool) -> None:
    """S09: the usage chunk reaches whoever asked for it, and nobody else."""
    raw = b"".join(STREAM)
    places = sorted({0, len(raw), *cuts})
    pieces = [raw[a:b] for a, b in zip(places, places[1:], strict=False)]
    events = RelayedEvents(drop_usage=not asked)
    assert fed(events, pieces) == b"".join(each for each in STREAM if asked or each is not USAGE)
    assert events.usage is not None
    assert (events.usage.prompt_tokens, events.usage.completion_tokens) == (5, 2)
    assert events.finish_reasons == ["stop"] and events.is_done


def test_other_line_ends_and_a_missing_last_blank_line() -> None:
    events = RelayedEvents(drop_usage=True)
    raw = b"".join(STREAM).replace(b"\n", b"\r\n").removesuffix(b"\r\n")
    out = fed(events, [raw[:30], raw[30:31], raw[31:]])
    assert out.replace(b"\r", b"").strip() == b"".join(STREAM).replace(USAGE, b"").strip()
    assert events.is_done


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_an_event_goes_out_with_its_last_byte(line_end: bytes) -> None:
    """S17: whatever ends its lines, byte after byte, an event is not held until the next one."""
    events = RelayedEvents(drop_usage=True)
    for each in (*STREAM[:3], DONE):
        raw = each.replace(b"\n", line_end)
        out = [events.feed(raw[place : place + 1]) for place in range(len(raw))]
        assert out == [b""] * (len(raw) - 1) + [raw]
    assert events.is_done


def test_the_models_name_is_ours_and_texts_are_left_alone() -> None:
    said = 'say "model":"far" and "usage" and "error"'
    events = RelayedEvents(drop_usage=True, rename=(b'"far"', b'"near"'))
    first = json.loads(fed(events, [delta(said)]).partition(b"data: ")[2])
    assert first["model"] == "near" and first["choices"][0]["delta"]["content"] == said
    assert renamed(b'{"model":"far","x":"model"}', b'"far"', b'"n"') == b'{"model":"n","x":"model"}'


def test_an_error_of_theirs_is_noticed() -> None:
    events = RelayedEvents(drop_usage=True)
    told = event({"error": {"message": "the engine died", "code": "engine_failed"}})
    assert events.feed(told) == told
    assert events.error is not None and events.error.message == "the engine died"


def test_an_event_without_an_end_is_cut_off() -> None:
    """S17: 200 MB without a blank line; the memory stays within the bound."""
    events = RelayedEvents(drop_usage=True)
    piece = b"x" * (1 << 20)
    tracemalloc.start()
    with pytest.raises(UpstreamFailed, match="event of over"):
        for _ in range(200):
            assert events.feed(piece) == b""
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


BODY = b'{"model": "near", "messages": [{"role":"user","content":"\\u00e9 1.50"}], "x": {"y": 1e2}}'


def test_a_body_is_only_changed_where_it_must_be() -> None:
    body = read_relayed(BODY)
    assert body.bytes_for("near") is BODY
    table = json.loads(body.bytes_for("far"))
    assert table == {**json.loads(BODY), "model": "far"}
    assert b"1e2" in body.bytes_for("far") and b"\\u00e9 1.50" in body.bytes_for("far")


def test_a_stream_always_asks_for_usage() -> None:
    options = {"include_usage": False, "other": [1]}
    plain = read_relayed(json.dumps({"model": "m", "stream": True}).encode())
    given = read_relayed(
        json.dumps({"model": "m", "stream": True, "stream_options": options}).encode()
    )
    asking = read_relayed(b'{"model":"m","stream":true,"stream_options":{"include_usage":true}}')
    assert json.loads(plain.bytes_for("m"))["stream_options"] == {"include_usage": True}
    assert json.loads(given.bytes_for("m"))["stream_options"] == {**options, "include_usage": True}
    assert asking.bytes_for("m") is asking.raw and asking.wants_usage and not given.wants_usage


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"model": 7}', b'{"n": "x"}', b'{"x": NaN}'])
def test_what_is_no_request_is_refused_here(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_relayed(raw)
