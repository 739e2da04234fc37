"""The composition root of an engine: the one place where model, backend, policy and engine meet.

The worker process, `headrace.LLM`, tests and the simulator all come through here. Whatever can be
refused is refused before a weight is read, and each memory figure is checked before it is taken.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from headrace.config import Choice, ReplicaConfig
from headrace.config.resources import resolve_engine
from headrace.config.schema import PoliciesConfig
from headrace.errors import BackendUnavailable, ConfigError, ModelError
from headrace.group import SingleRank
from headrace.interfaces import (
    Backend,
    Clock,
    LoadedModel,
    ModelArchitecture,
    QuantizationPolicy,
    Runner,
)
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.options import build_options
from headrace.plugins.registry import Registries, Registry
from headrace.policy_guard import EvictionGuard, GuardLimits, SchedulingGuard
from headrace.types import DeviceMemory, EngineSettings, ModelCard, PolicyChoice
from headrace.types.units import about_size, format_size

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.policy_switch import PolicySwitch
    from headrace.text.tokenizer import Tokenizer

Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that has run its kernels once, and the card it shows to the gateway."""

    engine: Engine
    card: ModelCard
    switch: PolicySwitch
    """The engine's policies, to be swapped while it runs."""


def build_engine(
    replica: Mapping[str, Any] | ReplicaConfig,
    *,
    report: Report = lambda stage, fraction: None,
    clock: Clock | None = None,
    plugins: Sequence[object] = (),
) -> BuiltEngine:
    """Fetch, load and warm up one replica's model; return its engine.

    `report(stage, fraction)` is told about "fetch", "load" and "warmup". Raises ConfigError,
    PluginError, BackendUnavailable or ModelError.
    """
    from headrace.clock import SystemClock
    from headrace.engine.engine import Engine
    from headrace.engine.intake import ServedModel
    from headrace.engine.policy_switch import PolicySwitch

    config = replica if isinstance(replica, ReplicaConfig) else ReplicaConfig.from_dict(replica)
    clock = clock or SystemClock()
    manager = create_plugin_manager(
        discover=config.plugins.discover, blocked=config.plugins.blocked, plugins=plugins
    )
    registries = Registries.from_manager(manager)
    base_dir = pathlib.Path(config.base_dir)
    policies = config.model.policies
    limits = GuardLimits()
    scheduling, eviction = create_guards(registries, policies, base_dir, limits)
    runner, model, settings, num_blocks = open_runner(config, registries, clock, report)
    engine = Engine(
        runner,
        model=ServedModel(
            name=config.model.name,
            revision=model.revision,
            tokenizer=create_tokenizer(model),
            eos_token_ids=model.text.eos_token_ids,
            vocab_size=model.architecture.vocab_size,
        ),
        settings=settings,
        num_blocks=num_blocks,
        policy=scheduling,
        eviction=eviction,
        clock=clock,
    )
    card = make_card(config, model, settings, runner, num_blocks)
    switch = PolicySwitch(
        {"scheduling": scheduling, "eviction": eviction},
        lambda kind, choice: registries.create(kind, choice.use, choice.options, base_dir),
        limits.watchdog,
    )
    return BuiltEngine(engine=engine, card=card, switch=switch)


def open_runner(
    config: ReplicaConfig, registries: Registries, clock: Clock, report: Report
) -> tuple[Runner, LoadedModel, EngineSettings, int]:
    """Return a replica's runner, warm and with its pool of so many blocks, its model and its settings."""
    base_dir = pathlib.Path(config.base_dir)
    quantization = create(registries, "quantization", config.model.policies.quantization, base_dir)
    backend = open_backend(registries, config.model.backend, base_dir, clock)
    model = open_model_source(config, registries, report)
    settings = settings_for(config, model, backend)
    runner, settings, num_blocks = load_runner(
        backend, model, settings, quantization, report, config.replicas_on_host
    )
    return runner, model, settings, num_blocks


def create_tokenizer(model: LoadedModel) -> Tokenizer:
    """Return the tokenizer that the model's text calls for."""
    from headrace.text.tokenizer import Tokenizer

    return Tokenizer(
        model.text.tokenizer_json,
        special_tokens=model.text.special_tokens,
        add_bos_token=model.text.add_bos_token,
    )


def create_guards(
    registries: Registries, policies: PoliciesConfig, base_dir: pathlib.Path, limits: GuardLimits
) -> tuple[SchedulingGuard, EvictionGuard]:
    """Return the engine's policies of every kind that can be swapped, guarded."""
    from headrace.policies.eviction.lru import LeastRecentlyUsed
    from headrace.policies.scheduling.fcfs import FirstComeFirstServed

    scheduling = SchedulingGuard(
        create(registries, "scheduling", policies.scheduling, base_dir),
        FirstComeFirstServed(),
        limits,
    )
    scheduling.choice = PolicyChoice(policies.scheduling.use, policies.scheduling.options)
    eviction = EvictionGuard(
        create(registries, "eviction", policies.eviction, base_dir), LeastRecentlyUsed(), limits
    )
    eviction.choice = PolicyChoice(policies.eviction.use, policies.eviction.options)
    return scheduling, eviction


