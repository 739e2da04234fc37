"""What a choice says and when it ends, on a tokenizer whose first 256 ids are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.output import LOWEST_LOGPROB, SequenceOutput, TokenRow
from headrace.errors import ErrorInfo
from headrace.testing.tokenizers import tiny_special_tokens, tiny_tokenizer_json
from headrace.text.tokenizer import Tokenizer
from headrace.types import SamplingParams, TokenEvent, TokenLogprobs

TINY = Tokenizer(tiny_tokenizer_json(), special_tokens=tiny_special_tokens(), add_bos_token=False)
EOS, OTHER_EOS, SPECIAL = 348, 346, 347
THE, HELLO = 256, 294


@dataclass
class Said:
    """All events of one choice, joined."""

    output: SequenceOutput
    events: list[TokenEvent]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for event in self.events for token_id in event.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [entry for event in self.events for entry in event.logprobs or ()]

    @property
    def ending(self) -> tuple[str | None, str | int | None]:
        return self.events[-1].finish_reason, self.events[-1].stop_reason


def say(
    tokens: Sequence[int] | str,
    *,
    step: int = 1,
    max_tokens: int = 1000,
    sampling: SamplingParams | None = None,
    **options: object,
) -> Said:
    """Feed tokens, `step` at a time, until the choice ends."""
    ids = list(tokens.encode()) if isinstance(tokens, str) else list(tokens)
    output = SequenceOutput(
        TINY,
        request_id="r",
        index=3,
        sampling=sampling or SamplingParams(**options),  # type: ignore[arg-type]
        eos_token_ids=(EOS, OTHER_EOS),
        max_tokens=max_tokens,
    )
    events: list[TokenEvent] = []
    for start in range(0, len(ids), step):
        rows = [TokenRow(token_id, -0.5, ((token_id, -0.5),)) for token_id in ids[start:][:step]]
        event = output.append(rows)
        if event is not None:
            events.append(event)
    return Said(output, events)


def ids(text: str) -> list[int]:
    return list(text.encode())


# --- how a choice ends ------------------------------------------------------------------


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_any_eos_id_stops_and_is_not_text(eos: int) -> None:
    """T08: each id of the union, and its text is never sent."""
    said = say([*ids("hi"), eos, *ids("more")])
    assert (said.text, said.ending) == ("hi", ("stop", None))
    assert said.token_ids == said.output.token_ids == [*ids("hi"), eos]


def test_ignored_eos_is_an_ordinary_token() -> None:
    said = say([*ids("hi"), EOS, *ids("yo")], ignore_eos=True, max_tokens=5)
    assert (said.text, said.ending, said.output.num_tokens) == ("hiyo", ("length", None), 5)


def test_a_stop_token_id_stops_and_is_named() -> None:
    said = say("hix and", stop_token_ids=(ord("x"),))
    assert (said.text, said.ending) == ("hi", ("stop", ord("x")))


def test_an_eos_id_given_as_stop_token_stops_even_where_eos_is_ignored() -> None:
    said = say([*ids("hi"), EOS], ignore_eos=True, stop_token_ids=(EOS,))
    assert (said.text, said.ending) == ("hi", ("stop", EOS))


def test_immediate_eos_says_nothing_but_the_end() -> None:
    said = say([EOS])
    assert len(said.events) == 1
    assert (said.text, said.ending, said.token_ids) == ("", ("stop", None), [EOS])


def test_max_tokens_ends_with_length() -> None:
    said = say("abcdef", max_tokens=3)
    assert (said.text, said.ending, said.output.num_tokens) == ("abc", ("length", None), 3)


def test_a_stop_on_the_last_token_is_a_stop() -> None:
    assert say([*ids("ab"), EOS], max_tokens=3).ending == ("stop", None)
    assert say("abc", max_tokens=3, stop=("bc",)).ending == ("stop", "bc")


def test_no_tokens_at_all_is_one_event_of_length() -> None:
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=1)
    output = SequenceOutput(
        TINY, request_id="r", index=0, sampling=scoring, eos_token_ids=(), max_tokens=0
    )
    event = output.append([])
    assert event is not None
    assert (event.text, event.token_ids, event.finish_reason) == ("", [], "length")
    assert (output.append([TokenRow(1)]), output.num_tokens) == (None, 0)


def test_tokens_behind_the_end_are_dropped() -> None:
    said = say([*ids("ab"), EOS, *ids("cd")], step=5)
    assert (said.text, said.output.num_tokens, len(said.events)) == ("ab", 3, 1)
    assert said.output.append([TokenRow(ord("x"))]) is None


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_end_from_outside_releases_what_was_held(reason: str) -> None:
    error = ErrorInfo(code="engine_failed", message="m", http_status=500)
    said = say("one EN", stop=("END",))
    event = said.output.finish(reason, error=error)
    assert event is not None
    assert (said.text + event.text, event.finish_reason, event.error) == ("one EN", reason, error)
    assert said.output.finish(reason) is None


# --- stop strings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "text"),
    [(("DE",), "ABC"), (("DEFGHIJ",), "ABC"), (("FG", "DEFGHIJ"), "ABCDE"), (("C",), "AB")],
)
@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_the_text_ends_before_the_stop_string(stops: tuple[str, ...], text: str, step: int) -> None:
    said = say("ABCDEFGHIJKL", step=step, stop=stops)
    assert (said.text, said.ending[0]) == (text, "stop")
    assert said.ending[1] in stops


def test_a_stop_string_may_end_inside_a_token() -> None:
    said = say([ord("x"), HELLO, THE], stop=("ell",))
    assert (said.text, said.ending, said.output.num_tokens) == ("xH", ("stop", "ell"), 2)


@pytest.mark.parametrize("end", [[EOS], []])
def test_a_held_prefix_is_delivered_when_generation_ends(end: list[int]) -> None:
    text = "UNO DUE TRE"
    said = say([*ids(text), *end], max_tokens=len(text) + len(end), stop=("TRE\nAAAA",))
    assert said.text == text
    assert said.ending == (("stop" if end else "length"), None)


def test_the_visible_character_of_the_stopping_token_is_delivered() -> None:
    question = TINY.encode("?\n\n")
    said = say([ord("a"), *question], stop=("\n",))
    assert (said.text, said.ending) == ("a?", ("stop", "\n"))


def test_text_flushed_from_half_a_character_can_complete_a_stop() -> None:
    said = say([ord("a"), 0xF0, EOS], stop=("\ufffd",))
    assert (said.text, said.ending) == ("a", ("stop", "\ufffd"))


def test_half_a_character_at_the_end_is_replaced() -> None:
    assert say([ord("a"), 0xF0, 0x9F], max_tokens=3).text == "a\ufffd"


# --- min_tokens -------------------------------------------------------------------------


def test_nothing_stops_before_min_tokens() -> None:
    stops = {"stop": ("b",), "stop_token_ids": (ord("c"),)}
    said = say([*ids("abc"), EOS, *ids("xb")], min_tokens=5, **stops)  # type: ignore[arg-type]
    assert (said.text, said.ending, said.output.num_tokens) == ("abcx", ("stop", "b"), 6)


def test_a_stop_string_counts_from_the_token_that_reaches_min_tokens() -> None:
    assert say("abb", min_tokens=2, stop=("b",)).text == "a"
    assert say("abcb", min_tokens=3, stop=("b",)).text == "abc"
    assert say("abab", min_tokens=3, stop=("ab",)).text == "ab"


def test_eos_counts_behind_min_tokens() -> None:
    assert say([ord("a"), ord("b"), EOS], min_tokens=2).ending == ("stop", None)


# --- events -----------------------------------------------------------------------------


def test_characters_are_not_held_longer_than_they_must_be() -> None:
    said = say("ob 🫠 ke")
    assert [event.text for event in said.events] == ["o", "b", " ", "🫠", " ", "k", "e"]
    assert [len(event.token_ids) for event in said.events] == [1, 1, 1, 4, 1, 1, 1]


def test_only_the_last_event_has_a_finish_reason() -> None:
    said = say([*ids("abc"), EOS])
    assert [event.finish_reason for event in said.events] == [None, None, None, "stop"]
    assert {(event.request_id, event.index) for event in said.events} == {("r", 3)}


def test_special_tokens_are_left_out_of_the_text_but_counted() -> None:
    said = say([ord("a"), SPECIAL, ord("b"), EOS])
    assert (said.text, said.token_ids) == ("ab", [ord("a"), SPECIAL, ord("b"), EOS])


# --- log probabilities ------------------------------------------------------------------


def test_no_logprobs_unless_asked() -> None:
    assert all(event.logprobs is None for event in say("abc").events)


def test_zero_alternatives_is_not_off() -> None:
    said = say("ab", logprobs=0)
    assert [(entry.chosen.text, entry.chosen.logprob, entry.top) for entry in said.logprobs] == [
        ("a", -0.5, []),
        ("b", -0.5, []),
    ]


def test_alternatives_are_cut_to_what_was_asked_and_finite() -> None:
    output = say("", logprobs=2).output
    top = ((5, -0.1), (6, float("-inf")), (7, -9.0), (-1, 0.0))
    event = output.append([TokenRow(ord("a"), float("-inf"), top)])
    assert event is not None
    assert event.logprobs is not None
    (entry,) = event.logprobs
    assert entry.chosen.logprob == LOWEST_LOGPROB
    assert [(one.token_id, one.logprob) for one in entry.top] == [(5, -0.1), (6, LOWEST_LOGPROB)]


def test_padding_of_shorter_rows_is_no_alternative() -> None:
    output = say("", logprobs=3).output
    event = output.append([TokenRow(ord("a"), -1.0, ((5, -0.1), (-1, 0.0), (-1, 0.0)))])
    assert event is not None
    assert event.logprobs is not None
    assert [one.token_id for one in event.logprobs[0].top] == [5]


def test_entries_wait_for_the_text_they_belong_to() -> None:
    said = say("aTRIxy", stop=("TRE",), logprobs=0)
    shown = [
        (event.text, "".join(entry.chosen.text for entry in event.logprobs or ()))
        for event in said.events
    ]
    assert shown == [("a", "a"), ("TRI", "TRI"), ("x", "x"), ("y", "y")]


def test_tokens_of_a_stop_string_and_eos_have_no_entry() -> None:
    assert (
        "".join(e.chosen.text for e in say("abSTOP", stop=("STOP",), logprobs=0).logprobs) == "ab"
    )
    assert len(say([*ids("ab"), EOS], logprobs=0).logprobs) == 2


def test_a_token_cut_by_a_stop_string_keeps_its_whole_entry() -> None:
    said = say([ord("x"), HELLO], stop=("ell",), logprobs=0)
    assert (said.text, [entry.chosen.text for entry in said.logprobs]) == ("xH", ["x", "Hello"])


def test_an_entry_holds_the_bytes_of_half_a_character() -> None:
    entries = say("é", logprobs=0).logprobs
    assert [(entry.chosen.raw, entry.chosen.text) for entry in entries] == [
        (b"\xc3", "\ufffd"),
        (b"\xa9", "\ufffd"),
    ]


# --- the whole --------------------------------------------------------------------------

TOKENS = st.lists(
    st.sampled_from([*ids("ab c\n"), *ids("é😀"), 0xFF, EOS, SPECIAL, THE, HELLO]), max_size=24
)
SAMPLING = st.builds(
    SamplingParams,
    stop=st.lists(st.text("ab tH\n", min_size=1, max_size=4), max_size=3).map(tuple),
    stop_token_ids=st.sampled_from([(), (ord("c"),), (SPECIAL,)]),
    min_tokens=st.integers(0, 5),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 1]),
)


@given(TOKENS, SAMPLING, st.integers(1, 30), st.integers(1, 8))
def test_steps_of_several_tokens_say_the_same_as_single_ones(
    tokens: list[int], sampling: SamplingParams, max_tokens: int, step: int
) -> None:
    def outcome(step: int) -> tuple[object, ...]:
        said = say(tokens, step=step, max_tokens=max(max_tokens, 5), sampling=sampling)
        said.events.extend(event for event in [said.output.finish("abort")] if event)
        return said.text, said.ending, said.token_ids, said.logprobs, said.output.token_ids

    assert outcome(step) == outcome(1)


@given(TOKENS, SAMPLING)
def test_invariants(tokens: list[int], sampling: SamplingParams) -> None:
    said = say(tokens, max_tokens=1000, sampling=sampling)
    said.events.extend(event for event in [said.output.finish("abort")] if event)
    assert said.token_ids == said.output.token_ids == tokens[: said.output.num_tokens]
    assert [event.finish_reason is not None for event in said.events].count(True) == 1
    assert said.events[-1].finish_reason is not None
    plain = TINY.decode(said.token_ids, continuation=True)
    assert plain.startswith(said.text)
    stop = said.ending[1]
    if isinstance(stop, str):
        assert plain.startswith(said.text + stop)
    if sampling.min_tokens <= 1:
        assert all(stop not in said.text for stop in sampling.stop)
    if sampling.logprobs is not None:
        entries = [entry.chosen.token_id for entry in said.logprobs]
        assert entries == tokens[: len(entries)]
        assert TINY.decode(entries, continuation=True).startswith(said.text)
        if isinstance(stop, str) and not said.text:
            assert entries == []


# --- the short ways in ------------------------------------------------------------------

endings = st.fixed_dictionaries(
    {
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (97, 0xF0)]),
        "stop": st.sampled_from([(), ("ab",)]),
        "min_tokens": st.integers(0, 3),
    }
)
any_tokens = st.lists(
    st.sampled_from([97, 98, 0xF0, 0x9F, 0x98, 0x80, 0xFF, THE, EOS, SPECIAL]), max_size=20
)


def output_of(max_tokens: int, **options: object) -> SequenceOutput:
    return SequenceOutput(
        TINY,
        request_id="r",
        index=1,
        sampling=SamplingParams(**options),  # type: ignore[arg-type]
        eos_token_ids=(EOS,),
        max_tokens=max_tokens,
    )


@given(tokens=any_tokens, max_tokens=st.integers(3, 20), options=endings)
def test_a_token_by_itself_says_what_its_row_says(
    tokens: list[int], max_tokens: int, options: dict[str, object]
) -> None:
    """S01, S03, S04: event by event, whichever way a token comes in."""
    by_token, by_row = output_of(max_tokens, **options), output_of(max_tokens, **options)
    for token_id in tokens:
        assert by_token.append_token(token_id) == by_row.append((TokenRow(token_id),))
    assert by_token.finish("abort") == by_row.finish("abort")
    assert by_token.token_ids == by_row.token_ids


@given(tokens=any_tokens, cuts=st.lists(st.integers(1, 6), max_size=20))
def test_a_run_of_tokens_says_what_they_say_one_by_one(tokens: list[int], cuts: list[int]) -> None:
    whole = say(tokens, max_tokens=len(tokens) + 1, ignore_eos=True)
    in_runs = output_of(len(tokens) + 1, ignore_eos=True)
    events: list[TokenEvent | None] = []
    rest = tokens
    for cut in cuts:
        events.append(in_runs.append_run(rest[:cut]))
        rest = rest[cut:]
    events += [in_runs.append_run(rest), in_runs.append_run([97])]
    said = [event for event in events if event is not None]
    ended = whole.output.append((TokenRow(97),))
    assert ended is not None
    assert "".join(event.text for event in said) == whole.text + ended.text
    assert [t for event in said for t in event.token_ids] == [*tokens, 97]
    assert said[-1].finish_reason == ended.finish_reason == "length"
