"""The offline library: `headrace.LLM(...).generate(...)`, an engine in this process and no server."""

from __future__ import annotations

import operator
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from headrace.errors import InvalidRequest, RemoteError
from headrace.types import (
    GenerationRequest,
    RequestSummary,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from headrace.config import Config
    from headrace.text.chat_template import ChatTemplate

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Raw text, token ids, or chat messages."""


@dataclass(slots=True)
class Completion:
    """One choice of one prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    usage: Usage | None = None


@dataclass(slots=True)
class Generation:
    """All choices of one prompt, in order."""

    request_id: str
    prompt_token_ids: list[int]
    choices: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text


class LLM:
    """A model loaded into this process. Not thread-safe; close it, or use it as a context manager.

    Several streams may be open at a time, and are batched together.

    `model` is what `--model` takes; further keywords are keys of the `engine:` table, such as
    `max_model_len=2048` or `dtype="float32"`. Raises HeadraceError where it cannot be served.
    """

    def __init__(self, model: str = "smollm2", **engine: Any) -> None:
        from headrace.config import load_config

        flags: dict[str, Any] = {"models.0.source": model}
        flags.update({f"models.0.engine.{key}": value for key, value in engine.items()})
        self._open(load_config(None, flags=flags).config, lambda stage, fraction: None)

    @classmethod
    def from_config(
        cls, config: Config, *, report: Callable[[str, float], None] = lambda stage, fraction: None
    ) -> Self:
        """Load the first model of a configuration. `report` is told each stage and its fraction."""
        llm = cls.__new__(cls)
        llm._open(config, report)
        return llm

    def _open(self, config: Config, report: Callable[[str, float], None]) -> None:
        from headrace.build import build_engine
        from headrace.config import replica_config
        from headrace.plugins.manager import create_plugin_manager
        from headrace.text.tokenizer import Tokenizer

        built = build_engine(replica_config(config, 0), report=report)
        self.card = built.card
        self._engine = built.engine
        self._tokenizer = Tokenizer(
            built.card.tokenizer_json,
            special_tokens=built.card.special_tokens,
            add_bos_token=built.card.add_bos_token,
        )
        self._news: dict[str, deque[TokenEvent]] = {}
        """By open request. A step brings news of all of them, whichever caller asked for it."""
        self._template: ChatTemplate | None = None
        self._manager = create_plugin_manager(
            discover=config.plugins.discover, blocked=config.plugins.blocked
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the device. A second close does nothing."""
        self._engine.close()

    def sampling(self, **values: Any) -> SamplingParams:
        """Return SamplingParams from the model's own defaults and `values`; None means the default."""
        given = {name: value for name, value in values.items() if value is not None}
        unknown = set(given) - set(SamplingParams.__struct_fields__)
        if unknown:
            name = sorted(unknown)[0]
            raise InvalidRequest(f"no sampling parameter is named {name!r}", param=name)
        return SamplingParams(**{**self.card.default_sampling, **given})

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of raw text, chat messages, or the ids themselves."""
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        items = _items(prompt)
        if items and isinstance(items[0], Mapping):
            return self._tokenizer.encode_rendered(self._chat_template().render(items))
        try:
            return [operator.index(item) for item in items]
        except TypeError:
            raise _no_prompt(prompt) from None

    def _chat_template(self) -> ChatTemplate:
        """Return the model's template, parsed at its first use: a broken one is no obstacle to text."""
        from headrace.text.chat_template import ChatTemplate

        if self._template is None:
            if not self.card.chat_template:
                raise InvalidRequest(
                    f"model '{self.card.name}' has no chat template; give text instead",
                    param="messages",
                )
            self._template = ChatTemplate(self.card.chat_template, self.card.special_tokens)
        return self._template

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        progress: bool = True,
    ) -> list[Generation]:
        """Generate for one prompt or a batch, all batched together; results in the order of prompts."""
        results = [self._result(ids, sampling) for ids in self._batch(prompts)]
        waiting = [(result, sampling or self.sampling()) for result in results]
        self._check(waiting)
        by_id = {result.request_id: result for result in results}
        from headrace.cli.progress import stage_progress

        total, open_choices = 0, {}
        for result in results:
            open_choices[result.request_id] = len(result.choices)
            total += len(result.choices)
        with stage_progress(enabled=progress) as report:
            for event in self._run(waiting):
                if collect(by_id[event.request_id], event):
                    open_choices[event.request_id] -= 1
                    report("generate", 1 - sum(open_choices.values()) / total)
        return results

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one choice as it comes. Leaving early aborts the request."""
        ids = self.encode(prompt)
        chosen = sampling or self.sampling()
        if chosen.n != 1:
            raise InvalidRequest(f"stream yields one choice; n is {chosen.n}", param="n")
        result = self._result(ids, chosen)
        for event in self._run([(result, chosen)]):
            collect(result, event)
            if event.text:
                yield event.text

    # --- inside -----------------------------------------------------------------

    def _batch(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        if isinstance(prompts, str):
            return [self.encode(prompts)]
        items = _items(prompts)
        if items and (isinstance(items[0], Mapping) or hasattr(items[0], "__index__")):
            return [self.encode(items)]
        return [self.encode(item) for item in items]

    def _result(self, ids: list[int], sampling: SamplingParams | None) -> Generation:
        if not isinstance(sampling, SamplingParams | None):
            raise InvalidRequest(
                f"sampling must be what LLM.sampling(...) returns, got {type(sampling).__name__}",
                param="sampling",
            )
        n = sampling.n if sampling is not None else 1
        return Generation(uuid.uuid4().hex, ids, [Completion() for _ in range(n)])

    def _check(self, waiting: Sequence[tuple[Generation, SamplingParams]]) -> None:
        """Refuse a bad batch before any of it runs."""
        for result, sampling in waiting:
            self._engine.check(self._request(result, sampling))

    def _request(self, result: Generation, sampling: SamplingParams) -> GenerationRequest:
        return GenerationRequest(
            request_id=result.request_id,
            model=self.card.name,
            prompt_token_ids=result.prompt_token_ids,
            sampling=sampling,
        )

    def _run(self, waiting: Sequence[tuple[Generation, SamplingParams]]) -> Iterator[TokenEvent]:
        """Submit as the queue allows, step until all are done, yield every event; abort what is left."""
        pending = list(reversed(waiting))
        open_choices: dict[str, int] = {}
        started = {result.request_id: (result, time.monotonic()) for result, _ in waiting}
        try:
            while pending or open_choices:
                while pending and self._engine.has_room(pending[-1][1].n):
                    result, sampling = pending.pop()
                    self._engine.submit(self._request(result, sampling))
                    open_choices[result.request_id] = sampling.n
                    self._news[result.request_id] = deque()
                for event in self._take(open_choices):
                    if event.finish_reason is not None:
                        open_choices[event.request_id] -= 1
                    yield event
                    if open_choices.get(event.request_id) == 0:
                        del open_choices[event.request_id], self._news[event.request_id]
                        self._observe(*started[event.request_id])
        finally:
            for request_id in open_choices:
                self._engine.abort(request_id)
                del self._news[request_id]

    def _take(self, request_ids: Collection[str]) -> list[TokenEvent]:
        """Return the news of these requests. Where there are none, run a step, which may bring others'."""
        if not any(self._news[request_id] for request_id in request_ids):
            for event in self._engine.step():
                if event.request_id in self._news:
                    self._news[event.request_id].append(event)
        events: list[TokenEvent] = []
        for request_id in request_ids:
            events += self._news[request_id]
            self._news[request_id].clear()
        return events

    def _observe(self, result: Generation, start: float) -> None:
        from headrace.plugins.manager import notify

        usages = [choice.usage for choice in result.choices if choice.usage is not None]
        notify(
            self._manager,
            "headrace_request_finished",
            summary=RequestSummary(
                request_id=result.request_id,
                model=self.card.name,
                endpoint="LLM",
                status=200,
                finish_reasons=tuple(choice.finish_reason or "" for choice in result.choices),
                prompt_tokens=len(result.prompt_token_ids),
                cached_tokens=max((usage.cached_tokens for usage in usages), default=0),
                completion_tokens=sum(usage.completion_tokens for usage in usages),
                ttft_seconds=None,
                tpot_seconds=None,
                duration_seconds=time.monotonic() - start,
            ),
        )


def _items(prompt: object) -> list[Any]:
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise _no_prompt(prompt)
    return list(prompt)


def _no_prompt(prompt: object) -> InvalidRequest:
    return InvalidRequest(
        f"a prompt is text, a list of token ids or a list of chat messages, got {repr(prompt)[:80]}",
        param="prompt",
    )


def collect(result: Generation, event: TokenEvent) -> bool:
    """Add an event to its choice; return whether it ended the choice. Raises what the engine reports."""
    choice = result.choices[event.index]
    choice.text += event.text
    choice.token_ids += event.token_ids
    if event.logprobs is not None:
        choice.logprobs = (choice.logprobs or []) + event.logprobs
    if event.prompt_logprobs is not None:
        result.prompt_logprobs = event.prompt_logprobs
    if event.finish_reason is None:
        return False
    if event.error is not None:
        raise RemoteError(event.error)
    choice.finish_reason = event.finish_reason
    choice.usage = event.usage
    return True
