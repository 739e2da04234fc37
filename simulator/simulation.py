"""One simulation from its parts: configuration, policies, hardware, trace.

Policies are guarded as in a server, except for their time: a call may take as long as it likes, because
how fast this machine is shall not change what comes out.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec

from headrace.backends.simulated.runner import SimulatedDevice, SimulatedRunner
from headrace.config import Choice, Config
from headrace.engine.engine import Engine
from headrace.engine.intake import ServedModel
from headrace.errors import ConfigError
from headrace.gateway.admission import AdmissionGate
from headrace.gateway.replica import Replica
from headrace.gateway.router import ModelGroup, Router
from headrace.interfaces import Clock
from headrace.plugins.registry import Registries
from headrace.policies.admission.unlimited import Unlimited
from headrace.policies.eviction.lru import LeastRecentlyUsed
from headrace.policies.routing.round_robin import RoundRobin
from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.policy_guard import (
    AdmissionGuard,
    EvictionGuard,
    GuardLimits,
    PolicyGuard,
    SchedulingGuard,
)
from headrace.policy_watchdog import Watchdog
from headrace.simulator.cluster import Cluster
from headrace.simulator.door import Door
from headrace.simulator.hardware import Hardware
from headrace.simulator.outcomes import Outcomes
from headrace.simulator.prompts import VOCAB_SIZE, PromptMaker
from headrace.simulator.station import Station
from headrace.simulator.trace import Trace
from headrace.types import EngineSettings, KVGroupSpec, ModelCard

_REVISION = "simulated"
KINDS = ("scheduling", "eviction", "routing", "admission")


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a simulation depends on but its trace."""

    config: Config
    hardware: Hardware
    settings: EngineSettings
    num_blocks: int
    registries: Registries
    replicas: int = 1
    choices: Mapping[str, Choice] = field(default_factory=dict)
    """Kind to policy, in the place of the configuration's."""
    is_step_by_step: bool = False
    """Runs each step by itself; slower, and the same outcome."""

    @property
    def model(self) -> str:
        return self.config.models[0].name

    def choice(self, kind: str) -> Choice:
        """Return the policy of a kind; of several admission policies the first."""
        if kind in self.choices:
            return self.choices[kind]
        if kind == "routing":
            return self.config.routing
        if kind == "admission":
            return self.config.admission[0]
        chosen: Choice = getattr(self.config.models[0].policies, kind)
        return chosen

    def create(self, kind: str, choice: Choice) -> Any:
        """Return a policy; one that draws by a `seed` option draws the same each time without it too."""
        base_dir = pathlib.Path(self.config.base_dir)
        options = dict(choice.options)
        chosen = self.registries.resolve(kind, choice.use, base_dir)
        taken = getattr(getattr(chosen, "Options", None), "__dataclass_fields__", {})
        if "seed" in taken and options.get("seed") is None:
            options["seed"] = 0
        return self.registries.create(kind, choice.use, options, base_dir)


