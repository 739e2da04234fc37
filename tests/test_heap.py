"""What a process that lives long does about its memory."""

from __future__ import annotations

import gc

from headrace.heap import keep_what_is_loaded


def test_what_is_loaded_is_not_walked_again_and_cycles_are_still_found() -> None:
    thresholds, before = gc.get_threshold(), gc.get_freeze_count()
    try:
        keep_what_is_loaded()
        assert gc.get_freeze_count() > before
        assert gc.get_threshold()[0] > thresholds[0]
        assert gc.isenabled()
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
