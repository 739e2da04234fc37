"""Whatever a plugin gets wrong stops the start, with both sides named."""

from __future__ import annotations

import dataclasses
import pathlib
import types
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import pytest

import headrace
from headrace.backends.simulated.backend import SimulatedBackend
from headrace.errors import PluginError
from headrace.interfaces import RoutingPolicy
from headrace.plugins import registry as registry_module
from headrace.plugins.hookspecs import ClassReference
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import KINDS, LABELS, Registries
from headrace.types import ReplicaView, RoutingRequest
from headrace.types.units import Bytes, Seconds


class First:
    name: ClassVar[str] = "first"

    def choose(self, request: RoutingRequest, replicas: Sequence[ReplicaView], now: float) -> str:
        return replicas[0].id


def plugin(name: str, **hooks: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    for hook, function in hooks.items():
        setattr(module, hook, headrace.hookimpl(function))
    return module


def registries(*plugins: object) -> Registries:
    return Registries.from_manager(create_plugin_manager(discover=False, plugins=plugins))


def routing(cls: Any, name: str = "mine") -> types.ModuleType:
    return plugin(name, headrace_register_routing=lambda: [cls])


def test_every_kind_has_a_hook_a_registry_and_a_label() -> None:
    fields = [field.name for field in dataclasses.fields(Registries)]
    assert fields == list(KINDS) == list(LABELS)


def test_builtins_are_there_and_load() -> None:
    found = registries()
    assert found.scheduling.names() == [
        "deficit_prefix",
        "fair_share",
        "fcfs",
        "priority",
        "shortest_first",
        "slo",
    ]
    assert found.eviction.names() == ["lfu", "lru", "priority_ttl"]
    assert found.routing.names() == [
        "cost",
        "least_loaded",
        "power_of_two",
        "prefix_hash",
        "random",
        "round_robin",
        "session",
    ]
    assert found.admission.names() == ["kv_footprint", "token_bucket", "unlimited"]
    assert found.quantization.names() == ["int4", "int8", "mixed", "none"]
    assert {"cpu", "simulated"} <= set(found.backends.names())
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma3_text", "scripted"} <= set(
        found.models.names()
    )
    assert {entry.origin for entry in found.routing} == {"builtin"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_builtin_keeps_its_contract(kind: str) -> None:
    registry = registries().of(kind)
    for entry in registry:
        assert registry.get(entry.name).name == entry.name


def test_a_registered_class_is_found_and_built() -> None:
    found = registries(routing(First))
    assert "first" in found.routing.names()
    assert isinstance(found.create("routing", "first"), First)


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(
        PluginError, match="no routing policy named 'round_robbin'. Did you mean 'round_robin'"
    ):
        registries().create("routing", "round_robbin")


def test_unknown_kind_gets_the_nearest() -> None:
    with pytest.raises(PluginError, match="Did you mean 'routing'"):
        registries().create("routin", "first")


def test_a_name_used_twice_names_both_classes() -> None:
    class Other(First):
        pass

    with pytest.raises(PluginError, match=r"First \(plugin one\) and .*Other \(plugin two\)"):
        registries(routing(First, "one"), routing(Other, "two"))


def test_a_plugin_cannot_take_the_name_of_a_builtin() -> None:
    class Mine(First):
        name = "round_robin"

    with pytest.raises(
        PluginError, match=r"RoundRobin \(plugin builtin\) and .*Mine \(plugin mine\)"
    ):
        registries(routing(Mine))


def _without_choose() -> type[Any]:
    class Bad:
        name = "bad"

    return Bad


def _inheriting_from_the_protocol() -> type[Any]:
    class Bad(RoutingPolicy):
        name = "bad"

    return Bad


def _with_other_arguments() -> type[Any]:
    class Bad:
        name = "bad"

        def choose(self, replicas: Any) -> str:
            return "x"

    return Bad


def _async() -> type[Any]:
    class Bad:
        name = "bad"

        async def choose(self, request: Any, replicas: Any, now: float) -> str:
            return "x"

    return Bad


def _without_name() -> type[Any]:
    class Bad(First):
        pass

    class NoName:
        choose = First.choose

    return NoName


def _with_a_bad_name() -> type[Any]:
    class Bad(First):
        name = "./bad.py:Bad"

    return Bad


def _not_callable() -> type[Any]:
    class Bad(First):
        choose = 3  # type: ignore[assignment]

    return Bad


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_without_choose, r"lacks choose. The contract asks for choose\(request, replicas, now\)"),
        (_inheriting_from_the_protocol, "lacks choose"),
        (
            _with_other_arguments,
            r"choose\(self, replicas: 'Any'\).* cannot be called as choose\(request",
        ),
        (_async, "choose is async"),
        (_without_name, "has no class attribute `name`"),
        (_with_a_bad_name, "`name` must be letters"),
        (_not_callable, "`choose` is not a method"),
    ],
)
def test_a_class_that_breaks_its_contract_is_refused(make: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        registries(routing(make()))


def test_a_backend_needs_its_classmethods() -> None:
    class Bad:
        name = "bad"
        schemes: frozenset[str] = frozenset()

        def probe(self) -> Any: ...

        @classmethod
        def open(cls, device_index: int, options: Any, clock: Any) -> Any: ...

        def create_runner(self, model: Any, group: Any, settings: Any) -> Any: ...

    with pytest.raises(PluginError, match="probe must be a @classmethod"):
        registries(plugin("p", headrace_register_backends=lambda: [Bad]))


def test_a_backend_must_take_what_is_passed_by_keyword() -> None:
    class Bad(SimulatedBackend):
        name = "bad"

        def create_runner(self, model: Any, group: Any, settings: Any) -> Any:  # type: ignore[override]
            ...

    with pytest.raises(PluginError, match="create_runner.*quantization.*unexpected keyword"):
        registries(plugin("p", headrace_register_backends=lambda: [Bad]))


@pytest.mark.parametrize("answer", [None, First, "first", [First()], [None]])
def test_a_hook_must_return_classes(answer: Any) -> None:
    with pytest.raises(PluginError, match="plugin p: headrace_register_routing must return"):
        registries(plugin("p", headrace_register_routing=lambda: answer))


def test_a_hook_that_raises_names_its_plugin() -> None:
    def broken() -> Any:
        raise RuntimeError("no license")

    with pytest.raises(PluginError, match="plugin p: .* RuntimeError: no license.*blocked"):
        registries(plugin("p", headrace_register_routing=broken))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no.such.module:X", "cannot be loaded: No module named"),
        ("headrace.errors:NoSuchClass", "cannot be loaded: .*NoSuchClass"),
        ("headrace.errors:did_you_mean", "is not a class"),
        (
            "headrace.policies.routing.round_robin:RoundRobin",
            "registered as 'late' but its name is",
        ),
    ],
)
def test_a_reference_is_checked_when_it_is_chosen(target: str, message: str) -> None:
    found = registries(routing(ClassReference("late", target)))
    assert "late" in found.routing.names()
    with pytest.raises(PluginError, match=message):
        found.routing.get("late")


