"""Every hook has a section in docs/plugins.md with its exact arguments and a whole plugin that works."""

from __future__ import annotations

import inspect
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from headrace.plugins import hookspecs
from headrace.plugins.hookspecs import ClassReference
from headrace.plugins.manager import create_plugin_manager, notify
from headrace.plugins.registry import KINDS, Registries
from headrace.plugins.script import load_class
from headrace.testing.policies import (
    check_admission_policy,
    check_eviction_policy,
    check_quantization_policy,
    check_routing_policy,
    check_scheduling_policy,
)
from headrace.types import RequestSummary, ServerInfo

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "plugins.md"
TEXT = DOCS.read_text()
HOOKS = [name for name in vars(hookspecs) if name.startswith("headrace_")]
CHECKS: dict[str, Callable[..., None]] = {
    "scheduling": check_scheduling_policy,
    "eviction": check_eviction_policy,
    "routing": check_routing_policy,
    "admission": check_admission_policy,
    "quantization": check_quantization_policy,
}
FACTS: dict[str, Any] = {
    "info": ServerInfo(host="127.0.0.1", port=8000, models=("m",)),
    "summary": RequestSummary(
        request_id="r",
        model="m",
        endpoint="/v1/completions",
        status=200,
        finish_reasons=("stop",),
        prompt_tokens=3,
        cached_tokens=0,
        completion_tokens=4,
        ttft_seconds=0.1,
        tpot_seconds=0.1,
        duration_seconds=0.5,
    ),
}


def section(hook: str) -> str:
    found = re.search(rf"^## `{hook}\(.*?\)`$(.*?)(?=^#|\Z)", _without_code_headings(), re.M | re.S)
    assert found, f"docs/plugins.md has no section for {hook}"
    return found[1]


def _without_code_headings() -> str:
    return re.sub(r"^#(?= \w+ =)", "", TEXT, flags=re.M)


def plugins_of(hook: str) -> list[object]:
    blocks = re.findall(r"^```python\n(.*?)^```$", section(hook), re.M | re.S)
    assert blocks, f"docs/plugins.md shows no plugin for {hook}"
    plugins = []
    for number, block in enumerate(blocks):
        module = types.ModuleType(f"example_{number}")
        exec(compile(block, str(DOCS), "exec", dont_inherit=True), module.__dict__)
        plugins.append(module.__dict__.get("plugin", module))
    return plugins


@pytest.mark.parametrize("hook", HOOKS)
def test_the_heading_gives_the_exact_arguments(hook: str) -> None:
    arguments = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"## `{hook}({arguments})`\n" in TEXT


def test_no_hook_is_documented_that_does_not_exist() -> None:
    assert set(re.findall(r"^## `(headrace_\w+)\(", TEXT, re.M)) == set(HOOKS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plugin_of_a_registering_hook_registers(kind: str) -> None:
    for plugin in plugins_of(f"headrace_register_{kind}"):
        manager = create_plugin_manager(discover=False, plugins=[plugin])
        registry = Registries.from_manager(manager).of(kind)
        brought = [entry for entry in registry if entry.origin != "builtin"]
        assert brought
        for entry in brought:
            if isinstance(entry.target, ClassReference):
                continue
            assert registry.get(entry.name) is entry.target
            if kind in CHECKS:
                registries = Registries.from_manager(manager)
                CHECKS[kind](lambda e=entry, r=registries: r.create(kind, e.name))


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if "_register_" not in hook])
def test_the_plugin_of_an_observing_hook_observes(
    hook: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plugins = plugins_of(hook)
    manager = create_plugin_manager(discover=False, plugins=plugins)
    arguments = inspect.signature(getattr(hookspecs, hook)).parameters
    with structlog.testing.capture_logs() as logs:
        notify(manager, hook, **{name: FACTS[name] for name in arguments})
    assert logs == []
    if hook == "headrace_server_started":
        assert (tmp_path / "headrace.address").read_text() == "http://127.0.0.1:8000\n"
    else:
        assert plugins[0].tokens == {"m": 7}  # type: ignore[attr-defined]


@pytest.mark.parametrize("class_name", ["ShortestFirst", "Patient"])
def test_the_scripts_keep_the_contract(class_name: str, tmp_path: pathlib.Path) -> None:
    block = next(
        b for b in re.findall(r"```python\n(.*?)```", TEXT, re.S) if f"class {class_name}" in b
    )
    (tmp_path / "script.py").write_text(block)
    registries = Registries.from_manager(create_plugin_manager(discover=False))
    use = f"./script.py:{class_name}"
    check_scheduling_policy(lambda: registries.create("scheduling", use, None, tmp_path))


def test_a_scheduler_in_twenty_lines() -> None:
    block = next(b for b in re.findall(r"```python\n(.*?)```", TEXT, re.S) if "ShortestFirst" in b)
    assert len([line for line in block.splitlines() if line.strip()]) <= 20


def test_shortest_first_means_what_it_says(tmp_path: pathlib.Path) -> None:
    from headrace.types import RequestView, SchedulerView

    block = next(b for b in re.findall(r"```python\n(.*?)```", TEXT, re.S) if "ShortestFirst" in b)
    (tmp_path / "script.py").write_text(block)
    policy = load_class("script.py:ShortestFirst", tmp_path)()
    waiting = [
        RequestView("long", num_prompt_tokens=100),
        RequestView("short", num_prompt_tokens=50),
        RequestView("cached", num_prompt_tokens=100, num_cached_tokens=90),
    ]
    view = SchedulerView(0.0, 512, 0, 0, 10, 10)
    order = [request.request_id for request in policy.rank_waiting(waiting, view)]
    assert order == ["cached", "short", "long"]
