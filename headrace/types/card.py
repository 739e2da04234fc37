"""What a model and a replica say of themselves."""

from __future__ import annotations

from typing import Any

import msgspec


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one engine runs its model; a replica's `engine:` table with every `auto` resolved."""

    dtype: str = "bfloat16"
    """Activations and dense weights: float32, bfloat16 or float16."""
    kv_dtype: str = "bfloat16"
    may_choose_kv_dtype: bool = False
    """Whether it was `auto`: a backend may keep keys and values otherwise than `kv_dtype` says."""
    num_threads: int = 1
    kv_memory_bytes: int = 1 << 30
    max_model_len: int = 4096
    max_num_sequences: int = 64
    max_batched_tokens: int = 512
    """Tokens of one step at most, decodes and prefill chunks together."""
    max_queued_requests: int = 256
    block_size: int = 16
    prefix_caching: bool = True
    deterministic: bool = False
    activations: str = "mixed"
    """mixed, precise or int8: how the CPU's fast path rounds what meets integer weights."""


class KVGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share a block table: same heads, same head size, same window."""

    name: str
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    """None: full causal attention. w: a query sees itself and the w - 1 rows before it."""


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The memory arithmetic of a runner, in bytes."""

    weight_bytes: int
    kv_bytes_per_block: int
    """All groups and layers together."""
    kv_pool_bytes: int
    """0 before allocate."""
    available_bytes: int
    kv_dtype: str = ""
    """How keys and values are kept, where that is not what the settings say."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a device with memory of its own has left for one replica's keys and values, in bytes."""

    total_bytes: int
    free_bytes: int
    """With the weights held, no pool allocated and nothing running."""
    weight_bytes: int
    activation_bytes: int
    """What the largest step took at its peak, beside the weights."""
    graph_bytes: int
    """What recorded decode steps will keep."""
    kept_free_bytes: int
    num_replicas: int
    """How many share the device."""
    most_kv_bytes: int
    """What a pool of a given size may take: all that is free and that no step needs."""
    kv_bytes: int
    """What the pool takes by itself: less what is kept free, and no more than this replica's part."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a ready replica tells the gateway: all it needs to turn HTTP into tokens and back."""

    name: str
    revision: str
    """Digest of the checkpoint; part of every prefix-cache key."""
    architecture: str
    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str]
    """bos_token, eos_token, unk_token, pad_token where the model has them."""
    add_bos_token: bool
    """Whether raw text (not a rendered chat) is prefixed with bos_token."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    max_queued_requests: int
    block_size: int
    num_blocks: int
    default_sampling: dict[str, Any]
    """From the model's generation config: temperature, top_k, top_p, ..."""
    weight_bytes: int
    kv_bytes_per_token: int
    backend: str
    dtype: str
    kv_dtype: str = ""
    """How keys and values are kept."""
    created: int = 0
    """Unix seconds at which the replica became ready."""


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request, for observers: facts and no text."""

    request_id: str
    model: str
    endpoint: str
    status: int
    finish_reasons: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_seconds: float | None
    tpot_seconds: float | None
    duration_seconds: float


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a server that has just become ready."""

    host: str
    port: int
    models: tuple[str, ...]