# --- options ----------------------------------------------------------------------


class Tuned(First):
    name = "tuned"

    @dataclasses.dataclass(frozen=True)
    class Options:
        load_factor: float = 1.25
        patience: Seconds = 0.5
        memory: Bytes = 1 << 20
        mode: Literal["strict", "loose"] = "strict"
        names: tuple[str, ...] = ()
        weights: dict[str, float] = dataclasses.field(default_factory=dict)
        file: pathlib.Path | None = None

    def __init__(self, options: Options) -> None:
        self.options = options


def tuned(options: dict[str, Any] | None, base_dir: pathlib.Path = pathlib.Path("/base")) -> Tuned:
    built = registries(routing(Tuned)).create("routing", "tuned", options, base_dir)
    assert isinstance(built, Tuned)
    return built


def test_options_carry_units_and_paths_count_from_the_file() -> None:
    options = tuned(
        {
            "load_factor": 2,
            "patience": "250ms",
            "memory": "2GiB",
            "mode": "loose",
            "names": ["a"],
            "weights": {"a": 1},
            "file": "x.json",
        }
    ).options
    assert options == Tuned.Options(
        2.0, 0.25, 2 << 30, "loose", ("a",), {"a": 1.0}, pathlib.Path("/base/x.json")
    )


def test_options_default() -> None:
    assert tuned(None).options == Tuned.Options()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_facter": 2}, "has no option 'load_facter'. Did you mean 'load_factor'"),
        ({"load_factor": "much"}, "option load_factor must be a number, got 'much'"),
        ({"load_factor": True}, "option load_factor must be a number, got true"),
        ({"load_factor": float("nan")}, "option load_factor must be a finite number"),
        (
            {"patience": 250},
            "option patience must be a duration such as 500ms, got 250; say the unit",
        ),
        ({"patience": "250 parsecs"}, "option patience must be a duration"),
        ({"memory": "2GiBB"}, "option memory must be a size"),
        ({"mode": "lose"}, "option mode must be one of strict, loose, got 'lose'"),
        ({"names": "a"}, "option names must be a list, each entry text, got 'a'"),
        ({"names": [1]}, "option names entry 0: must be text, got 1"),
        ({"weights": {"a": "x"}}, "option weights a: must be a number, got 'x'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        tuned(options)


def test_options_for_a_class_that_takes_none() -> None:
    with pytest.raises(PluginError, match="'first' takes no options, got speed"):
        registries(routing(First)).create("routing", "first", {"speed": 1})


def test_a_required_option_left_out_says_what_it_takes() -> None:
    class Needy(First):
        name = "needy"

        @dataclasses.dataclass
        class Options:
            url: str

        def __init__(self, options: Options) -> None: ...

    # The class is local, so its annotations resolve only for types known to the module.
    with pytest.raises(PluginError, match="'needy' needs the option url: text"):
        registries(routing(Needy)).create("routing", "needy", {})


def test_options_may_refuse_by_themselves() -> None:
    class Picky(First):
        name = "picky"

        @dataclasses.dataclass
        class Options:
            low: int = 0
            high: int = 1

            def __post_init__(self) -> None:
                if self.low > self.high:
                    raise ValueError("low must be at most high")

        def __init__(self, options: Options) -> None: ...

    with pytest.raises(PluginError, match="options refused: low must be at most high"):
        registries(routing(Picky)).create("routing", "picky", {"low": 2})


def test_a_constructor_that_raises_names_the_policy() -> None:
    class Broken(First):
        name = "broken"

        def __init__(self) -> None:
            raise OSError("no such file")

    with pytest.raises(PluginError, match="routing policy 'broken' cannot be built: OSError"):
        registries(routing(Broken)).create("routing", "broken")


def test_the_registry_imports_nothing_until_asked() -> None:
    found = registries()
    entry = next(iter(found.backends))
    assert isinstance(entry.target, ClassReference)
    assert registry_module.Entry("x", First, "p").describe().endswith(":First (plugin p)")
