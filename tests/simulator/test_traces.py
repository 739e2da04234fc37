"""Traces: every format read, what cannot be read named, workloads that repeat and share what they say."""

from __future__ import annotations

import pathlib
import statistics

import pytest

from headrace.errors import ConfigError
from headrace.simulator.prompts import PromptMaker
from headrace.simulator.trace import TraceRequest, in_order, write_mooncake
from headrace.simulator.trace_files import read_trace
from headrace.simulator.workloads import WORKLOADS, generate


def read(folder: pathlib.Path, text: str, name: str = "trace.jsonl") -> list[TraceRequest]:
    (folder / name).write_text(text)
    return list(read_trace(folder / name).requests)


def test_a_mooncake_trace(tmp_path: pathlib.Path) -> None:
    text = (
        '{"timestamp": 27000, "input_length": 1025, "output_length": 52, "hash_ids": [46, 47, 48]}\n'
        '{"timestamp": 28500, "input_length": 10, "output_length": 3, "hash_ids": [46], "more": 1}\n'
    )
    first, second = read(tmp_path, text)
    assert first == TraceRequest(0.0, 1025, 52, (46, 47, 48))
    assert (second.at, second.hash_ids) == (1.5, (46,))


def test_an_azure_trace(tmp_path: pathlib.Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:04.0790000,4808,10\n"
        "2023-11-16 18:17:03.9799600,3180,8\n"
    )
    rows = read(tmp_path, text, "trace.csv")
    assert [row.num_prompt_tokens for row in rows] == [3180, 4808]
    assert rows[1].at == pytest.approx(0.09904, abs=1e-6)


def test_a_burstgpt_trace_leaves_out_what_failed(tmp_path: pathlib.Path) -> None:
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5.0,7,1.2,ChatGPT,472,18,490,Conversation log\n"
        "45.0,8,0.1,ChatGPT,1087,0,1087,Conversation log\n"
        "118.0,9,3.0,GPT-4,417,276,693,Conversation log\n"
    )
    first, second = read(tmp_path, text, "trace.csv")
    assert (first.at, first.num_output_tokens, first.session) == (0.0, 18, "7")
    assert (second.at, second.num_prompt_tokens) == (113.0, 417)


def test_a_gateway_s_log(tmp_path: pathlib.Path) -> None:
    text = (
        '{"event": "listening", "timestamp": "2026-01-01T00:00:00Z"}\n'
        '{"event": "request finished", "timestamp": "2026-01-01T00:00:09.5Z", "duration_seconds": 2.5,'
        ' "prompt_tokens": 12, "completion_tokens": 7}\n'
        '{"event": "request finished", "timestamp": "2026-01-01T00:00:09.6Z", "duration_seconds": 9.1,'
        ' "prompt_tokens": 30, "completion_tokens": 9}\n'
        '{"event": "request finished", "timestamp": "2026-01-01T00:00:10Z", "duration_seconds": 0.1,'
        ' "prompt_tokens": 0, "completion_tokens": 0, "status": 400}\n'
    )
    first, second = read(tmp_path, text)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (30, 9)
    assert second.num_prompt_tokens == 12
    assert second.at == pytest.approx(6.5)


def test_the_log_of_a_real_gateway_can_be_replayed(tmp_path: pathlib.Path) -> None:
    """The fields are those that the gateway writes."""
    import inspect

    from headrace.gateway.accounting import RequestRecord

    source = inspect.getsource(RequestRecord.finish)
    for field in ("request finished", "prompt_tokens", "completion_tokens", "duration_seconds"):
        assert field in source


BAD = {
    "": "is empty",
    "hello\n": "no format known",
    '{"timestamp": 1, "input_length": "x", "output_length": 1}\n': "line 1: Expected `int`",
    '{"timestamp": 1, "input_length": 0, "output_length": 1}\n': "line 1: .*lengths from 1",
    '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n': "makes 2 blocks",
    "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n": "line 2: Invalid isoformat",
    "TIMESTAMP,ContextTokens,GeneratedTokens\n1\n": "line 2: it has 1 of 3 columns",
    "TIMESTAMP,ContextTokens,GeneratedTokens\n": "no request with an output",
}


