"""Turns news of choices into an answer, streamed or whole, in the shape of one endpoint.

Both modes go through the same format object, so the joined deltas of a stream equal the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec

from headrace.gateway.accounting import RequestRecord
from headrace.types import TokenEvent, TokenLogprobs

ENDED_WELL = ("stop", "length")
"""Every other finish reason is a failure of the call, told as an error."""


@dataclass(frozen=True, slots=True)
class ChoicePlace:
    """Which choice of which prompt, and its index in the answer."""

    prompt_index: int
    index: int


class AnswerFormat(Protocol):
    """The shape of one endpoint's choices. Made per request; may remember what each choice has said."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def piece(self, place: ChoicePlace, event: TokenEvent) -> dict[str, Any] | None:
        """Return the choice of a chunk with the event's text; None where there is nothing to say."""
        ...

    def closing(self, place: ChoicePlace, finish_reason: str) -> dict[str, Any]:
        """Return the choice of the chunk that ends it, which has no text."""
        ...

    def whole(self, place: ChoicePlace, event: TokenEvent) -> dict[str, Any]:
        """Return the finished choice; `event` holds all its text and log probabilities."""
        ...


@dataclass(slots=True)
class _Collected:
    """Everything one choice has said, for the answer in one piece."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None

    def add(self, event: TokenEvent) -> None:
        self.texts.append(event.text)
        if event.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(event.logprobs)
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason


class _Template:
    """A chunk of one choice with nothing but its text left to fill in."""

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    def fill(self, text: str) -> bytes:
        return b"".join((self._before, msgspec.json.encode(text), self._after))


_MARK = "\0text\0"
"""Stands for the text while a template is made."""


class Answer:
    """One call's answer, filled as news arrives."""

    def __init__(
        self,
        format: AnswerFormat,
        record: RequestRecord,
        *,
        num_choices: int,
        envelope: dict[str, Any],
        include_usage: bool = False,
    ) -> None:
        self._format = format
        self._record = record
        self._num_choices = num_choices
        self._envelope = envelope
        self._include_usage = include_usage
        self._collected: dict[ChoicePlace, _Collected] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        """By prompt: they come once, with the first news of any choice."""
        self._templates: dict[tuple[int, int], _Template | None] = {}
        """By prompt and choice, from its second chunk on; None: it is encoded anew each time."""

    def _place(self, prompt_index: int, event: TokenEvent) -> ChoicePlace:
        return ChoicePlace(prompt_index, prompt_index * self._num_choices + event.index)

    def chunks(self, prompt_index: int, events: Sequence[TokenEvent]) -> list[bytes]:
        """Return the chunks that say these events."""
        chunks: list[bytes] = []
        for event in events:
            template = self._templates.get((prompt_index, event.index))
            if template is not None and event.text and not event.logprobs:
                chunks.append(template.fill(event.text))
                if event.finish_reason is None:
                    continue
                event = msgspec.structs.replace(event, text="")
            place = self._place(prompt_index, event)
            choice = self._format.piece(place, event)
            if choice is not None:
                chunks.append(self._chunk([choice]))
                self._make_template(place, prompt_index, event.index)
            if event.finish_reason in ENDED_WELL:
                closing = self._format.closing(place, event.finish_reason)
                chunks.append(self._chunk([closing]))
        return chunks

    def _make_template(self, place: ChoicePlace, prompt_index: int, index: int) -> None:
        """Write the next chunk of a choice but for its text, which is all that changes without logprobs."""
        if (prompt_index, index) in self._templates:
            return
        template = None
        choice = self._format.piece(place, TokenEvent(request_id="", index=index, text=_MARK))
        if choice is not None:
            parts = self._chunk([choice]).split(msgspec.json.encode(_MARK))
            if len(parts) == 2:
                template = _Template(*parts)
        self._templates[prompt_index, index] = template

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        chunk = {**self._envelope, "object": self._format.chunk_object, "choices": choices}
        if self._include_usage:
            chunk["usage"] = None
        return msgspec.json.encode(chunk)

    def last_chunks(self) -> list[bytes]:
        """Return what follows the last choice: the usage where it was asked for."""
        if not self._include_usage:
            return []
        chunk = {
            **self._envelope,
            "object": self._format.chunk_object,
            "choices": [],
            "usage": self.usage(),
        }
        return [msgspec.json.encode(chunk)]

    def collect(self, prompt_index: int, events: Sequence[TokenEvent]) -> None:
        """Keep these events for `whole`."""
        for event in events:
            place = self._place(prompt_index, event)
            self._collected.setdefault(place, _Collected()).add(event)
            if event.prompt_logprobs is not None:
                self._prompt_logprobs[prompt_index] = event.prompt_logprobs

    def restart(self, prompt_index: int) -> None:
        """Forget what `collect` kept of a prompt."""
        for place in [each for each in self._collected if each.prompt_index == prompt_index]:
            del self._collected[place]

    def whole(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        choices = []
        for place in sorted(self._collected, key=lambda place: place.index):
            collected = self._collected[place]
            event = TokenEvent(
                request_id="",
                text="".join(collected.texts),
                logprobs=collected.logprobs,
                prompt_logprobs=self._prompt_logprobs.get(place.prompt_index),
                finish_reason=collected.finish_reason,
            )
            choices.append(self._format.whole(place, event))
        return {
            **self._envelope,
            "object": self._format.whole_object,
            "choices": choices,
            "usage": self.usage(),
        }

    def usage(self) -> dict[str, Any]:
        """Return the totals of the call: each prompt once, the tokens of every choice."""
        record = self._record
        return {
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "total_tokens": record.prompt_tokens + record.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
        }
