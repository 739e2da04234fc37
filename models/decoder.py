"""The decoder-only transformer that every built-in architecture is: declared by its configuration.

Families differ in data (biases, norms, windows, rope, scales), not in code, so one forward serves
them; a model that computes otherwise implements `headrace.interfaces.ModelArchitecture` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.errors import ModelError
from headrace.interfaces import AttentionSpec, Group, LoadSettings, Ops, TensorSource
from headrace.models.config import ModelConfig
from headrace.models.weights import (
    Declaration,
    LinearDeclaration,
    VectorDeclaration,
    WeightLoader,
)
from headrace.types import KVGroupSpec

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class NormNames:
    """What a family calls the RMS norms of a layer. None: it has none there."""

    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer as the backend holds it; `rope` and `attention` are shared between like layers."""

    qkv: Any
    output: Any
    gate_up: Any
    down: Any
    norm_before_attention: Any
    norm_before_mlp: Any
    rope: Any
    attention: AttentionSpec
    norm_after_attention: Any = None
    norm_after_mlp: Any = None
    query_norm: Any = None
    key_norm: Any = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model as the backend holds it."""

    embedding: Any
    head: Any
    layers: tuple[LayerWeights, ...]
    norms_after_layer: tuple[Any, ...]
    """What follows each layer: the next one's norm_before_attention, after the last the final norm."""


