"""`headrace simulate` and `headrace tune`, as somebody types them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli.app import app
from headrace.config import load_config
from headrace.errors import ConfigError, HeadraceError
from headrace.simulator.hardware import from_profile


def headrace(*words: str) -> Result:
    result = CliRunner().invoke(app, list(words))
    if isinstance(result.exception, HeadraceError):
        raise result.exception
    return result


LOAD = ("--workload", "burst", "--requests", "40", "--rate", "60")


def test_policies_side_by_side_in_a_table_a_page_and_json(tmp_path: pathlib.Path) -> None:
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    policies = ("--policy", "fcfs", "--policy", "shortest_first,eviction=lfu,routing=cost")
    files = ("--json", str(data), "--report", str(page))
    result = headrace("simulate", *LOAD, *policies, "--speeds", "0.5,1", *files)
    assert result.exit_code == 0, result.output
    assert "shortest_first, eviction lfu, routing cost" in result.output
    document = json.loads(data.read_text())
    assert [run["name"] for run in document["runs"]][::2] == [
        "fcfs",
        "shortest_first, eviction lfu, routing cost",
    ]
    assert {run["served"] for run in document["runs"]} == {40}
    text = page.read_text()
    for title in (
        "Goodput against rate",
        "TTFT: share",
        "Requests waiting",
        "KV blocks",
        "Service",
    ):
        assert title in text
    assert "http" not in text.replace("http-equiv", "")
    before = data.read_bytes(), page.read_bytes()
    headrace("simulate", *LOAD, *policies, "--speeds", "0.5,1", *files)
    assert before == (data.read_bytes(), page.read_bytes())


def test_a_written_load_replays_to_the_same_outcome(tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "burst.jsonl"
    first = headrace("simulate", *LOAD, "--write-trace", str(trace))
    again = headrace("simulate", "--trace", str(trace))
    assert trace.read_text().count("\n") == 40
    head = first.stdout.splitlines()[0]
    assert head == again.stdout.splitlines()[0]


def test_a_policy_from_a_file_and_settings_from_a_configuration(tmp_path: pathlib.Path) -> None:
    policy = tmp_path / "mine.py"
    headrace("policies", "new", "scheduling", str(policy))
    config = tmp_path / "headrace.yaml"
    config.write_text("models: [{source: x, engine: {max_num_sequences: 3}, replicas: 2}]\n")
    data = tmp_path / "data.json"
    result = headrace(
        "simulate", *LOAD, "-c", str(config), "--policy", str(policy), "--json", str(data)
    )
    assert result.exit_code == 0, result.output
    document = json.loads(data.read_text())
    assert document["engine"]["max_num_sequences"] == 3
    assert (document["replicas"], document["runs"][0]["name"]) == (2, "Mine")
    assert max(moment[2] for moment in document["runs"][0]["moments"]) <= 6


def profile(folder: pathlib.Path) -> pathlib.Path:
    document = {
        "format": "headrace-step-profile-1",
        "model": {"name": "tiny", "kv_bytes_per_token": 100},
        "machine": {"cpu": "a processor"},
        "engine": {
            "block_size": 16,
            "num_blocks": 64,
            "max_model_len": 512,
            "max_num_sequences": 4,
            "max_batched_tokens": 128,
        },
        "step_time": {
            "base_seconds": 0.01,
            "seconds_per_prefill_token": 1e-4,
            "seconds_per_sequence": 1e-3,
            "seconds_per_kv_row": 0.0,
        },
        "overhead": {
            "engine_seconds_per_step": 0.0004,
            "served_gaps": [[1, 0.001]],
            "engine_seconds_per_sequence": 0.0,
            "gateway_seconds_per_request": 0.05,
        },
    }
    path = folder / "profile.json"
    path.write_text(json.dumps(document))
    return path


def test_a_measured_profile_sets_times_pool_and_settings(tmp_path: pathlib.Path) -> None:
    trace, data = tmp_path / "one.jsonl", tmp_path / "data.json"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 11}\n')
    headrace(
        *("simulate", "--trace", str(trace)),
        *("--profile", str(profile(tmp_path)), "--json", str(data)),
    )
    document = json.loads(data.read_text())
    assert document["engine"] == {
        "max_model_len": 512,
        "max_num_sequences": 4,
        "max_batched_tokens": 128,
        "block_size": 16,
        "num_blocks": 64,
    }
    latency = document["runs"][0]["latency_seconds"]
    assert latency["ttft"]["p50"] == pytest.approx(0.05 + 0.01 + 0.001 + 0.01 + 0.001)
    assert latency["tpot"]["p50"] == pytest.approx(0.012)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"served_gaps": [[1]]}, "no whole profile"),
        ({"served_gaps": None}, "no whole profile"),
        ({"served_gaps": [[0, 0.001]]}, "is no number of sequences and seconds"),
        ({"served_gaps": [[1, -0.001]]}, "is no number of sequences and seconds"),
        ({"engine_seconds_per_step": "x"}, "no whole profile"),
    ],
)
def test_a_broken_profile_is_refused(
    changes: dict[str, Any], said: str, tmp_path: pathlib.Path
) -> None:
    path = profile(tmp_path)
    document = json.loads(path.read_text())
    document["overhead"] |= changes
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=said):
        from_profile(path)


BAD = {
    ("simulate",): "give either --trace FILE or --workload NAME",
    ("simulate", "--workload", "x"): "'x' is not known",
    ("simulate", *LOAD, "--device", "h20"): "h200",
    ("simulate", *LOAD, "--device", "l4", "--model-size", "qwen2.5-32b"): "its weights take 66 GB",
    ("simulate", *LOAD, "--policy", "quantization=none"): "no kind of policy that can be simulated",
    ("simulate", *LOAD, "--policy", "fcs"): "fcfs",
    ("simulate", *LOAD, "--speeds", "0"): "--speeds",
    ("simulate", *LOAD, "--json", "/nowhere/at/all.json"): "is no folder",
    ("simulate", "--trace", "x.jsonl", "--rate", "3"): "with --trace use --speeds",
    ("simulate", *LOAD, "--slo", "fast"): "--slo",
    ("tune", *LOAD, "--output", "/proc/version"): "exists already",
}


@pytest.mark.parametrize("words", BAD, ids=lambda words: " ".join(words[-2:]))
def test_what_is_wrong_is_named(words: tuple[str, ...]) -> None:
    with pytest.raises(HeadraceError, match=BAD[words]):
        headrace(*words)


def test_a_file_that_is_no_profile_is_named(tmp_path: pathlib.Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    with pytest.raises(ConfigError, match="headrace bench --profile"):
        headrace("simulate", *LOAD, "--profile", str(wrong))


def test_tuning_finds_better_settings_and_writes_a_configuration(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "tuned.yaml"
    result = headrace(
        *("tune", "--workload", "burst", "--requests", "60", "--rate", "90"),
        *("--slo", "ttft=300ms,tpot=40ms", "--policy", "fcfs", "--policy", "slo"),
        *("--output", str(output)),
    )
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    goodputs = [float(row[0]) for row in rows if row and row[-1] in ("fcfs", "slo")]
    assert goodputs[-1] == max(goodputs) > goodputs[0]
    model = load_config(output, environ={}).config.models[0]
    assert model.policies.scheduling.use == "slo"
    assert model.policies.scheduling.options == {"ttft": "300ms", "tpot": "40ms"}
