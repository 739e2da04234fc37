"""The interpreter: every thread walks the same program, chunks of each operation go to whoever asks first.

A counter per operation hands out chunks; a barrier stands after an operation whose result the next one reads.
The barrier's count only grows, so that a thread that sees it late never waits for a reset.
"""

from __future__ import annotations

import numpy as np

from headrace.backends.cpu.fast import layout as at
from headrace.backends.cpu.fast.compiled import fast_kernel, inlined_kernel
from headrace.backends.cpu.fast.intrinsics import LANES
from headrace.backends.cpu.fast.intrinsics_threads import (
    atomic_add,
    atomic_load,
    call_at,
    now_nanoseconds,
    own_nanoseconds,
    pause,
    wake_all,
    yield_core,
)
from headrace.backends.cpu.fast.kernels_attend import NUM_ARGUMENTS
from headrace.backends.cpu.fast.kernels_attend_codes import write_codes
from headrace.backends.cpu.fast.kernels_attend_lists import block_at, block_size_of, layer_of
from headrace.backends.cpu.fast.kernels_attend_pairs import write_pairs
from headrace.backends.cpu.fast.kernels_attend_rows import PAIRS, fetch_run
from headrace.backends.cpu.fast.kernels_coding import CODES, GROUP, ROWS_TOGETHER, coded_row
from headrace.backends.cpu.fast.kernels_hadamard import hadamard_row
from headrace.backends.cpu.fast.kernels_matmul import (
    ARGUMENT_BYTES,
    chunk_of,
    fetch_first_tiles,
    num_shares,
    run_linear,
    share_begin,
)
from headrace.backends.cpu.fast.kernels_pick import run_picked
from headrace.backends.cpu.fast.kernels_quantize import quantize_row
from headrace.backends.cpu.fast.kernels_rowwise import (
    add_rows,
    cap_row,
    copy_scaled,
    embed_row,
    gelu_row,
    norm_row,
    observe_row,
    rotate_row,
    silu_row,
)
from headrace.backends.cpu.fast.kernels_tiles import TILE_BYTES
from headrace.backends.cpu.kernels_rows import floats, ints, longs
from headrace.backends.cpu.kernels_vector import float_of_bits

SPINS = 2000
"""Pauses before a waiting thread gives way: on a busy machine a longer spin starves who it waits for."""
CONTROL_WORD = 8


@fast_kernel
def barrier(control, target, tid):  # type: ignore[no-untyped-def]
    """Arrive, and return when `target` arrivals have been counted."""
    arrived = control + at.ARRIVED * CONTROL_WORD
    atomic_add(arrived, 1)
    spins = 0
    while atomic_load(arrived) < target:
        pause()
        spins += 1
        if spins > SPINS:
            started = now_nanoseconds()
            while atomic_load(arrived) < target:
                yield_core()
            waits = longs(control + (at.LONG_WAITS + tid * at.LINE_WORDS) * CONTROL_WORD, 1)
            waits[0] += now_nanoseconds() - started
            return


@fast_kernel
def slots_of(op, parameters):  # type: ignore[no-untyped-def]
    """The slots of an operation's KV group, i8 [tokens]."""
    tokens = parameters[at.NUM_TOKENS]
    return longs(parameters[at.SLOTS] + op[at.GROUP_INDEX] * tokens * 8, tokens)


@fast_kernel
def next_block(slots, row):  # type: ignore[no-untyped-def]
    """The first row from `row` on that opens a block of keys; two threads in one would write the same lines."""
    while 0 < row < len(slots) and slots[row] % LANES != 0 and slots[row] == slots[row - 1] + 1:
        row += 1
    return row


