"""A model that says what a file tells it to: everything around its weights is real.

Each token's embedding is the code of the token that follows it, and the head answers a code with an
overwhelming logit for its token. Attention runs and fills the KV cache, but its output counts nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.interfaces import AttentionSpec, Group, LoadedModel, LoadSettings, Ops, TensorSource
from headrace.interfaces.model import TextAssets
from headrace.testing.script_file import Chain, Script, build_chain, read_script, write_script
from headrace.types import KVGroupSpec, WeightPart

__all__ = ["ScriptedArchitecture", "ScriptedConfig", "open_scripted", "write_script"]

HIDDEN_SIZE = 128
NUM_HEADS = 2
HEAD_DIM = 64
_LOAD_TICKS = 20
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_QKV = "model.layers.0.self_attn.qkv_proj.weight"
_OUTPUT = "model.layers.0.self_attn.o_proj.weight"
_QKV_SIZES = (NUM_HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM)
_SPEC = AttentionSpec(num_heads=NUM_HEADS, num_kv_heads=1, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)


@dataclass(frozen=True, slots=True)
class ScriptedConfig:
    """What the architecture needs to know of a script."""

    vocab_size: int
    max_position: int
    step_delay_seconds: float = 0.0
    load_delay_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Weights:
    embedding: Any
    qkv: Any
    output: Any
    head: Any
    rope: Any


class ScriptedArchitecture:
    """One attention layer on Ops whose next token depends on the last token alone."""

    name: ClassVar[str] = "scripted"

    def __init__(self, config: ScriptedConfig) -> None:
        self.vocab_size = config.vocab_size
        self.max_position = config.max_position
        self._step_delay_seconds = config.step_delay_seconds
        self._load_delay_seconds = config.load_delay_seconds

    def kv_groups(self) -> Sequence[KVGroupSpec]:
        return (KVGroupSpec(name="all", layers=(0,), num_kv_heads=1, head_dim=HEAD_DIM),)

    def query_heads(self) -> int:
        return NUM_HEADS

    def load(
        self, ops: Ops, tensors: TensorSource, group: Group, settings: LoadSettings
    ) -> _Weights:
        if group.size != 1:
            raise ModelError(f"a scripted model runs on one rank, not on {group.size}")
        for tick in range(_LOAD_TICKS):
            settings.report(tick / _LOAD_TICKS)
            time.sleep(self._load_delay_seconds / _LOAD_TICKS)
        frequencies = 10_000.0 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))

        def hold(name: str) -> Any:
            return ops.hold([settings.expand(tensors.read(name))])

        weights = _Weights(
            embedding=hold(_EMBEDDING),
            qkv=hold(_QKV),
            output=hold(_OUTPUT),
            head=hold(_HEAD),
            rope=ops.rope_table(frequencies, 1.0, settings.max_positions),
        )
        settings.report(1.0)
        return weights

    def forward(self, ops: Ops, group: Group, weights: _Weights, step: Any) -> Any:
        if self._step_delay_seconds:
            time.sleep(self._step_delay_seconds)
        x = ops.embed(weights.embedding, step)
        q, k, v = ops.split(ops.linear(x, weights.qkv), _QKV_SIZES)
        q = ops.rope_write_kv(q, k, v, weights.rope, 0, step)
        attended = ops.linear(ops.paged_attention(q, 0, _SPEC, step), weights.output)
        x = ops.add(attended, x)
        return ops.linear(ops.take_rows(x, step), weights.head)


class _ArraySource:
    """Tensors in memory. Implements headrace.interfaces.TensorSource."""

    def __init__(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        self._arrays = arrays

    def names(self) -> Iterable[str]:
        return self._arrays.keys()

    def has(self, name: str) -> bool:
        return name in self._arrays

    def scheme(self, name: str) -> tuple[str, tuple[int, ...]]:
        part = self.read(name)
        return part.scheme, part.shape

    def read(self, name: str) -> WeightPart:
        if name not in self._arrays:
            raise ModelError(
                f"a scripted model has no tensor '{name}'; it has {list(self._arrays)}"
            )
        array = self._arrays[name]
        return WeightPart(name=name, scheme="f32", shape=array.shape, data=array)


def open_scripted(path: Path, name: str) -> LoadedModel:
    """Open the script at `path` as a model called `name`. ModelError where the script is wrong."""
    script = read_script(path)
    chain = build_chain(script, path.parent)
    config = ScriptedConfig(
        vocab_size=chain.vocab_size,
        max_position=script.max_position,
        step_delay_seconds=script.step_delay_seconds,
        load_delay_seconds=script.load_delay_seconds,
    )
    return LoadedModel(
        name=name,
        revision=hashlib.sha256(path.read_bytes() + chain.tokenizer_json.encode()).hexdigest(),
        architecture=ScriptedArchitecture(config),
        tensors=_ArraySource(_arrays(chain)),
        text=_text_assets(script, chain),
        default_sampling={},
        stored_dtype="float32",
        expand=lambda part: part,
    )


def _text_assets(script: Script, chain: Chain) -> TextAssets:
    return TextAssets(
        tokenizer_json=chain.tokenizer_json,
        chat_template=script.chat_template,
        special_tokens=script.special_tokens,
        add_bos_token=script.add_bos_token,
        eos_token_ids=(chain.eos_token_id,),
    )


def _arrays(chain: Chain) -> dict[str, NDArray[np.float32]]:
    """The weights. A code is 128 signs times 2: its product with itself is 512, with others far less."""
    random = np.random.default_rng(0)
    following = np.asarray(chain.following)
    targets, places = np.unique(following, return_inverse=True)
    signs = random.integers(0, 2, (len(targets), HIDDEN_SIZE))
    codes = (4.0 * signs - 2.0).astype(np.float32)
    codes[targets < 0] = np.nan
    head = np.zeros((chain.vocab_size, HIDDEN_SIZE), np.float32)
    head[targets[targets >= 0]] = codes[targets >= 0]
    qkv = random.standard_normal((sum(_QKV_SIZES), HIDDEN_SIZE)).astype(np.float32)
    return {
        _EMBEDDING: codes[places],
        _QKV: qkv * np.float32(0.05),
        _OUTPUT: np.zeros((HIDDEN_SIZE, NUM_HEADS * HEAD_DIM), np.float32),
        _HEAD: head,
    }
