from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.text.stop_matcher import StopMatcher

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)
CHUNKS = st.lists(st.text("ab\n", max_size=6), max_size=12)


def run(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    """Return all text released, and the stop string found."""
    matcher = StopMatcher(stops)
    text = "".join(matcher.append(chunk) for chunk in chunks)
    if matcher.matched is None:
        text += matcher.flush()
    return text, matcher.matched


def first_match(stops: list[str], text: str) -> tuple[str, str | None]:
    """The rule by brute force: the earliest end; of several, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(STOPS, CHUNKS)
def test_equals_brute_force_however_the_text_is_cut(stops: list[str], chunks: list[str]) -> None:
    assert run(stops, chunks) == first_match(stops, "".join(chunks))


@given(STOPS, CHUNKS)
def test_what_is_held_is_the_longest_tail_that_could_begin_a_stop(
    stops: list[str], chunks: list[str]
) -> None:
    matcher = StopMatcher(stops)
    seen = released = ""
    for chunk in chunks:
        seen += chunk
        released += matcher.append(chunk)
        if matcher.matched is not None:
            return
        tails = [seen[place:] for place in range(len(seen))]
        possible = [tail for tail in tails if any(stop.startswith(tail) for stop in stops)]
        assert seen[len(released) :] == max(possible, key=len, default="")
        assert matcher.num_held == len(seen) - len(released)


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (["DE"], "ABC", "DE"),
        (["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["FG", "DEFGHIJ"], "ABCDE", "FG"),
        (["HIJ", "GHIJ"], "ABCDEF", "GHIJ"),
        (["XYZ"], "ABCDEFGHIJKL", None),
    ],
)
def test_stop_strings_across_and_inside_tokens(
    stops: list[str], text: str, stop: str | None
) -> None:
    assert run(stops, ["ABC", "DEF", "G", "HI", "JKL"]) == (text, stop)
    assert run(stops, ["ABCDEFGHIJKL"]) == (text, stop)


def test_text_held_when_nothing_follows_is_ordinary_text() -> None:
    assert run(["TRE\nAAAA"], ["UNO ", "DUE ", "TRE"]) == ("UNO DUE TRE", None)


def test_the_last_visible_character_before_a_stop_in_one_token_is_delivered() -> None:
    assert run(["\n"], ["really", "?\n"]) == ("really?", "\n")


def test_a_prefix_that_overlaps_itself_is_found() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


@pytest.mark.parametrize("stops", [[], [""], ["", ""]])
def test_empty_stop_strings_match_nothing(stops: list[str]) -> None:
    assert run(stops, ["a", "", "b"]) == ("ab", None)


def test_an_empty_stop_string_beside_another_is_ignored() -> None:
    assert run(["", "END"], ["one END two"]) == ("one ", "END")


def test_a_space_is_a_stop_string() -> None:
    assert run([" "], ["one", " two"]) == ("one", " ")


def test_nothing_is_released_after_a_match() -> None:
    matcher = StopMatcher(["b"])
    assert [matcher.append("ab"), matcher.append("c"), matcher.flush()] == ["a", "", ""]


def test_a_very_long_stop_string_costs_no_more_per_character() -> None:
    stop = "a" * 50_000 + "b"
    text = "a" * 60_000
    assert run([stop], [*text, "b"]) == ("a" * 10_000, stop)