@fast_kernel
def block_of_row(op, parameters, row, head):  # type: ignore[no-untyped-def]
    """Where the keys and the values of the block are that has row `row`."""
    slot, block_size = slots_of(op, parameters)[row], parameters[at.BLOCK_SIZE]
    block_bytes = block_size_of(op[at.SIZE], parameters[at.KV_FORM])
    shape = (block_size // LANES, block_bytes)
    part = slot % block_size // LANES
    keys = block_at(layer_of(op, parameters), head, slot // block_size, part, shape)
    return keys, keys + block_bytes


@fast_kernel
def fetch_blocks(op, parameters, row, rows):  # type: ignore[no-untyped-def]
    """Ask for the blocks that row `row` is written in, which a decode finds in memory."""
    slots = slots_of(op, parameters)
    if row >= rows or (slots[row] % LANES != 0 and row > 0 and slots[row] == slots[row - 1] + 1):
        return
    for head in range(op[at.KV_COUNT]):
        keys, values = block_of_row(op, parameters, row, head)
        fetch_run(keys, 2 * (values - keys))


@fast_kernel
def run_rope_row(op, parameters, row, q, k, v):  # type: ignore[no-untyped-def]
    """Rotate row `row` of q and k in place, transform both for keys of 8 bits, and write keys and values."""
    heads, kv_heads, head_dim, half = op[at.COUNT], op[at.KV_COUNT], op[at.SIZE], op[at.FORM]
    position = np.int64(ints(parameters[at.POSITIONS], row + 1)[row])
    cosines = floats(op[at.POINTER] + position * half * 4, half)
    sines = floats(op[at.SECOND_POINTER] + position * half * 4, half)
    rotate_row(q, cosines, sines, half, heads, head_dim)
    rotate_row(k, cosines, sines, half, kv_heads, head_dim)
    if parameters[at.KV_FORM] != PAIRS:
        hadamard_row(q, heads * head_dim, head_dim)
        hadamard_row(k, kv_heads * head_dim, head_dim)
    lane = slots_of(op, parameters)[row] % LANES
    for head in range(kv_heads):
        keys, values = block_of_row(op, parameters, row, head)
        offset = head * head_dim * 4
        if parameters[at.KV_FORM] == PAIRS:
            write_pairs(keys, values, k + offset, v + offset, head_dim, lane)
        else:
            write_codes(keys, values, k + offset, v + offset, head_dim, lane)


@fast_kernel
def take_unit(total, shares, tid, counter):  # type: ignore[no-untyped-def]
    """A unit of attention that nobody has taken, of the thread's own share first; -1: there is none."""
    for number in range(shares):
        share = (tid + number) % shares
        unit = total * share // shares + atomic_add(counter + share * 8, 1)
        if unit < total * (share + 1) // shares:
            return unit
    return -1


@inlined_kernel
def run_attention(addresses, threads, tid, counter, q, out, scratch, call):  # type: ignore[no-untyped-def]
    """The next unit is taken early, so that its first keys and values come meanwhile.

    addresses: of the operation and the parameters; call: the function, and where its arguments go.
    """
    op, parameters = longs(addresses[0], at.NUM_FIELDS), longs(addresses[1], at.NUM_PARAMETERS)
    kv_heads, group = op[at.KV_COUNT], op[at.GROUP_INDEX]
    starts = longs(parameters[at.ITEM_STARTS] + group * 8, 2)
    items_at = parameters[at.ITEMS] + starts[0] * at.ITEM_FIELDS * 8
    total = (starts[1] - starts[0]) * kv_heads
    shares = num_shares(total, threads, kv_heads)
    function, arguments_at = call
    a = longs(arguments_at, NUM_ARGUMENTS)
    a[0], a[1], a[2], a[3], a[4], a[5] = addresses[0], addresses[1], items_at, q, out, scratch
    mine = take_unit(total, shares, tid, counter)
    if mine >= 0:
        call_at(function, arguments_at, -1, mine)
    while mine >= 0:
        following = take_unit(total, shares, tid, counter)
        call_at(function, arguments_at, mine, following)
        mine = following


@fast_kernel
def token_of(parameters, row):  # type: ignore[no-untyped-def]
    """The token of a row: what the step before drew, where the row names one of its draws."""
    source = ints(parameters[at.SOURCES], row + 1)[row]
    if source >= 0:
        return np.int64(ints(parameters[at.DRAWN], source + 1)[source])
    return np.int64(ints(parameters[at.TOKEN_IDS], row + 1)[row])


@fast_kernel
def run_row(op, parameters, row, x, aux, out, scratch):  # type: ignore[no-untyped-def]
    """One row of an operation that works row by row. Returns where its f32 result is."""
    code, size = op[at.CODE], op[at.SIZE]
    number = float_of_bits(np.int32(op[at.NUMBER]))
    target = out if op[at.OUT] >= 0 else scratch
    if code == at.EMBED:
        token = token_of(parameters, row)
        embed_row(op[at.POINTER], op[at.FORM], TILE_BYTES[op[at.FORM]], token, size, number, target)
    elif code == at.NORM:
        if op[at.AUX] >= 0:
            add_rows(x, aux, size)
            x = aux
        count = op[at.COUNT]
        norm_row(x, op[at.POINTER], number, size // count, count, target)
    elif code == at.SILU:
        silu_row(x, x + 4 * size, target, size)
    elif code == at.GELU:
        gelu_row(x, x + 4 * size, target, size)
    elif code == at.QUANTIZE:
        target = x
    elif code == at.ADD:
        add_rows(x, aux, size)
    elif code == at.SOFT_CAP:
        cap_row(x, number, size)
    return target


@inlined_kernel
def run_one(op, parameters, row, end, places, scratch):  # type: ignore[no-untyped-def]
    x, aux, out, quantized = places
    source = x + row * op[at.IN_STRIDE]
    target = out + row * op[at.OUT_STRIDE]
    beside = aux + row * op[at.AUX_STRIDE]
    if op[at.CODE] == at.ROPE:
        fetch_blocks(op, parameters, row + 2, end)
        run_rope_row(op, parameters, row, source, beside, target)
        return
    if op[at.CODE] == at.TAKE:
        token = np.int64(ints(parameters[at.SAMPLE_ROWS], row + 1)[row])
        source = x + token * op[at.IN_STRIDE]
        if op[at.OUT] >= 0:
            copy_scaled(source, np.float32(1.0), target, op[at.SIZE])
        result = source
    else:
        result = run_row(op, parameters, row, source, beside, target, scratch)
    if op[at.QUANTIZED] >= 0:
        groups = op[at.SIZE] // GROUP
        target = coded_row(quantized, row, op[at.QUANTIZED_STRIDE], op[at.CODING])
        quantize_row(result, groups, op[at.CODING], op[at.PLAN], target)
        if parameters[at.OBSERVES] != 0 and op[at.CODING] == CODES:
            observe_row(result, op[at.SIZE], op[at.LOUDNESS])


@inlined_kernel
def run_rows(op, parameters, rows, threads, tid, counter, places, scratch):  # type: ignore[no-untyped-def]
    chunk = chunk_of(rows, threads, 16)
    chunk = max(chunk, 4) if op[at.CODE] == at.ROPE else chunk
    shares = num_shares(rows, threads, ROWS_TOGETHER)
    for number in range(shares):
        share = (tid + number) % shares
        begin, stop = share_begin(rows, shares, share), share_begin(rows, shares, share + 1)
        while True:
            first = begin + atomic_add(counter + share * 8, chunk)
            if first >= stop:
                break
            end = min(stop, first + chunk)
            if op[at.CODE] == at.ROPE:
                slots = slots_of(op, parameters)
                first, end = next_block(slots, first), next_block(slots, end)
                fetch_blocks(op, parameters, first, end)
                fetch_blocks(op, parameters, first + 1, end)
            for row in range(first, end):
                run_one(op, parameters, row, end, places, scratch)


@fast_kernel
def rows_of(op, parameters):  # type: ignore[no-untyped-def]
    """How many rows an operation has in this step."""
    return parameters[at.NUM_SAMPLES if op[at.DOMAIN] == at.SAMPLES else at.NUM_TOKENS]


@fast_kernel
def place_of(buffers, number, offset):  # type: ignore[no-untyped-def]
    return buffers[number] + offset if number >= 0 else 0


@fast_kernel
def wait_to_join(parameters_at, control):  # type: ignore[no-untyped-def]
    """Ask a worker that computes alone to share the rest; return whether it will: else the step is done."""
    wish, done = parameters_at + at.JOIN * 8, control + at.DONE * CONTROL_WORD
    number = atomic_load(parameters_at + at.STEP_NUMBER * 8)
    atomic_add(wish, 1)
    spins = 0
    while atomic_load(wish) < 2:
        if atomic_load(done) > number:
            return False
        spins += 1
        if spins > SPINS:
            yield_core()
        else:
            pause()
    return True


@fast_kernel
def let_join(parameters_at, control, index):  # type: ignore[no-untyped-def]
    """Share what comes from operation `index` on with a thread that asked; return how many there are then."""
    wish = parameters_at + at.JOIN * 8
    if atomic_load(wish) != 1:
        return 1
    parameters = longs(parameters_at, at.NUM_PARAMETERS)
    parameters[at.JOINED_AT] = index
    parameters[at.JOINED_BASE] = atomic_load(control + at.ARRIVED * CONTROL_WORD)
    atomic_add(wish, 1)
    return 2


@inlined_kernel
def run_program(tid, parameters_at, control, joins):  # type: ignore[no-untyped-def]
    """Walk the program as thread `tid`; with `joins`, what a worker has not begun yet.

    Return the arrivals that a next barrier has to wait for where one thread has joined another, else 0.
    """
    parameters = longs(parameters_at, at.NUM_PARAMETERS)
    threads, count = parameters[at.NUM_THREADS], parameters[at.NUM_OPERATIONS]
    target, index = parameters[at.BARRIER_BASE], 0
    if joins:
        if not wait_to_join(parameters_at, control):
            return 0
        threads, target, index = 2, parameters[at.JOINED_BASE], parameters[at.JOINED_AT]
    has_joined = joins
    buffers = longs(parameters[at.BUFFERS], 1 << 10)
    scratch = parameters[at.SCRATCH] + tid * parameters[at.SCRATCH_BYTES]
    arguments_at = scratch + parameters[at.SCRATCH_BYTES] - ARGUMENT_BYTES
    call = parameters[at.UNIT], arguments_at
    profile = parameters[at.PROFILE]
    while index < count:
        started = own_nanoseconds() if profile != 0 else 0
        op_at = parameters[at.PROGRAM] + index * at.NUM_FIELDS * 8
        op = longs(op_at, at.NUM_FIELDS)
        rows = rows_of(op, parameters)
        counter = parameters[at.COUNTERS] + index * at.LINE_WORDS * 8
        x = place_of(buffers, op[at.IN], op[at.IN_OFFSET])
        aux = place_of(buffers, op[at.AUX], op[at.AUX_OFFSET])
        out = place_of(buffers, op[at.OUT], op[at.OUT_OFFSET])
        if op[at.CODE] == at.LINEAR:
            quantized = place_of(buffers, op[at.QUANTIZED], 0)
            is_picked = op[at.GATE] == at.PICK and parameters[at.PICKED] != 0
            found = (x, out, quantized, scratch, aux if is_picked else np.int64(0))
            observes = parameters[at.OBSERVES] != 0
            run_linear(op, rows, threads, tid, counter, found, observes, call, op_at)
        elif op[at.CODE] == at.ATTEND:
            attends = parameters[at.ATTEND_UNIT], arguments_at
            run_attention((op_at, parameters_at), threads, tid, counter, x, out, scratch, attends)
        elif op[at.CODE] == at.ROUGH or op[at.CODE] == at.PICK:
            if parameters[at.PICKED] != 0:
                run_picked(op, parameters, index, rows, counter, (x, aux, out, scratch), call)
        else:
            quantized = place_of(buffers, op[at.QUANTIZED], 0)
            places = (x, aux, out, quantized)
            run_rows(op, parameters, rows, threads, tid, counter, places, scratch)
        if op[at.NEXT] > 0:
            following = longs(
                parameters[at.PROGRAM] + op[at.NEXT] * at.NUM_FIELDS * 8, at.NUM_FIELDS
            )
            fetch_first_tiles(following, rows_of(following, parameters), threads, tid)
        finished = own_nanoseconds() if profile != 0 else 0
        if op[at.BARRIER] != 0 and threads > 1:
            target += threads
            barrier(control, target, tid)
        if profile != 0:
            spent = longs(profile + (tid * count + index) * 16, 2)
            spent[0] += finished - started
            spent[1] += own_nanoseconds() - finished
        index += 1
        if threads == 1 and let_join(parameters_at, control, index) > 1:
            threads, target, has_joined = 2, parameters[at.JOINED_BASE], True
    return target + 2 if has_joined else 0


@fast_kernel
def wait_for_turn(tid, parameters_at, control):  # type: ignore[no-untyped-def]
    """Return once the step before is drawn: whether `tid` is the first of this one's threads."""
    parameters = longs(parameters_at, at.NUM_PARAMETERS)
    number = parameters[at.STEP_NUMBER]
    done = control + at.DONE * CONTROL_WORD
    spins = 0
    while atomic_load(done) < number:
        spins += 1
        if spins > SPINS:
            yield_core()
        else:
            pause()
    return tid == parameters[at.FIRST_THREAD]


@fast_kernel
def draw_and_tell(tid, is_first, parameters_at, control, target):  # type: ignore[no-untyped-def]
    """Draw a computed step, with its first thread or with both where one has joined (`target`, see
    run_program), and say that it is done.

    Behind the last barrier only the first thread may look at `parameters`, and thread 0, which describes steps:
    another one may be described there.
    """
    parameters = longs(parameters_at, at.NUM_PARAMETERS)
    is_shared = target > 0 and parameters[at.NUM_SAMPLES] > 1
    if (is_first or is_shared) and parameters[at.DRAW] != 0:
        share, shares = (tid, 2) if is_shared else (0, 1)
        call_at(parameters[at.DRAW], share, shares, parameters[at.DRAW_ARGUMENTS])
        if is_shared:
            barrier(control, target, tid)
    if is_first:
        done = control + at.DONE * CONTROL_WORD
        atomic_add(done, 1)
        if atomic_load(control + at.WAITING * CONTROL_WORD) > 0:
            wake_all(done)
