"""The plugin manager loads every announced plugin, or refuses to start and names it."""

from __future__ import annotations

import pathlib
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

import headrace
from headrace.errors import PluginError
from headrace.plugins.manager import create_plugin_manager, notify
from headrace.plugins.registry import Registries
from headrace.types import RequestSummary, ServerInfo

PLUGIN = """
    import headrace

    class First:
        name = "first"
        def choose(self, request, replicas, now):
            return replicas[0].id

    @headrace.hookimpl
    def headrace_register_routing():
        return [First]
"""


class Site:
    """A folder on sys.path with distributions in it, as if installed."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def install(self, name: str, source: str, module: str | None = None) -> None:
        module = module or f"{name}_module"
        (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
        info = self.folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[headrace]\n{name} = {module}\n")


@pytest.fixture
def site(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


def module_with(name: str = "p", **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    for key, value in members.items():
        setattr(module, key, value)
    return module


def test_an_announced_plugin_is_loaded(site: Site) -> None:
    site.install("waterwheel", PLUGIN)
    found = Registries.from_manager(create_plugin_manager())
    assert ("first", "waterwheel") in [(entry.name, entry.origin) for entry in found.routing]


def test_discover_false_imports_nothing(site: Site) -> None:
    site.install("waterwheel", "raise RuntimeError('imported')")
    manager = create_plugin_manager(discover=False)
    assert [name for name, _ in manager.list_name_plugin()] == ["builtin"]
    assert "waterwheel_module" not in sys.modules


def test_a_blocked_plugin_is_never_imported(site: Site) -> None:
    site.install("waterwheel", "raise RuntimeError('imported')")
    create_plugin_manager(blocked=["waterwheel"])
    assert "waterwheel_module" not in sys.modules


def test_blocking_a_plugin_that_is_not_installed_is_said(site: Site) -> None:
    site.install("waterwheel", PLUGIN)
    with structlog.testing.capture_logs() as logs:
        create_plugin_manager(blocked=["waterwheal"])
    assert [(log["event"], log["plugin"], log["did_you_mean"]) for log in logs] == [
        ("blocked_plugin_not_installed", "waterwheal", "waterwheel")
    ]


def test_the_builtin_plugin_cannot_be_blocked() -> None:
    with pytest.raises(PluginError, match="cannot be blocked"):
        create_plugin_manager(blocked=["builtin"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_library", "No module named 'no_such_library'"),
        ("def broken(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise ValueError('old driver')", "ValueError: old driver"),
    ],
)
def test_a_plugin_that_fails_to_load_stops_the_start(site: Site, source: str, message: str) -> None:
    site.install("waterwheel", source)
    with pytest.raises(
        PluginError, match=rf"plugin waterwheel of package waterwheel.*{message}.*blocked"
    ):
        create_plugin_manager()


def test_a_misspelt_hook_gets_the_nearest_name() -> None:
    @headrace.hookimpl
    def headrace_register_schedulling() -> list[Any]:
        return []

    plugin = module_with(headrace_register_schedulling=headrace_register_schedulling)
    with pytest.raises(PluginError, match="Did you mean 'headrace_register_scheduling'"):
        create_plugin_manager(discover=False, plugins=[plugin])


def test_a_hook_that_asks_for_unknown_arguments_is_refused() -> None:
    @headrace.hookimpl
    def headrace_server_started(server: Any) -> None: ...

    plugin = module_with(headrace_server_started=headrace_server_started)
    with pytest.raises(PluginError, match=r"plugin p: .*headrace_server_started.*server"):
        create_plugin_manager(discover=False, plugins=[plugin])


def test_a_hook_without_its_marker_is_refused(site: Site) -> None:
    site.install("waterwheel", PLUGIN.replace("@headrace.hookimpl", ""))
    with pytest.raises(PluginError, match="headrace_register_routing has no @headrace.hookimpl"):
        create_plugin_manager()


def test_two_plugins_of_one_name_are_refused() -> None:
    with pytest.raises(PluginError, match="two plugins are named 'p'"):
        create_plugin_manager(discover=False, plugins=[module_with("p"), module_with("p")])


@pytest.mark.parametrize("failure", [RuntimeError("disk full"), SystemExit("disk full")])
def test_an_observer_that_raises_keeps_no_other_from_being_told(failure: BaseException) -> None:
    told = []

    @headrace.hookimpl
    def bad(info: ServerInfo) -> None:
        raise failure

    @headrace.hookimpl
    def good(info: ServerInfo) -> None:
        told.append(info.port)

    manager = create_plugin_manager(
        discover=False,
        plugins=[
            module_with("one", headrace_server_started=good),
            module_with("two", headrace_server_started=bad),
            module_with("three", headrace_server_started=good),
        ],
    )
    with structlog.testing.capture_logs() as logs:
        notify(manager, "headrace_server_started", info=ServerInfo(host="h", port=7, models=()))
    assert told == [7, 7]
    assert [(log["plugin"], log["error"]) for log in logs] == [
        ("two", f"{type(failure).__name__}: disk full")
    ]


def test_an_observer_may_leave_arguments_out() -> None:
    told = []

    @headrace.hookimpl
    def headrace_request_finished() -> None:
        told.append(1)

    plugin = module_with(headrace_request_finished=headrace_request_finished)
    manager = create_plugin_manager(discover=False, plugins=[plugin])
    summary = RequestSummary(
        request_id="r",
        model="m",
        endpoint="/v1/completions",
        status=200,
        finish_reasons=("stop",),
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        ttft_seconds=None,
        tpot_seconds=None,
        duration_seconds=0.0,
    )
    notify(manager, "headrace_request_finished", summary=summary)
    assert told == [1]


def test_two_managers_share_nothing() -> None:
    one = create_plugin_manager(discover=False, plugins=[module_with("p")])
    two = create_plugin_manager(discover=False)
    assert one.has_plugin("p") and not two.has_plugin("p")
