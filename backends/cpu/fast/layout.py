"""Where things lie in the int64 arrays that the interpreter reads: the step's parameters and an operation.

Plain numbers, since Numba freezes them into the code; recorder, runner and kernels share this page.
"""

from __future__ import annotations

# --- a step's parameters ----------------------------------------------------------
(
    NUM_TOKENS,
    NUM_SAMPLES,
    NUM_THREADS,
    NUM_OPERATIONS,
    PROGRAM,
    BUFFERS,
    COUNTERS,
    BARRIER_BASE,
    TOKEN_IDS,
    POSITIONS,
    SAMPLE_ROWS,
    QUERY_STARTS,
    NUM_SEQUENCES,
    SLOTS,
    KV_LENS,
    TABLES,
    TABLE_WIDTH,
    BLOCK_SIZE,
    LAYERS,
    ITEMS,
    ITEM_STARTS,
    SCRATCH,
    SCRATCH_BYTES,
    PROFILE,
    KV_FORM,
    PARTIALS,
    ARRIVALS,
    STEP_NUMBER,
    FIRST_THREAD,
    SOURCES,
    DRAWN,
    DRAW,
    DRAW_ARGUMENTS,
    OBSERVES,
    JOIN,
    JOINED_AT,
    JOINED_BASE,
    PICKED,
    PICKED_FAILED,
    UNIT,
    ATTEND_UNIT,
) = range(41)
NUM_PARAMETERS = 64
"""STEP_NUMBER: which command this step is, -1 while it is described. NUM_THREADS threads from FIRST_THREAD on
compute it. SOURCES i32 [T]: the row of DRAWN that a token comes from, or -1. DRAW: the function that the first
of its threads calls with 0, 1 and DRAW_ARGUMENTS once the logits are there, or each of two with 0 or 1, 2 and
those where one has joined; 0: the caller draws. OBSERVES: not 0 where one thread computes and the largest
inputs of products are noted at LOUDNESS. JOIN: 0; 1 once thread 0 wants to take part in a step that a worker
computes alone; 2 when it may, from operation JOINED_AT on, with barriers that count from JOINED_BASE. PICKED
i32 and PICKED_FAILED bool [R]: where best tokens go, and which rows have none, if nothing else is wanted; then
there are no logits; 0: there are. UNIT and ATTEND_UNIT: the functions that compute a unit of a product and of
attention (see kernels_unit, kernels_attend_unit)."""

# --- a layer's row in the pool's table: see kv_pool -------------------------------
LAYER_FIELDS = 3
"""Where its first block is, bytes from one span of blocks to the next, log2 of the blocks in a span."""

# --- an item of attention: some queries of a sequence and a run of segments of its rows ----
(
    SEQUENCE,
    FIRST_QUERY,
    NUM_QUERIES,
    FIRST_SEGMENT,
    END_SEGMENT,
    SHARERS,
    LOWEST_SEGMENT,
    NUM_STRETCHES,
    PARTIAL,
    ARRIVAL,
) = range(10)
ITEM_FIELDS = 10
"""SHARERS items have the same queries; together they have NUM_STRETCHES from the one of
LOWEST_SEGMENT on. PARTIAL is where
their sums lie, in bytes, and ARRIVAL the line that counts who is done, both for KV head 0."""

# --- words that threads share, a cache line each ----------------------------------
COMMAND, PARKED, STOP, ARRIVED, DONE, WAITING, QUEUE = range(0, 56, 8)
"""COMMAND counts the steps posted, DONE those computed and drawn; QUEUE says where the last two are described.
PARKED workers sleep until there is a command, WAITING callers until a step is done."""
LONG_WAITS, CORE = 56, 57
"""One line per thread: nanoseconds in barriers after the spin; 1 more than the core of its last step."""
LINE_WORDS = 8

# --- an operation -----------------------------------------------------------------
(
    CODE,
    DOMAIN,
    BARRIER,
    IN,
    IN_OFFSET,
    IN_STRIDE,
    AUX,
    AUX_OFFSET,
    AUX_STRIDE,
    OUT,
    OUT_OFFSET,
    OUT_STRIDE,
    QUANTIZED,
    QUANTIZED_STRIDE,
    SIZE,
    COUNT,
    KV_COUNT,
    FORM,
    POINTER,
    SECOND_POINTER,
    LAYER,
    GROUP_INDEX,
    NUMBER,
    SECOND_NUMBER,
    CODING,
    PLAN,
    LOUDNESS,
    NEXT,
    GATE,
    GATE_PLAN,
) = range(30)
NUM_FIELDS = 30
"""IN, AUX, OUT and QUANTIZED are buffer numbers, -1: none. NUMBER holds the bits of an f32.
CODING is that of QUANTIZED. PLAN: how its groups, or of what a product reads, are coded (see coding_plan).
NEXT: the product after this one, or after this attention; 0: none. GATE: SILU or GELU behind a product at once,
whose codes are made as GATE_PLAN says; PICK: where PICKED, the product is of rough codes, QUANTIZED, which
GATE_PLAN says, and the largest of each tile goes to AUX (see kernels_pick); 0: none."""

TOKENS, SAMPLES = 0, 1
"""DOMAIN: how many rows an operation has."""

(
    EMBED, NORM, SILU, GELU, LINEAR, QUANTIZE, ROPE, ATTEND, TAKE, ADD, SOFT_CAP, ROUGH, PICK,
) = range(13)  # fmt: skip
"""CODE."""
CODE_NAMES = (
    "embed", "norm", "silu", "gelu", "linear", "quantize", "rope", "attention", "take", "add", "soft_cap",
    "rough", "pick",
)  # fmt: skip
