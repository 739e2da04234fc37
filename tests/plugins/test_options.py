"""Options as an author declares them: what their defaults may be, and what they may raise."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.errors import PluginError
from headrace.plugins.options import build_options
from headrace.types.units import Seconds


def unreadable() -> dict[str, float]:
    raise KeyError("missing")


def test_options_that_fail_are_refused_in_words() -> None:
    class Broken:
        name = "broken"

        @dataclasses.dataclass
        class Options:
            weights: dict[str, float] = dataclasses.field(default_factory=unreadable)

    with pytest.raises(PluginError, match="'broken': options refused: KeyError: 'missing'"):
        build_options(Broken, {})


def test_a_default_may_be_written_as_yaml_writes_it() -> None:
    class Patient:
        name = "patient"

        @dataclasses.dataclass
        class Options:
            patience: Seconds = "5s"  # type: ignore[assignment]
            label: str = "5s"

    built: Any = build_options(Patient, {})
    assert (built.patience, built.label) == (5.0, "5s")


def test_a_default_that_cannot_be_read_is_told_before_a_request_meets_it() -> None:
    class Vague:
        name = "vague"

        @dataclasses.dataclass
        class Options:
            patience: Seconds = "soon"  # type: ignore[assignment]

    with pytest.raises(PluginError, match="option patience must be a duration"):
        build_options(Vague, {})
    assert build_options(Vague, {"patience": "1m"}) == Vague.Options(60.0)