def engine_settings(
    config: Config, hardware: Hardware, given: Mapping[str, str]
) -> tuple[EngineSettings, int]:
    """Return the engines' settings and their pool, in blocks. ConfigError where nothing fits.

    `given` says where each dotted key comes from (LoadedConfig.origins). Settings that nobody wrote are
    those the profile was measured with, or such as suit an accelerator.
    """
    engine = config.models[0].engine
    values: dict[str, Any] = {
        "max_model_len": min(
            hardware.max_position,
            hardware.max_position if engine.max_model_len == "auto" else engine.max_model_len,
        ),
        "max_num_sequences": engine.max_num_sequences,
        "max_batched_tokens": engine.max_batched_tokens,
        "block_size": engine.block_size,
    }
    written = {key for key, origin in given.items() if origin != "default"}
    for name in values:
        if f"models.0.engine.{name}" in written:
            continue
        if hardware.engine is not None:
            values[name] = hardware.engine[name]
        else:
            values[name] = {
                "max_model_len": hardware.max_position,
                "max_num_sequences": 256,
                "max_batched_tokens": 2048,
                "block_size": 128,
            }[name]
    pool = hardware.kv_pool_bytes
    if engine.kv_memory != "auto":
        pool = min(pool, engine.kv_memory)
    size = values["block_size"]
    per_sequence = -(-values["max_model_len"] // size)
    num_blocks = min(
        pool // (hardware.kv_bytes_per_token * size), per_sequence * values["max_num_sequences"]
    )
    if num_blocks < 1:
        raise ConfigError(
            f"models.0.engine.kv_memory: {pool} bytes hold no block of {size} tokens of "
            f"{hardware.name} ({hardware.kv_bytes_per_token * size} bytes); give more"
        )
    values["max_model_len"] = min(values["max_model_len"], num_blocks * size)
    settings = EngineSettings(
        **values,
        max_queued_requests=engine.max_queued_requests
        if "models.0.engine.max_queued_requests" in written
        else 1 << 30,
        prefix_caching=engine.prefix_caching,
        kv_memory_bytes=pool,
    )
    return settings, num_blocks


class _Unhurried(Watchdog):
    """Lets every call take its time."""

    def call(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        seconds: float,
        *,
        may_stick: bool = False,
    ) -> Any:
        return function(*arguments)


def simulate(setup: Setup, trace: Trace) -> Outcomes:
    """Serve a trace and return what became of its requests."""
    limits = GuardLimits(slow_seconds=math.inf, watchdog=_Unhurried())
    guards: list[PolicyGuard[Any]] = []
    stations = _stations(setup, limits, guards)
    router = Router(
        [ModelGroup(setup.model, ())],
        policy=setup.create("routing", setup.choice("routing")),
        fallback=RoundRobin(),
        limits=limits,
    )
    replicas = [Replica(each.id, setup.model, cast(Any, each)) for each in stations]
    router.set_replicas(setup.model, replicas)
    guards.append(router.guard)
    gate = _gate(setup, router, limits, guards)
    cluster: Cluster

    def ask_at(at: float, caller: Any) -> None:
        cluster.ask_at(at, caller)

    cluster = Cluster(
        trace,
        stations,
        router=router,
        door=Door(gate, router, ask_at),
        prompts=PromptMaker(setup.settings.block_size, _REVISION),
        model=setup.model,
        request_seconds=setup.hardware.request_seconds,
    )
    outcomes = cluster.run()
    for guard in guards:
        if guard.failures_total:
            outcomes.policy_failures.append(
                f"{guard.kind} policy '{guard.policy.name}' failed {guard.failures_total} of "
                f"{guard.calls_total} calls: {guard.last_failure}"
            )
    return outcomes


def _stations(setup: Setup, limits: GuardLimits, guards: list[PolicyGuard[Any]]) -> list[Station]:
    settings, num_blocks = setup.settings, setup.num_blocks
    card = ModelCard(
        name=setup.model,
        revision=_REVISION,
        architecture="simulated",
        tokenizer_json="",
        chat_template=None,
        special_tokens={},
        add_bos_token=False,
        eos_token_ids=(),
        vocab_size=VOCAB_SIZE,
        max_model_len=settings.max_model_len,
        max_queued_requests=settings.max_queued_requests,
        block_size=settings.block_size,
        num_blocks=num_blocks,
        default_sampling={},
        weight_bytes=0,
        kv_bytes_per_token=setup.hardware.kv_bytes_per_token,
        backend="simulated",
        dtype=settings.dtype,
        created=0,
    )

    def build(clock: Clock) -> Engine:
        scheduling = SchedulingGuard(
            setup.create("scheduling", setup.choice("scheduling")), FirstComeFirstServed(), limits
        )
        eviction = EvictionGuard(
            setup.create("eviction", setup.choice("eviction")), LeastRecentlyUsed(), limits
        )
        guards.extend((scheduling, eviction))
        return build_engine(setup, clock, scheduling, eviction)

    step_time = setup.hardware.step_time
    return [
        Station(
            number,
            build,
            card,
            step_time,
            is_alone=setup.replicas == 1,
            is_step_by_step=setup.is_step_by_step,
        )
        for number in range(setup.replicas)
    ]


def build_engine(
    setup: Setup, clock: Clock, scheduling: SchedulingGuard, eviction: EvictionGuard
) -> Engine:
    """Return one replica's engine on a pretended device."""
    runner = SimulatedRunner(
        groups=(KVGroupSpec(name="all", layers=(0,), num_kv_heads=1, head_dim=1),),
        vocab_size=VOCAB_SIZE,
        settings=setup.settings,
        clock=clock,
        device=SimulatedDevice(setup.hardware.step_time),
    )
    runner.allocate(setup.num_blocks)
    return Engine(
        runner,
        model=ServedModel(setup.model, _REVISION, None, (), VOCAB_SIZE),
        settings=setup.settings,
        num_blocks=setup.num_blocks,
        policy=scheduling,
        eviction=eviction,
        clock=clock,
    )


def _gate(
    setup: Setup, router: Router, limits: GuardLimits, guards: list[PolicyGuard[Any]]
) -> AdmissionGate:
    chosen = setup.config.admission
    if "admission" in setup.choices:
        chosen = (setup.choices["admission"],)
    policies = [setup.create("admission", choice) for choice in chosen]
    asked = [
        AdmissionGuard(each, Unlimited(), limits)
        for each in policies
        if not isinstance(each, Unlimited)
    ]
    guards.extend(asked)
    return AdmissionGate(asked, ledger=router.ledger)


def with_changes(setup: Setup, **changes: Any) -> Setup:
    """Return a setup with other engine settings, such as max_num_sequences."""
    return replace(setup, settings=msgspec.structs.replace(setup.settings, **changes))