@pytest.mark.parametrize("text", BAD)
def test_what_cannot_be_read_is_named(text: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=BAD[text]):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_repeats_from_its_seed_and_survives_being_written(
    name: str, tmp_path: pathlib.Path
) -> None:
    trace = generate(name, num_requests=300, seed=1)
    assert trace == generate(name, num_requests=300, seed=1)
    assert trace != generate(name, num_requests=300, seed=2)
    assert len(trace.requests) == 300 and trace.requests[0].at == 0
    write_mooncake(trace, tmp_path / "written.jsonl")
    again = read_trace(tmp_path / "written.jsonl").requests
    assert [request.hash_ids for request in again] == [r.hash_ids for r in trace.requests]
    assert [request.tenant for request in again] == [r.tenant for r in trace.requests]
    assert all(abs(a.at - b.at) <= 0.001 for a, b in zip(again, trace.requests, strict=True))


def test_workloads_come_at_the_rate_asked_for() -> None:
    for name in ("sharegpt-like", "azure-code-like", "shared-prefix", "burst"):
        rate = generate(name, num_requests=4000, seed=0, rate=50.0).requests_per_second
        assert rate == pytest.approx(50.0, rel=0.25), name


def test_lengths_are_those_of_the_traces_they_follow() -> None:
    code = generate("azure-code-like", num_requests=2000, seed=0).requests
    assert statistics.median(r.num_prompt_tokens for r in code) == pytest.approx(1500, rel=0.1)
    assert statistics.median(r.num_output_tokens for r in code) == pytest.approx(13, rel=0.1)
    agents = generate("agent-loop", num_requests=4000, seed=0).requests
    assert statistics.median(r.num_output_tokens for r in agents) == pytest.approx(252, rel=0.1)
    turns: dict[str, list[TraceRequest]] = {}
    for request in agents:
        turns.setdefault(request.session, []).append(request)
    grown = [
        later.num_prompt_tokens - earlier.num_prompt_tokens - earlier.num_output_tokens
        for session in turns.values()
        for earlier, later in zip(session, session[1:], strict=False)
    ]
    assert statistics.median(grown) == pytest.approx(857, rel=0.15)


def test_an_agent_s_prompts_begin_with_those_before() -> None:
    requests = generate("agent-loop", num_requests=400, seed=0).requests
    first = requests[0].session
    session = [request for request in requests if request.session == first]
    assert len(session) > 1
    for earlier, later in zip(session, session[1:], strict=False):
        shared = earlier.num_prompt_tokens // 512
        assert later.hash_ids[:shared] == earlier.hash_ids[:shared]


def test_an_unknown_workload_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="agent-loop"):
        generate("agent-lop", num_requests=1, seed=0)


def test_prompts_share_tokens_and_digests_as_far_as_their_ids_agree() -> None:
    maker = PromptMaker(16, "m")
    tokens, digests = maker.make(TraceRequest(0, 1200, 1, (1, 2, 3)))
    other, others = maker.make(TraceRequest(0, 1500, 1, (1, 2, 3)))
    assert (len(tokens), len(digests)) == (1200, 75)
    assert other[:1200] == tokens and others[:75] == digests
    _, elsewhere = maker.make(TraceRequest(0, 1200, 1, (1, 5, 3)))
    assert elsewhere[:32] == digests[:32] and not set(elsewhere[32:]) & set(digests)


def test_times_start_at_zero_and_in_order() -> None:
    trace = in_order("t", [TraceRequest(9.0, 1, 1), TraceRequest(4.0, 2, 1)])
    assert [(r.at, r.num_prompt_tokens) for r in trace.requests] == [(0.0, 2), (5.0, 1)]
    assert [r.at for r in trace.faster(2.0).requests] == [0.0, 2.5]