def create(registries: Registries, kind: str, choice: Choice, base_dir: pathlib.Path) -> Any:
    """Return the policy that a `{use, options}` of the configuration names."""
    return registries.create(kind, choice.use, choice.options, base_dir)


def open_backend(
    registries: Registries, choice: Choice, base_dir: pathlib.Path, clock: Clock
) -> Backend:
    """Return the chosen backend, opened. BackendUnavailable says what is missing and how to get it."""
    backend_class: type[Backend] = registries.resolve("backends", choice.use, base_dir)
    options = build_options(backend_class, choice.options, base_dir)
    availability = backend_class.probe()
    if not availability.ok:
        raise BackendUnavailable(
            f"backend '{choice.use}' cannot run here: {availability.reason}. "
            f"Choose another with models.*.backend; known: {', '.join(registries.backends.names())}"
        )
    return backend_class.open(0, options, clock)


def open_model_source(config: ReplicaConfig, registries: Registries, report: Report) -> LoadedModel:
    """Fetch the model's source if need be and open it; nothing is held on a device yet."""
    from headrace.models.checkpoint import open_model
    from headrace.models.sources import fetch

    source = config.model.source
    if source.startswith("scripted:"):
        from headrace.testing.scripted import open_scripted

        return open_scripted(pathlib.Path(source.removeprefix("scripted:")), config.model.name)
    path = fetch(source, report=report)
    known = _Architectures(registries.models)
    return open_model(path, name=config.model.name, registry_models=known)


class _Architectures(Mapping[str, type[ModelArchitecture]]):
    """The architectures a checkpoint may ask for, imported when one does: a broken one breaks no other."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._names = [name for name in registry.names() if name != "scripted"]

    def __getitem__(self, name: str) -> type[ModelArchitecture]:
        if name not in self._names:
            raise KeyError(name)
        return self._registry.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def settings_for(config: ReplicaConfig, model: LoadedModel, backend: Backend) -> EngineSettings:
    """Resolve every `auto`, and never promise more context than the model was made for.

    Where the backend has memory of its own, `kv_memory: auto` is 0 bytes until load_runner has measured.
    """
    engine = config.model.engine
    trained = model.architecture.max_position
    settings = resolve_engine(
        engine,
        replicas=config.replicas_on_host,
        stored_dtype=model.stored_dtype,
        trained_model_len=trained,
        kv_on_host=not getattr(backend, "has_own_memory", False),
    )
    if settings.max_model_len > trained:
        structlog.get_logger(__name__).warning(
            "max_model_len lowered to what the model was trained for",
            model=config.model.name,
            asked=settings.max_model_len,
            max_model_len=trained,
        )
        settings = msgspec.structs.replace(settings, max_model_len=trained)
    return settings


def load_runner(
    backend: Backend,
    model: LoadedModel,
    settings: EngineSettings,
    quantization: QuantizationPolicy,
    report: Report,
    num_replicas: int = 1,
) -> tuple[Runner, EngineSettings, int]:
    """Hold the weights, size and allocate the KV pool, run every kernel once; or leave nothing behind.

    `num_replicas` share the backend's device, where it has memory of its own.
    """
    report("load", 0.0)
    runner = backend.create_runner(
        model, SingleRank(), settings, quantization=quantization, report=report
    )
    try:
        return _ready(runner, model.name, settings, report, num_replicas)
    except BaseException:
        runner.close()
        raise


def _ready(
    runner: Runner, name: str, settings: EngineSettings, report: Report, num_replicas: int
) -> tuple[Runner, EngineSettings, int]:
    measure: Callable[[int], DeviceMemory] | None = getattr(runner, "measure_memory", None)
    memory = None if measure is None else measure(num_replicas)
    if memory is not None:
        settings = settle_kv_memory(settings, memory, runner.memory().kv_bytes_per_block)
    settings, num_blocks = size_pool(settings, runner, name)
    if memory is not None:
        say_memory(memory, settings, num_blocks, name)
    runner.allocate(num_blocks)
    report("warmup", 0.0)
    runner.warm_up(lambda fraction: report("warmup", fraction))
    return runner, settings, num_blocks


def settle_kv_memory(
    settings: EngineSettings, memory: DeviceMemory, per_block: int
) -> EngineSettings:
    """Return settings whose kv_memory_bytes the device has: what is left of it where none was given.

    ConfigError, with the arithmetic and what to change, where nothing is left or more was asked for.
    """
    given, most = settings.kv_memory_bytes, memory.most_kv_bytes
    if given > most:
        raise ConfigError(
            f"models.*.engine.kv_memory: {about_size(given)} is more than the {about_size(most)} that the "
            f"device has left ({arithmetic(memory)}); give less, or write auto"
        )
    if given == 0 and memory.kv_bytes < per_block:
        raise ConfigError(
            f"models.*.engine.kv_memory: auto leaves {about_size(memory.kv_bytes)} of the device for keys and "
            f"values, one block of {settings.block_size} tokens takes {about_size(per_block)} "
            f"({arithmetic(memory)}). Raise models.*.backend.options.memory_share, lower "
            f"models.*.engine.max_batched_tokens ({settings.max_batched_tokens}) or max_num_sequences "
            f"({settings.max_num_sequences}), or hold the weights in fewer bits "
            "(models.*.policies.quantization)"
        )
    return msgspec.structs.replace(settings, kv_memory_bytes=given or memory.kv_bytes)


def arithmetic(memory: DeviceMemory) -> str:
    """Return where a device's memory goes, as one line."""
    words = {"total": "device", "activations": "activations at the peak", "kept_free": "kept free"}
    parts = [f"{words.get(name, name)} {size}" for name, size in _sizes(memory).items()]
    shared = f", shared by {memory.num_replicas} replicas" if memory.num_replicas > 1 else ""
    return ", ".join(parts) + shared