class DecoderArchitecture:
    """Implements headrace.interfaces.ModelArchitecture; a family names itself and its norms."""

    name: ClassVar[str]
    norms: ClassVar[NormNames] = NormNames()

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_position = config.max_position

    def query_heads(self) -> int:
        return self.config.num_heads

    def kv_groups(self) -> Sequence[KVGroupSpec]:
        """One group per window, in the order in which layers first have it."""
        layers_of: dict[int | None, list[int]] = {}
        for layer in range(self.config.num_layers):
            layers_of.setdefault(self.config.window_of(layer), []).append(layer)
        return tuple(
            KVGroupSpec(
                name="full" if window is None else f"window_{window}",
                layers=tuple(layers),
                num_kv_heads=self.config.num_kv_heads,
                head_dim=self.config.head_dim,
                sliding_window=window,
            )
            for window, layers in layers_of.items()
        )

    # --- declarations -----------------------------------------------------------

    def model_declarations(self) -> Mapping[str, Declaration]:
        """The weights outside the layers, by field of DecoderWeights (and the final norm)."""
        config = self.config
        matrix = ((config.vocab_size,), config.hidden_size)
        declarations: dict[str, Declaration] = {
            "embedding": LinearDeclaration((EMBEDDING,), *matrix),
            "final_norm": VectorDeclaration(FINAL_NORM, config.hidden_size),
        }
        if not config.tie_word_embeddings:
            declarations["head"] = LinearDeclaration((HEAD,), *matrix)
        return declarations

    def layer_declarations(self, layer: int) -> Mapping[str, Declaration]:
        """The weights of one layer, by field of LayerWeights."""
        config, prefix = self.config, f"model.layers.{layer}"
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        declarations: dict[str, Declaration] = {
            "qkv": LinearDeclaration(
                tuple(f"{attention}.{name}_proj" for name in "qkv"),
                (q_size, kv_size, kv_size),
                hidden,
                "out",
                config.attention_bias,
            ),
            "output": LinearDeclaration(
                (f"{attention}.o_proj",), (hidden,), q_size, "in", config.attention_output_bias
            ),
            "gate_up": LinearDeclaration(
                (f"{mlp}.gate_proj", f"{mlp}.up_proj"), (inner, inner), hidden, "out", bias
            ),
            "down": LinearDeclaration((f"{mlp}.down_proj",), (hidden,), inner, "in", bias),
        }
        for field, norm in (
            ("norm_before_attention", self.norms.before_attention),
            ("norm_after_attention", self.norms.after_attention),
            ("norm_before_mlp", self.norms.before_mlp),
            ("norm_after_mlp", self.norms.after_mlp),
        ):
            if norm is not None:
                declarations[field] = VectorDeclaration(f"{prefix}.{norm}.weight", hidden)
        if config.qk_norm:
            for field, norm in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
                declarations[field] = VectorDeclaration(
                    f"{attention}.{norm}.weight", config.head_dim
                )
        return declarations

    # --- loading ----------------------------------------------------------------

    def load(
        self, ops: Ops, tensors: TensorSource, group: Group, settings: LoadSettings
    ) -> DecoderWeights:
        self._check_group(group)
        model = self.model_declarations()
        layers = [self.layer_declarations(layer) for layer in range(self.config.num_layers)]
        num_elements = sum(d.num_elements for table in (model, *layers) for d in table.values())
        loader = WeightLoader(ops, tensors, group, settings, num_elements)
        held = {field: loader.hold(declaration) for field, declaration in model.items()}
        ropes = {
            rope: ops.rope_table(rope.inverse_frequencies(), 1.0, settings.max_positions)
            for rope in {self.config.rope_of(layer) for layer in range(self.config.num_layers)}
        }
        weights = tuple(
            LayerWeights(
                rope=ropes[self.config.rope_of(layer)],
                attention=self._attention_spec(layer, group),
                **{field: loader.hold(declaration) for field, declaration in table.items()},
            )
            for layer, table in enumerate(layers)
        )
        following = (*(layer.norm_before_attention for layer in weights[1:]), held["final_norm"])
        embedding = held["embedding"]
        return DecoderWeights(embedding, held.get("head", embedding), weights, following)

    def _check_group(self, group: Group) -> None:
        if self.config.num_heads % group.size or self.config.num_kv_heads % group.size:
            raise ModelError(
                f"{self.config.num_heads} query and {self.config.num_kv_heads} key/value heads do not "
                f"divide over {group.size} ranks; choose a tensor-parallel size that divides both"
            )

    def _attention_spec(self, layer: int, group: Group) -> AttentionSpec:
        config = self.config
        return AttentionSpec(
            num_heads=config.num_heads // group.size,
            num_kv_heads=config.num_kv_heads // group.size,
            head_dim=config.head_dim,
            scale=config.query_scale,
            sliding_window=config.window_of(layer),
            softcap=config.attention_softcap,
        )

    # --- the forward ------------------------------------------------------------

    def forward(self, ops: Ops, group: Group, weights: DecoderWeights, step: Any) -> Any:
        eps = self.config.rms_norm_eps
        residual = ops.embed(weights.embedding, step, self.config.embed_scale)
        x = ops.rms_norm(residual, weights.layers[0].norm_before_attention, eps)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            x = self._attend(ops, layer, index, x, step)
            if index == last:  # from here on nobody reads the other rows
                x, residual = ops.take_rows(x, step), ops.take_rows(residual, step)
            x = group.all_reduce(ops.linear(x, layer.output))
            if layer.norm_after_attention is not None:
                x = ops.rms_norm(x, layer.norm_after_attention, eps)
            x, residual = ops.add_rms_norm(x, residual, layer.norm_before_mlp, eps)
            x = self._feed_forward(ops, group, layer, x)
            x, residual = ops.add_rms_norm(x, residual, weights.norms_after_layer[index], eps)
        logits = ops.linear(x, weights.head)
        cap = self.config.final_softcap
        return logits if cap is None else ops.soft_cap(logits, cap)

    def _attend(self, ops: Ops, layer: LayerWeights, index: int, x: Any, step: Any) -> Any:
        spec, eps = layer.attention, self.config.rms_norm_eps
        kv_size = spec.num_kv_heads * spec.head_dim
        sizes = (spec.num_heads * spec.head_dim, kv_size, kv_size)
        q, k, v = ops.split(ops.linear(x, layer.qkv), sizes)
        if layer.query_norm is not None:
            q = ops.rms_norm(q, layer.query_norm, eps, spec.num_heads)
            k = ops.rms_norm(k, layer.key_norm, eps, spec.num_kv_heads)
        q = ops.rope_write_kv(q, k, v, layer.rope, index, step)
        return ops.paged_attention(q, index, spec, step)

    def _feed_forward(self, ops: Ops, group: Group, layer: LayerWeights, x: Any) -> Any:
        gated = ops.linear(x, layer.gate_up)
        is_gelu = self.config.hidden_act == "gelu_pytorch_tanh"
        x = ops.linear(ops.gelu_mul(gated) if is_gelu else ops.silu_mul(gated), layer.down)
        x = group.all_reduce(x)
        if layer.norm_after_mlp is not None:
            x = ops.rms_norm(x, layer.norm_after_mlp, self.config.rms_norm_eps)
        return x
