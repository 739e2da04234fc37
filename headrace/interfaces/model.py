"""The contract between checkpoints, architectures and backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from headrace.interfaces.device import Group, Ops
from headrace.types import KVGroupSpec, WeightPart

if TYPE_CHECKING:
    from numpy.typing import NDArray


class TensorSource(Protocol):
    """A checkpoint's tensors under their canonical (Hugging Face) names, memory-mapped."""

    def names(self) -> Iterable[str]: ...

    def has(self, name: str) -> bool: ...

    def scheme(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return how the tensor is stored and its shape [out, in]. ModelError if it is absent."""
        ...

    def read(self, name: str) -> WeightPart:
        """Return the tensor as stored: a view of the mapping wherever possible."""
        ...


@dataclass(frozen=True, slots=True)
class TextAssets:
    """What the text layer needs of a checkpoint."""

    tokenizer_json: str
    chat_template: str | None
    special_tokens: Mapping[str, str]
    add_bos_token: bool
    eos_token_ids: tuple[int, ...]


class ModelArchitecture(Protocol):
    """A family of models: its weights as declarations and its forward on Ops."""

    name: ClassVar[str]
    """The value of `model_type` in config.json."""

    vocab_size: int
    max_position: int

    def __init__(self, config: Any) -> None:
        """`config` is a headrace.models.config.ModelConfig (or this architecture's own type)."""
        ...

    def kv_groups(self) -> Sequence[KVGroupSpec]: ...

    def query_heads(self) -> int:
        """Number of query heads (for memory planning and backend checks)."""
        ...

    def load(self, ops: Ops, tensors: TensorSource, group: Group, settings: LoadSettings) -> Any:
        """Hold every weight with `ops` and return them in the architecture's own structure.

        Raises ModelError naming the tensor where one is missing or has the wrong shape. `report`
        is told the fraction done. A rank takes its share by each weight's declared split.
        """
        ...

    def forward(self, ops: Ops, group: Group, weights: Any, step: Any) -> Any:
        """Return the logits of the step's sample rows: [R, vocab]."""
        ...


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How weights are brought in."""

    max_positions: int
    expand: Callable[[WeightPart], WeightPart]
    """Turns a part whose scheme the backend does not take into one it does (f32 rows)."""
    schemes: frozenset[str]
    """Schemes that the backend takes as they are stored."""
    report: Callable[[float], None] = field(default=lambda fraction: None)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint opened: nothing is held on a device yet."""

    name: str
    revision: str
    """Digest of the checkpoint's identity."""
    architecture: ModelArchitecture
    tensors: TensorSource
    text: TextAssets
    default_sampling: Mapping[str, Any]
    stored_dtype: str
    """What `dtype: auto` means for this checkpoint: float32, float16 or bfloat16."""
    expand: Callable[[WeightPart], WeightPart]
    """Dequantizes a block scheme to f32 rows."""


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """A named array of a quantized weight that says which axis follows out and in (None: neither)."""

    array: NDArray[Any]
    out_axis: int | None
    in_axis: int | None
