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
KVDtypeName = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]


@dataclass(frozen=True, slots=True)
class PathLike:
    """Marks text that may hold a path: "source" (of a model), "use" (of a policy); "file" always is one."""

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


class AdminConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key_env: str = ""
    """Environment variable that holds the admin key; /admin on the main port needs one."""
    port: Annotated[int, Bounds(0, 65535)] | None = None
    """A port of its own for /admin, on `host`; 0 takes a free one. Not given: the main port."""
    host: str = "127.0.0.1"
    """Address of that port."""


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    certificate: Annotated[str, PathLike("file")] = ""
    """PEM file with the certificate and its chain; with it the gateway speaks HTTPS only."""
    key: Annotated[str, PathLike("file")] = ""
    """PEM file with the certificate's private key; left out: in the certificate's file."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Bounds(0, 65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    max_body_bytes: Bytes = 16 << 20
    """Larger request bodies are refused with 413."""
    keepalive_interval: Pause = 10.0
    """A comment line goes to a streaming client at this interval while there is no token."""
    stall_timeout: Pause = 30.0
    """A request whose client reads nothing for so long is aborted."""
    receive_timeout: Pause = 30.0
    """A request's head must be in within this time, and its body too, with 1 s more for each KB."""
    api_keys_file: Annotated[str, PathLike("file")] = ""
    """YAML file of API keys, hashed; with it callers need one of them."""
    api_keys_env: str = ""
    """Environment variable with a key, or several as tenant:key with commas between."""
    shared_prefix_cache: bool = False
    """Let tenants share prefix-cache entries; whether a prompt was seen before then shows in timing."""
    metrics_access: Literal["key", "open", "admin"] = "key"
    """Who may read /metrics: with any key where keys are needed, everybody, or with the admin key."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the API; * is every origin."""
    tls: TlsConfig = TlsConfig()
    grace_period: Annotated[float, Unit("duration"), Bounds(0, None)] = 30.0
    """Told to stop, or taken out, a replica's running requests have so long to finish."""
    admin: AdminConfig = AdminConfig()


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: DtypeName = "auto"
    """Activations and dense weights; auto: as the checkpoint stores them."""
    kv_dtype: KVDtypeName = "auto"
    """Keys and values; auto: as dtype, on CPUs int8 where it costs little; int8, fp8 (GPUs): half the size."""
    num_threads: Auto | Count = "auto"
    """Compute threads of one replica; auto: this host's CPUs shared by its replicas."""
    kv_memory: Auto | Bytes = "auto"
    """Memory of one replica's KV pool; auto: half its share of what is available; on a GPU what is left."""
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
    """Results depend on nothing else in the batch, bit for bit; slower only where a path is not so anyway."""
    activations: Literal["mixed", "precise", "int8"] = "mixed"
    """Backend cpu, bits of what meets integer weights: 15, 8 (faster for many rows), or 15 where it matters."""


class PoliciesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    scheduling: Choice = Choice("fcfs")
    """Who runs next, who is preempted."""
    eviction: Choice = Choice("lru")
    """Which reusable KV blocks go first."""
    quantization: Choice = Choice("none")
    """Which weights are held in which scheme."""


class ReplicaEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["process", "http", "in_process"] = "process"
    """process: an engine in a child process; in_process: in this one; http: an OpenAI-compatible server."""
    count: Annotated[int, Bounds(1, 64)] = 1
    """So many alike."""
    url: str = ""
    """http: where its /v1 is, such as http://10.0.0.7:8000."""
    model: str = ""
    """http: what that server calls the model; not given: as it is called here."""
    api_key_env: str = ""
    """http: environment variable that holds the key sent to that server."""
    send_cache_salt: bool = True
    """http: keep tenants apart in its prefix cache by a `cache_salt`; off for a server that refuses it."""
    connect_timeout: Pause = 5.0
    """http: a connection must stand within this."""
    first_byte_timeout: Pause = 300.0
    """http: an answer must begin within this, queueing and prefill included."""
    idle_timeout: Pause = 60.0
    """http: the longest silence inside an answer."""
    hang_timeout: Pause = 10.0
    """process: an engine process that gives no sign of life for so long is killed and started again."""

    @property
    def is_local(self) -> bool:
        """Whether it runs an engine on this host."""
        return self.kind != "http"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = ""
    """What clients call it; left out: taken from the source."""
    source: Annotated[str, PathLike("source")] = "smollm2"
    """smollm2, hf:org/name[:file][@revision], pkg:package, scripted:FILE, a GGUF file or a folder."""
    backend: Choice = Choice("cpu")
    """The device it runs on."""
    replicas: Annotated[int, Bounds(1, 64)] | tuple[ReplicaEntry, ...] = 1
    """How many engine processes on this host, or a list of replicas."""
    engine: EngineConfig = EngineConfig()
    policies: PoliciesConfig = PoliciesConfig()

    @property
    def replica_entries(self) -> tuple[ReplicaEntry, ...]:
        """One entry per replica, counts written out."""
        if isinstance(self.replicas, int):
            return (ReplicaEntry(),) * self.replicas
        alone = (msgspec.structs.replace(entry, count=1) for entry in self.replicas)
        return tuple(
            entry
            for entry, listed in zip(alone, self.replicas, strict=True)
            for _ in range(listed.count)
        )

    @property
    def is_remote(self) -> bool:
        """Whether no replica runs an engine here: such a model needs no source."""
        return not any(entry.is_local for entry in self.replica_entries)


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    store: Literal["memory", "redis"] = "memory"
    """Where limits are counted: in this gateway alone, or in a Redis that several gateways share."""
    url: str = "redis://127.0.0.1:6379/0"
    """Of the Redis: redis://, rediss:// (TLS) or unix://."""
    url_env: str = ""
    """The environment variable that holds the URL instead, where it has a password."""
    on_failure: Literal["open", "closed"] = "open"
    """While Redis does not answer: open lets everybody in without limits, closed refuses with 503."""
    timeout: Pause = 0.1
    """For one answer of Redis."""
    key_prefix: str = "headrace"
    """What the keys in Redis begin with; gateways with the same one share their limits."""


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


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    otlp_endpoint: str = ""
    """URL of an OpenTelemetry collector, such as http://127.0.0.1:4318; spans are sent to it by HTTP."""
    service_name: str = "headrace"
    """The `service.name` of the spans."""
    sample_ratio: Annotated[float, Bounds(0, 1)] = 1.0
    """Share of traces recorded where the caller has not decided it."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gateway: GatewayConfig = GatewayConfig()
    models: tuple[ModelConfig, ...] = (ModelConfig(name="smollm2"),)
    """At least one; names are unique."""
    routing: Choice = Choice("prefix_hash")
    """Which replica serves a request."""
    admission: tuple[Choice, ...] = (Choice("unlimited"),)
    """Who may come in; all of them must agree, in this order."""
    limits: LimitsConfig = LimitsConfig()
    plugins: PluginsConfig = PluginsConfig()
    logging: LoggingConfig = LoggingConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
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
    """Return the part of `config` that a replica of this model needs, as plain data.

    Of the model's replicas it is one: the others' addresses and keys are none of its business.
    """
    part = ReplicaConfig(
        model=msgspec.structs.replace(config.models[model_index], replicas=1),
        plugins=config.plugins,
        logging=config.logging,
        replicas_on_host=sum(
            entry.is_local for model in config.models for entry in model.replica_entries
        ),
        base_dir=config.base_dir,
    )
    data: dict[str, Any] = msgspec.to_builtins(part)
    return data