def _sizes(memory: DeviceMemory) -> dict[str, str]:
    sizes = {
        "total": memory.total_bytes,
        "free": memory.free_bytes,
        "weights": memory.weight_bytes,
        "activations": memory.activation_bytes,
        "graphs": memory.graph_bytes,
        "kept_free": memory.kept_free_bytes,
    }
    return {name: about_size(size) for name, size in sizes.items()}


def say_memory(memory: DeviceMemory, settings: EngineSettings, num_blocks: int, name: str) -> None:
    """Log the arithmetic by which the pool was sized."""
    structlog.get_logger(__name__).info(
        "device memory",
        model=name,
        **_sizes(memory),
        replicas=memory.num_replicas,
        kv_memory=about_size(settings.kv_memory_bytes),
        blocks=num_blocks,
    )


def size_pool(settings: EngineSettings, runner: Runner, name: str) -> tuple[EngineSettings, int]:
    """Return how many blocks the KV memory holds, and max_model_len lowered to what they hold.

    One sequence of max_model_len always fits the pool alone; more blocks than all sequences at
    full length could use are not taken. ModelError where not even one block fits.
    """
    per_block = runner.memory().kv_bytes_per_block
    blocks_per_sequence = -(-settings.max_model_len // settings.block_size)
    wanted = blocks_per_sequence * settings.max_num_sequences
    num_blocks = min(wanted, settings.kv_memory_bytes // per_block) if per_block else wanted
    if num_blocks < 1:
        raise ModelError(
            f"models.*.engine.kv_memory: {format_size(settings.kv_memory_bytes)} does not hold one block of "
            f"{settings.block_size} tokens of '{name}' ({format_size(per_block)}); give at least "
            f"{format_size(per_block * blocks_per_sequence)} for {settings.max_model_len} tokens"
        )
    held = num_blocks * settings.block_size
    if held < settings.max_model_len:
        structlog.get_logger(__name__).warning(
            "max_model_len lowered to what the KV pool holds",
            model=name,
            asked=settings.max_model_len,
            max_model_len=held,
            kv_memory=about_size(settings.kv_memory_bytes),
            needed=about_size(per_block * blocks_per_sequence),
        )
        settings = msgspec.structs.replace(settings, max_model_len=held)
    return settings, num_blocks


def make_card(
    config: ReplicaConfig,
    model: LoadedModel,
    settings: EngineSettings,
    runner: Runner,
    num_blocks: int,
) -> ModelCard:
    """Return what the replica says of itself."""
    memory = runner.memory()
    return ModelCard(
        name=config.model.name,
        revision=model.revision,
        architecture=model.architecture.name,
        tokenizer_json=model.text.tokenizer_json,
        chat_template=model.text.chat_template,
        special_tokens=dict(model.text.special_tokens),
        add_bos_token=model.text.add_bos_token,
        eos_token_ids=tuple(model.text.eos_token_ids),
        vocab_size=model.architecture.vocab_size,
        max_model_len=settings.max_model_len,
        max_queued_requests=settings.max_queued_requests,
        block_size=settings.block_size,
        num_blocks=num_blocks,
        default_sampling=dict(model.default_sampling),
        weight_bytes=memory.weight_bytes,
        kv_bytes_per_token=memory.kv_bytes_per_block // settings.block_size,
        backend=config.model.backend.use,
        dtype=settings.dtype,
        kv_dtype=memory.kv_dtype or settings.kv_dtype,
        created=int(time.time()),
    )
