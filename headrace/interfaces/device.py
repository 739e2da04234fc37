"""The contract between engine, model and device, on two levels.

The engine drives a `Runner` and touches no tensor; a model's forward is written on `Ops`.
`headrace.backends.runner.OpsRunner` is the one Runner that runs any ModelArchitecture on any Ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from headrace.types import (
    EngineSettings,
    ForwardBatch,
    KVGroupSpec,
    MemoryReport,
    RunBatch,
    RunResult,
    SamplingBatch,
    StepResult,
    TokenMasks,
    WeightPart,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.interfaces.model import LoadedModel
    from headrace.interfaces.policies import QuantizationPolicy


class Clock(Protocol):
    """Time as a parameter. Under the simulated backend it is virtual."""

    def now(self) -> float:
        """Return seconds, never decreasing."""
        ...


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can run here and, if not, why and what to do."""

    ok: bool
    reason: str = ""


class Group(Protocol):
    """The ranks that share a model. One rank by default."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Any) -> Any:
        """Return the sum of x over all ranks; x itself with one rank."""
        ...


class Backend(Protocol):
    """A device, its memory and its kernels.

    A backend may have `has_own_memory: bool`. Where it is true, keys and values are not kept in the host's
    memory, and its runners have `measure_memory`.
    """

    name: ClassVar[str]
    schemes: ClassVar[frozenset[str]]
    """Weight schemes whose raw blocks `Ops.hold` takes; others reach it expanded to f32."""

    @classmethod
    def probe(cls) -> Availability:
        """Say whether this backend can run here. Never raises, imports nothing heavy."""
        ...

    @classmethod
    def open(cls, device_index: int, options: Any, clock: Clock) -> Self:
        """Claim the device. Heavy libraries are imported here, not above. `options` is a checked Options."""
        ...

    def create_runner(
        self,
        model: LoadedModel,
        group: Group,
        settings: EngineSettings,
        *,
        quantization: QuantizationPolicy | None = None,
        report: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> Runner:
        """Hold the weights and return what the engine drives.

        `quantization` says in which scheme each weight is held; None: as stored. `report("load",
        fraction)` is told how far it is. ModelError where a weight cannot be held so.
        """
        ...


class StepHandle(Protocol):
    """A step in flight."""

    def sample(self, masks: TokenMasks | None = None) -> None:
        """Launch the draw. Call exactly once, before result."""
        ...

    def result(self) -> StepResult:
        """Wait for the step and return what it drew."""
        ...


class Runner(Protocol):
    """All device state of one model. Called by the engine thread only; arguments are plain data.

    A runner may have `runs_ahead: bool`. Where it is true, the engine plans and launches one step
    before it takes the result of the one before: `execute` returns at once, steps run in the order
    of their launch, and a token whose `token_sources` names a row is what that row of the step before drew.

    A runner may have `prepare() -> bool`. It is called while the engine has nothing to do, for
    milliseconds of what makes later steps cheaper, and again until it says False.

    A runner may have `measure_memory(num_replicas) -> DeviceMemory`, called once before `allocate`. It runs
    the largest step and says what its device has left for the KV pool of one of so many replicas.
    """

    def kv_groups(self) -> Sequence[KVGroupSpec]: ...

    def memory(self) -> MemoryReport: ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV pool: `num_blocks` blocks in every layer of every group. Once, before execute."""
        ...

    def warm_up(self, report: Any) -> None:
        """Compile and run every kernel once. `report(fraction)` is told how far it is, 0 to 1."""
        ...

    def execute(self, batch: ForwardBatch) -> StepHandle:
        """Launch the forward of one step."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in every layer, in order."""
        ...

    def read_rows(self, layer: int, slots: Sequence[int]) -> tuple[Any, Any]:
        """Return keys and values [n, num_kv_heads, head_dim] f32 of these slots."""
        ...

    def write_rows(self, layer: int, slots: Sequence[int], keys: Any, values: Any) -> None:
        """Write keys and values [n, num_kv_heads, head_dim] into these slots."""
        ...

    def close(self) -> None:
        """Free everything. The runner cannot be used afterwards; a second close does nothing."""
        ...


class BesideRunner(Runner, Protocol):
    """A Runner that can compute small steps beside its caller, where it finds that worth it."""

    def runs_beside(self, num_tokens: int, num_kv_rows: int) -> bool:
        """Whether a step of so many tokens and rows of keys is better launched with `execute_beside` now.

        The engine then plans ahead, as for a runner with `runs_ahead`, while such steps follow each other.
        """
        ...

    def execute_beside(self, batch: ForwardBatch) -> StepHandle:
        """Launch forward and draw of a step and return; `sample` must not be called.

        Steps run in the order of their launch; `execute` waits for those in flight.
        """
        ...


