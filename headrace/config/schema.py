"""The one YAML as frozen structs: every key, its type, its default and its meaning.

A docstring under a field is its documentation; docs/configuration.md repeats it, and a test compares.
Values are final here: units parsed, paths absolute. Only `auto` is left to headrace.config.resources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import msgspec

from headrace.types.units import Bounds, Bytes, Unit

Auto = Literal["auto"]
Count = Annotated[int, Bounds(1, None)]
Pause = Annotated[float, Unit("duration"), Bounds(0.01, None)]
"""Shorter, and the event loop would do nothing but wait for it."""
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class PathLike:
    """Marks text that may hold a path: "source" (of a model) or "use" (of a policy)."""

    kind: str


@dataclass(frozen=True, slots=True)
class Derived:
    """Marks a field that is no key of the YAML."""


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plugin chosen, with its options. In YAML also the bare name: `routing: round_robin`."""

    use: Annotated[str, PathLike("use")]
    """A built-in's or plugin's name, or a script: ./file.py:Class."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Checked against the chosen class's `Options`."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Bounds(0, 65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    max_body_bytes: Bytes = 16 << 20
    """Larger request bodies are refused with 413."""
    keepalive_interval: Pause = 10.0
    """A comment line goes to a streaming client at this interval while there is no token."""
    stall_timeout: Pause = 60.0
    """A request whose client reads nothing for so long is aborted."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: DtypeName = "auto"
    """Activations and dense weights; auto: as the checkpoint stores them."""
    kv_dtype: DtypeName = "auto"
    """Keys and values; auto: the same as dtype."""
    num_threads: Auto | Count = "auto"
    """Compute threads of one replica; auto: this host's CPUs shared by its replicas."""
    kv_memory: Auto | Bytes = "auto"
    """Memory of one replica's KV pool; auto: half of its share of the memory available."""
    max_model_len: Auto | Count = 4096
    """Longest prompt and output together; auto: what the model was trained for."""
    max_num_sequences: Count = 64
    """Sequences computed at once."""
    max_batched_tokens: Count = 512
    """Tokens of one step at most, decodes and prompt chunks together."""
    max_queued_requests: Annotated[int, Bounds(0, None)] = 256
    """More requests waiting than this are refused with 503."""
    block_size: Literal[8, 16, 32, 64, 128] = 16
    """Tokens in one block of the KV pool."""
    prefix_caching: bool = True
    """Reuse the KV rows of a prefix that an earlier request has computed."""
    deterministic: bool = False
    """Results independent of the batch, bit for bit; slower."""


class PoliciesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    scheduling: Choice = Choice("fcfs")
    """Who runs next, who is preempted."""
    quantization: Choice = Choice("none")
    """Which weights are held in which scheme."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = ""
    """What clients call it; left out: taken from the source."""
    source: Annotated[str, PathLike("source")] = "smollm2"
    """smollm2, hf:org/name[:file][@revision], pkg:package, scripted:FILE, a GGUF file or a folder."""
    backend: Choice = Choice("cpu")
    """The device it runs on."""
    replicas: Annotated[int, Bounds(1, 64)] = 1
    """Engine processes on this host."""
    engine: EngineConfig = EngineConfig()
    policies: PoliciesConfig = PoliciesConfig()


class PluginsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    discover: bool = True
    """Load the plugins that installed packages announce."""
    blocked: tuple[str, ...] = ()
    """Names of announced plugins that are never imported."""


class LoggingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["console", "json"] = "console"
    """console for people, json for machines; one line per event."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Events below this level are dropped."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gateway: GatewayConfig = GatewayConfig()
    models: tuple[ModelConfig, ...] = (ModelConfig(name="smollm2"),)
    """At least one; names are unique."""
    routing: Choice = Choice("round_robin")
    """Which replica serves a request."""
    admission: tuple[Choice, ...] = (Choice("unlimited"),)
    """Who may come in; all of them must agree, in this order."""
    plugins: PluginsConfig = PluginsConfig()
    logging: LoggingConfig = LoggingConfig()
    base_dir: Annotated[str, Derived()] = ""
    """The YAML file's folder, where relative paths in `options` count from."""


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica's part of the configuration, as it travels to the engine process."""

    model: ModelConfig
    plugins: PluginsConfig
    logging: LoggingConfig
    replicas_on_host: int
    """All replicas of all models on this host: what `auto` shares the host's resources by."""
    base_dir: str

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return msgspec.convert(data, cls)


def replica_config(config: Config, model_index: int) -> dict[str, Any]:
    """Return the part of `config` that a replica of this model needs, as plain data."""
    part = ReplicaConfig(
        model=config.models[model_index],
        plugins=config.plugins,
        logging=config.logging,
        replicas_on_host=sum(model.replicas for model in config.models),
        base_dir=config.base_dir,
    )
    data: dict[str, Any] = msgspec.to_builtins(part)
    return data
