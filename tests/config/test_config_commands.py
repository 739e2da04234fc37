"""`headrace check-config` and `headrace plugins`, as a person runs them."""

from __future__ import annotations

import pathlib
import re

import pytest
import yaml


def test_check_config_prints_everything_with_its_origin(  # type: ignore[no-untyped-def]
    headrace, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X06: what is in effect can be printed."""
    path = tmp_path / "headrace.yaml"
    path.write_text("gateway:\n  port: 8001\n  host: 0.0.0.0\n")
    monkeypatch.setenv("HEADRACE_GATEWAY__HOST", "::1")
    code, out, _ = headrace("check-config", "-c", str(path), "--set", "models.0.name=7")
    assert code == 0
    data = yaml.safe_load(out)
    assert data["gateway"]["port"] == 8001
    assert data["gateway"]["host"] == "::1"
    assert data["models"][0]["name"] == "7"
    assert re.search(rf"port: 8001 +# {path}, line 2\n", out)
    assert re.search(r"host: ::1 +# environment variable HEADRACE_GATEWAY__HOST\n", out)
    assert re.search(r"name: '7' +# command line\n", out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--set", "gateway.prot=1"],
            "command line, key gateway.prot: unknown key. Did you mean 'port'",
        ),
        (["--set", "gateway.stall_timeout=10"], "must be a duration"),
        (["--set", "gateway.port"], "write KEY=VALUE"),
        (["--set", "models=[{"], "not valid YAML"),
        (["--set", "gateway.keepalive_interval=0s"], "must be a duration of at least 10ms"),
        (["--set", "gateway.stall_timeout=1us"], "must be a duration of at least 10ms"),
        (["--set", f"gateway.max_body_bytes={2**63}"], "must fit 64 bits, got"),
        (["--set", f"gateway.port={'9' * 5000}"], "must fit 64 bits, got"),
        (["--set", f"gateway.max_body_bytes={'9' * 5000}"], "must be a size"),
        (["--set", f"gateway.max_body_bytes={'9' * 400}.5TB"], "must be a size"),
        (["--set", f"gateway.stall_timeout={'9' * 400}s"], "must be a duration"),
        (
            ["--set", f"models=[{{engine: {{max_model_len: {'9' * 30}}}}}]"],
            "max_model_len: must be",
        ),
        (["--set", f"models=[{{engine: {{max_model_len: {'9' * 5000}}}}}]"], "... is not a int"),
        (
            ["--set", "models.\u00b2.name=x"],
            "command line, key models: must be a list, got a table",
        ),
        (["-c", "/nowhere.yaml"], "/nowhere.yaml: no such configuration file"),
        (["--set", "routing=round_robbin"], "command line, key routing: no routing policy named"),
        (["--set", "models.0.backend=gpu"], "no backend named 'gpu'"),
        (["--set", "plugins.blocked=[builtin]"], "cannot be blocked"),
    ],
)
def test_check_config_refuses_in_one_line(headrace, words: list[str], message: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = headrace("check-config", *words)
    assert code == 1
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_plugins_lists_kind_name_origin_and_availability(headrace) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = headrace("plugins", "--set", "plugins.discover=false")
    assert code == 0
    rows = [line.split(maxsplit=3) for line in out.splitlines()]
    assert rows[0] == ["KIND", "NAME", "ORIGIN", "AVAILABLE"]
    assert ["scheduling", "fcfs", "builtin", "yes"] in rows
    assert ["backends", "simulated", "builtin", "yes"] in rows
    assert {row[0] for row in rows[1:]} == {
        "backends",
        "models",
        "scheduling",
        "eviction",
        "admission",
        "routing",
        "quantization",
    }


def test_plugins_gives_the_reason_where_a_backend_cannot_run(  # type: ignore[no-untyped-def]
    headrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.backends.simulated.backend import SimulatedBackend
    from headrace.interfaces import Availability

    answer = Availability(False, "no such device; buy one")
    monkeypatch.setattr(SimulatedBackend, "probe", classmethod(lambda cls: answer))
    _, out, _ = headrace("plugins")
    assert re.search(r"^backends +simulated +builtin +no: no such device; buy one$", out, re.M)
