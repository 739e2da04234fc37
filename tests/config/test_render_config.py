"""What check-config prints: YAML that loads again, and where each value came from."""

from __future__ import annotations

import pathlib

import msgspec
import pytest
import yaml

from headrace.config import Config, load_config
from headrace.config.check import check_choices, choices
from headrace.config.render import render
from headrace.errors import ConfigError
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import KINDS, Registries

TEXT = """\
gateway: {keepalive_interval: 250ms, max_body_bytes: 3MiB, stall_timeout: 1m}
models:
  - name: "yes"
    source: ./x.gguf
    engine: {kv_memory: 2GiB, max_model_len: auto}
    policies:
      scheduling: {use: ./p.py:P, options: {ttft: 500ms, "odd: key": [1, {a: null}], empty: {}, "7": x}}
  - source: hf:org/ünïcode
admission: [unlimited, {use: other, options: {n: 1.5}}]
plugins: {blocked: [a, "no"]}
logging: {format: json}
"""


def test_the_printed_configuration_loads_to_the_same(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(TEXT)
    first = load_config(
        path, environ={"HEADRACE_LOGGING__LEVEL": "error"}, flags={"gateway.port": 81}
    )
    printed = render(first)
    (tmp_path / "b.yaml").write_text(printed)
    second = load_config(tmp_path / "b.yaml", environ={})
    assert second.config == first.config
    assert set(second.origins) == set(first.origins)


def test_every_value_says_where_it_came_from(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(TEXT)
    loaded = load_config(
        path, environ={"HEADRACE_LOGGING__LEVEL": "error"}, flags={"gateway.port": 81}
    )
    lines = {
        line.split("#")[0].strip(): line.split("#")[-1].strip()
        for line in render(loaded).splitlines()
    }
    assert lines["port: 81"] == "command line"
    assert lines["level: error"] == "environment variable HEADRACE_LOGGING__LEVEL"
    assert lines["keepalive_interval: 250ms"] == f"{path}, line 1"
    assert lines["kv_memory: 2GiB"] == f"{path}, line 5"
    assert lines["- name: 'yes'"] == f"{path}, line 3"
    assert lines["host: 127.0.0.1"] == "default"


def test_the_default_configuration_prints_as_yaml() -> None:
    data = yaml.safe_load(render(load_config(None, environ={})))
    assert list(data) == [each for each in Config.__struct_fields__ if each != "base_dir"]


def test_every_kind_that_can_be_chosen_is_checked() -> None:
    config = load_config(None, environ={}).config
    assert {kind for kind, _, _ in choices(config)} == set(KINDS) - {"models"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nrouting: round_robbin", "line 2, key routing: no routing policy named 'round_robbin'"),
        ("\nadmission: [unlimited, nobody]", "line 2, key admission.1: no admission policy named 'nobody'"),
        ("models:\n- policies:\n    scheduling: fifo", "line 3, key models.0.policies.scheduling: no "),
        ("models:\n- backend: gpu", "line 2, key models.0.backend: no backend named 'gpu'"),
        ("routing:\n  use: round_robin\n  options:\n    x: 1", "'round_robin' takes no options, got x"),
        ("routing: ./nowhere.py:X", "key routing: .*nowhere.py: cannot be read"),
        ("routing:\n  use: ./mine.py:Mine\n  options:\n    good: 1\n    god: 2",
         "line 5, key routing: 'mine' has no option 'god'. Did you mean 'good'"),
        ("routing:\n  use: ./mine.py:Mine\n  options:\n    good: x", "line 4, key routing: 'mine': option g"),
    ],
)  # fmt: skip
def test_a_wrong_choice_is_named_by_file_line_and_key(
    tmp_path: pathlib.Path, text: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(
        "import dataclasses\n"
        "class Mine:\n"
        "    name = 'mine'\n"
        "    @dataclasses.dataclass\n"
        "    class Options:\n"
        "        good: int = 0\n"
        "    def __init__(self, options): ...\n"
        "    def choose(self, request, replicas, now): return replicas[0].id\n"
    )
    path = tmp_path / "a.yaml"
    path.write_text(text)
    environ = {} if "gpu" in text else {"HEADRACE_MODELS__0__BACKEND": "simulated"}
    loaded = load_config(path, environ=environ)
    with pytest.raises(ConfigError, match=message):
        check_choices(loaded, Registries.from_manager(create_plugin_manager(discover=False)))


def test_a_right_configuration_passes() -> None:
    loaded = load_config(None, environ={"HEADRACE_MODELS__0__BACKEND": "simulated"})
    check_choices(loaded, Registries.from_manager(create_plugin_manager(discover=False)))
    assert msgspec.to_builtins(loaded.config)["models"][0]["backend"] == {
        "use": "simulated",
        "options": {},
    }