class RepeatingRunner(Runner, Protocol):
    """A Runner that can run equal steps of decodes as one, because its time is virtual.

    It says so with `can_repeat`; the engine then asks where its caller gave a time to run until.
    """

    @property
    def can_repeat(self) -> bool: ...

    def repeat(self, batch: RunBatch, max_steps: int, until: float) -> RunResult:
        """Run `batch` and up to max_steps - 1 more steps that feed each draw back.

        The first step begins in any case, a further one only while the clock is before `until`. More
        than one is asked for only of steps of decodes, all of which draw.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What distinguishes one attention layer from another, beyond its KV group."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


class Ops(Protocol):
    """The operations a forward is made of. `x` is an activation [T, n] of the backend's own type.

    A forward is a straight line: the same calls in the same order for every batch. Everything that
    depends on the batch is in the opaque step that `plan_step` returned. "in place" names what an
    operation may overwrite; the caller uses only the returned value afterwards.
    """

    # --- once, at load ----------------------------------------------------------

    def hold(self, parts: Sequence[WeightPart], bias: NDArray[np.float32] | None = None) -> Any:
        """Return the backend's own form of a linear weight: `parts` [out_i, in] stacked along out.

        Parts may have different schemes. A large tensor comes as several, and an item is made when
        it is asked for (expanded from its blocks): take them in order, each once, and keep none, so
        that only one of them is in memory. The backend may keep several representations and choose
        by the number of rows. `bias` [sum of out_i] is added by `linear`.
        """
        ...

    def hold_vector(self, values: NDArray[np.float32]) -> Any:
        """Return the backend's own form of a vector [n], such as a norm's weight."""
        ...

    def rope_table(
        self, inverse_frequencies: NDArray[np.float64], scale: float, max_positions: int
    ) -> Any:
        """Return cos and sin (times `scale`) for positions 0 .. max_positions - 1.

        `inverse_frequencies` is [rotary_dim / 2]; the rotation pairs element i with i + rotary_dim / 2.
        Source: RoFormer (arXiv 2104.09864), in the half-split layout.
        """
        ...

    # --- once per step ----------------------------------------------------------

    def plan_step(self, batch: ForwardBatch) -> Any:
        """Upload the batch and plan attention (work split, masks) for every KV group, on the host.

        Where `token_sources` names a sample row, the token is the one that the last `sample` drew there.
        """
        ...

    # --- the forward ------------------------------------------------------------

    def embed(self, weight: Any, step: Any, scale: float = 1.0) -> Any:
        """Return rows of `weight` for the step's token ids, times `scale`: [T, hidden]."""
        ...

    def linear(self, x: Any, weight: Any) -> Any:
        """Return x @ weight.T (+ bias): [T, out]."""
        ...

    def rms_norm(self, x: Any, weight: Any, eps: float, num_groups: int = 1) -> Any:
        """Return x / rms(x) * weight over the last axis (RMSNorm, arXiv 1910.07467).

        With num_groups = h, x [T, h * d] is normalized per run of d elements (query/key norm).
        """
        ...

    def add_rms_norm(self, x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any]:
        """Return (rms_norm(x + residual) * weight, x + residual), in place of both."""
        ...

    def add(self, x: Any, residual: Any) -> Any:
        """Return x + residual, in place of residual."""
        ...

    def split(self, x: Any, sizes: Sequence[int]) -> Sequence[Any]:
        """Return views of x's columns, `sizes` wide each."""
        ...

    def rope_write_kv(self, q: Any, k: Any, v: Any, table: Any, layer: int, step: Any) -> Any:
        """Rotate q and k by the step's positions, write k and v into layer's slots; return q rotated."""
        ...

    def paged_attention(self, q: Any, layer: int, spec: AttentionSpec, step: Any) -> Any:
        """Return softmax(scale * q k + bias) v over each sequence's visible rows: [T, heads * head_dim].

        Causal by row order: the i-th of a sequence's n queries sees kv_len - n + i + 1 rows, and with
        a window only the last `sliding_window` of them. `softcap` c maps scores s to c * tanh(s / c).
        Where the layer has a bias plane, its value for (row, kv head) is added to the score; -inf
        hides the row, and a query that sees no row gives zeros. Table entries past kv_len are not read.
        """
        ...

    def silu_mul(self, x: Any) -> Any:
        """x [T, 2n] -> silu(x[:, :n]) * x[:, n:]."""
        ...

    def gelu_mul(self, x: Any) -> Any:
        """x [T, 2n] -> gelu_tanh(x[:, :n]) * x[:, n:]."""
        ...

    def take_rows(self, x: Any, step: Any) -> Any:
        """Return the step's sample rows of x: [R, n]."""
        ...

    def soft_cap(self, x: Any, cap: float) -> Any:
        """Return cap * tanh(x / cap), in place."""
        ...

    def sample(self, logits: Any, sampling: SamplingBatch, masks: TokenMasks | None) -> StepResult:
        """Draw one token per row of logits [R, vocab] by the rule of ARCHITECTURE's sampling.

        The token is the argmax of (filtered logits / temperature + Gumbel noise), the noise counter-based
        (Philox4x32-10) in (seed, position, token). Ties go to the lower token id.
        """
        ...

    def synchronize(self) -> None:
        """Wait until everything launched has finished."""
        ...

    # --- KV storage: the tensors are the Ops' own, the Runner forwards to these -----

    def kv_bytes_per_block(self, groups: Sequence[KVGroupSpec], block_size: int) -> int:
        """Return what one block takes in all layers of all groups, in bytes."""
        ...

    def allocate_kv(self, groups: Sequence[KVGroupSpec], num_blocks: int, block_size: int) -> None:
        """Allocate the KV pool: `num_blocks` blocks in every layer of every group. Once, before plan_step.

        Pages that were never written need not be resident.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in every layer, one pair after the other."""
        ...

    def read_rows(
        self, layer: int, slots: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return keys and values [n, num_kv_heads, head_dim] of these slots, as new arrays."""
        ...

    def write_rows(
        self,
        layer: int,
        slots: Sequence[int],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        """Write keys and values [n, num_kv_heads, head_dim] into these slots, rounded to the KV dtype."""
        ...

    def weight_bytes(self) -> int:
        """Return what all weights held so far take, in bytes; mapped file pages count too."""
        ...

    def available_bytes(self) -> int:
        """Return what the device's memory could still give, in bytes, beside what is held already."""
        ...
