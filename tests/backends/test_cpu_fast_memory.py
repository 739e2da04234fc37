"""The KV pool's pages exist before steps write them, a bounded way ahead, and keep what is in them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.backends.cpu.fast import kv_pool
from headrace.backends.cpu.fast import pages as pages_module
from headrace.backends.cpu.fast.arena import address, make_resident, map_pages
from headrace.backends.cpu.fast.kv_pool import FORMS, FastKVPool
from headrace.backends.cpu.fast.pages import PagePreparer
from headrace.types import KVGroupSpec

MIB = 1 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for pages")


def resident_bytes(start: int, size: int) -> int:
    """Return how much of a range of addresses exists, by /proc/self/smaps."""
    found, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(each, 16) for each in first.split("-"))
            is_inside = low < start + size and start < high
        elif is_inside and first == "Rss:":
            found += 1024 * int(line.split()[1])
    return found


def test_pages_exist_once_asked_for_and_hold_what_they_held() -> None:
    pages = map_pages(16 * MIB)
    pages[5 * MIB] = 7
    before = resident_bytes(address(pages), pages.nbytes)
    assert make_resident(pages[3 * MIB : 9 * MIB])
    after = resident_bytes(address(pages), pages.nbytes)
    assert before <= 2 * MIB
    assert 6 * MIB <= after <= 12 * MIB
    assert pages[5 * MIB] == 7 and np.count_nonzero(pages) == 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[FastKVPool]:
    monkeypatch.setattr(kv_pool, "AHEAD_BYTES", 16 * MIB)
    group = KVGroupSpec(name="all", layers=tuple(range(16)), num_kv_heads=4, head_dim=64)
    yield FastKVPool([group], 512, 16, FORMS["bfloat16"])


def prepared(pool: FastKVPool) -> int:
    """Prepare until nothing is left; return how many pieces that took."""
    pieces = 0
    while pool.prepare():
        pieces += 1
    return pieces


def test_a_pool_is_prepared_a_bounded_way_beyond_its_highest_block(pool: FastKVPool) -> None:
    first = prepared(pool)
    assert 8 <= first <= 13  # pieces of 2 MiB: 16 MiB, and the span of block 0
    assert not pool.prepare()
    pool.note_use(5)
    assert prepared(pool) == 0, "the same span"
    pool.note_use(300)
    assert prepared(pool) > first
    pool.note_use(511)
    prepared(pool)
    assert not pool.prepare(), "the end of the pool is the end"


def test_what_a_trial_used_is_forgotten(pool: FastKVPool) -> None:
    pool.note_use(511)
    pool.forget_use()
    assert prepared(pool) <= 13


def test_rows_written_stay_when_their_pages_are_asked_for(pool: FastKVPool) -> None:
    rows = np.arange(4 * 64, dtype=np.float32).reshape(1, 4, 64)
    pool.write_rows(3, [17], rows, -rows)
    prepared(pool)
    keys, values = pool.read_rows(3, [17])
    assert np.array_equal(keys, rows) and np.array_equal(values, -rows)


def test_a_system_without_the_request_is_asked_once(
    pool: FastKVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pool, "make_resident", lambda piece: False)
    assert prepared(pool) == 1


def test_pages_are_prepared_beside_the_engine_and_only_while_they_may_be() -> None:
    calls: list[int] = []
    going, step = threading.Event(), threading.Semaphore(0)

    def prepare() -> bool:
        calls.append(len(calls))
        going.set()
        step.acquire()
        return len(calls) < 4

    pages = PagePreparer(prepare)
    pages.pause()
    pages.allow()
    assert going.wait(30)
    pages.pause()
    step.release()
    time.sleep(0.05)
    assert len(calls) == 1, "paused behind the first piece"
    pages.allow()
    for _ in range(8):
        step.release()
    end = time.monotonic() + 30
    while len(calls) < 4 and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(calls) == 4, "until nothing is left"
    pages.close()
    pages.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-pages"]


def test_who_comes_right_behind_another_one_is_not_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages_module, "GRACE_SECONDS", 30.0)
    calls: list[int] = []
    called = threading.Event()

    def prepare() -> bool:
        calls.append(1)
        called.set()
        return False

    pages = PagePreparer(prepare)
    for _ in range(3):
        pages.allow()
        pages.pause()
    assert not calls
    pages.allow(at_once=True)
    assert called.wait(10)
    pages.allow()  # within its grace again
    pages.close()
    assert len(calls) == 1


def test_what_is_ahead_is_made_up_once_half_of_it_is_used(pool: FastKVPool) -> None:
    prepared(pool)  # 16 MiB
    per_span = pool._groups[0][0].nbytes
    blocks = pool._groups[0].shape[3]
    pool.note_use(blocks)  # of the next span
    assert per_span <= 8 * MIB and prepared(pool) == 0
    pool.note_use(blocks * (9 * MIB // per_span + 1))
    assert prepared(pool) >= 4


def test_closing_ends_a_thread_that_just_found_nothing_left() -> None:
    inside, go = threading.Event(), threading.Event()

    def prepare() -> bool:
        inside.set()
        go.wait()
        return False

    pages = PagePreparer(prepare)
    pages.allow()
    assert inside.wait(30)
    closer = threading.Thread(target=pages.close, daemon=True)
    closer.start()
    time.sleep(0.05)  # the call to end came; what the thread clears now is that call
    go.set()
    closer.join(30)
    assert not closer.is_alive()


def test_a_system_without_another_thread_prepares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    pages = PagePreparer(lambda: True)
    pages.allow()
    pages.allow()
    pages.pause()
    pages.close()


def test_a_failure_to_prepare_ends_that_alone() -> None:
    def prepare() -> bool:
        raise OSError("no")

    pages = PagePreparer(prepare)
    pages.allow()
    pages.allow()
    pages.close()
