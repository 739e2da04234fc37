"""POST /v1/completions: raw prompts, one or many, as text or as token ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace.errors import InvalidRequest, shown
from headrace.gateway.answer import ChoicePlace
from headrace.gateway.call import (
    Call,
    Caller,
    TargetModel,
    build_requests,
    check_num_choices,
)
from headrace.gateway.logprobs import PromptScores, TextOffsets, completion_logprobs
from headrace.gateway.openai_schema import CompletionBody
from headrace.gateway.sampling import (
    DEFAULT_COMPLETION_TOKENS,
    TokenRule,
    build_sampling,
    check_common,
)
from headrace.gateway.state import Limits
from headrace.text.tokenizer import Tokenizer
from headrace.types import GenerationRequest, TokenAlternative, TokenEvent

MAX_LOGPROBS = 5


def build_completion_call(
    body: CompletionBody, caller: Caller, target: TargetModel, limits: Limits
) -> Call:
    """Return the call. Tokenizes, so it belongs on a text thread."""
    check_common(body)
    _check_supported(body)
    card, tokenizer = target.card, target.text.tokenizer
    logprobs = body.logprobs
    sampling = build_sampling(
        body, card, logprobs=logprobs, prompt_logprobs=logprobs if body.echo else None
    )
    prompts = _prompts(body, limits)
    check_num_choices(len(prompts), sampling.n, limits)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(tokenizer.encode_batch(texts)) if texts else iter(())
    token_ids = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
    scores = bool(body.echo) and logprobs is not None
    rule = TokenRule(body.max_tokens, "max_tokens", DEFAULT_COMPLETION_TOKENS, allows_none=scores)
    requests = build_requests(body, caller, card, token_ids, sampling, rule)
    if scores:
        _check_scores(requests, limits)
    echoes = None
    if body.echo:
        echoes = [
            Echo.of(prompt, ids, tokenizer) for prompt, ids in zip(prompts, token_ids, strict=True)
        ]
    return Call(
        card=card,
        requests=requests,
        format=CompletionFormat(
            with_logprobs=logprobs is not None,
            hidden_ids=tokenizer.special_ids,
            echoes=echoes,
        ),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        session=caller.session_of(body),
    )


def _check_scores(requests: Sequence[GenerationRequest], limits: Limits) -> None:
    num_choices = requests[0].sampling.n
    total = num_choices * sum(len(request.prompt_token_ids) for request in requests)
    if total > limits.max_prompt_logprobs:
        raise InvalidRequest(
            f"echo with logprobs repeats the prompt's log probabilities in each choice: {total} in all; "
            f"one call may have at most {limits.max_prompt_logprobs}: lower n ({num_choices}) or send "
            f"fewer prompts ({len(requests)})",
            param="n" if num_choices > 1 else "prompt",
        )


def _check_supported(body: CompletionBody) -> None:
    if body.suffix:
        raise InvalidRequest("suffix is not supported: leave it out", param="suffix")
    num_choices = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != num_choices:
        raise InvalidRequest(
            f"best_of ({shown(body.best_of)}) must equal n ({shown(num_choices)}): choices are not "
            "ranked",
            param="best_of",
        )
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"logprobs must be between 0 and {MAX_LOGPROBS}, got {shown(body.logprobs)}",
            param="logprobs",
        )


def _prompts(body: CompletionBody, limits: Limits) -> list[str | list[int]]:
    """Return the prompts, each a text or a list of token ids."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest(
            "prompt is missing: give a string, a list of strings, a list of token ids or a list of "
            "such lists",
            param="prompt",
        )
    if all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    if len(given) > limits.max_prompts:
        raise InvalidRequest(
            f"prompt: one call may have at most {limits.max_prompts} prompts, got {len(given)}",
            param="prompt",
        )
    prompts = [item for item in given if not isinstance(item, int)]
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise InvalidRequest(
            "prompt mixes strings, token ids and lists: all of its items must be of one kind",
            param="prompt",
        )
    for index, item in enumerate(prompts):
        if not item and not isinstance(item, str):
            raise InvalidRequest(f"prompt[{index}] is an empty list", param=f"prompt[{index}]")
    return prompts


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is given back in front of its completion."""

    text: str
    first_token: TokenAlternative
    hidden_ids: Collection[int]
    """Tokens that the text does not show. What a caller wrote is shown as it was written."""
    offset_start: int
    """0, or below it where the tokens spell more than the text: the tokenizer's own BOS or first space."""

    @classmethod
    def of(cls, prompt: str | list[int], token_ids: list[int], tokenizer: Tokenizer) -> Echo:
        is_text = isinstance(prompt, str)
        text = prompt if isinstance(prompt, str) else tokenizer.decode(token_ids)
        spelled = tokenizer.decode(token_ids, skip_special=not is_text, continuation=True)
        first = token_ids[0]
        return cls(
            text=text,
            first_token=TokenAlternative(
                token_id=first,
                logprob=0.0,
                text=tokenizer.token_text(first),
                raw=tokenizer.token_bytes(first),
            ),
            hidden_ids=frozenset() if is_text else tokenizer.special_ids,
            offset_start=min(0, len(text) - len(spelled)),
        )


@dataclass(slots=True)
class CompletionFormat:
    """The choices of a completions answer."""

    id_prefix: ClassVar[str] = "cmpl-"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    with_logprobs: bool
    hidden_ids: frozenset[int]
    echoes: Sequence[Echo] | None
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)
    _scores: dict[int, PromptScores] = field(default_factory=dict)

    def piece(self, place: ChoicePlace, event: TokenEvent) -> dict[str, Any] | None:
        opens = place.index not in self._offsets
        echo = self.echoes[place.prompt_index] if self.echoes is not None and opens else None
        scores = self._prompt_scores(place.prompt_index, echo, event)
        if opens:
            start = 0 if scores is None else scores.end_offset
            self._offsets[place.index] = TextOffsets(self.hidden_ids, start=start)
        text = event.text if echo is None else echo.text + event.text
        logprobs = self._logprobs(place, event, scores)
        if not text and not (logprobs and logprobs["tokens"]):
            return None
        return {
            "index": place.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
        }

    def closing(self, place: ChoicePlace, finish_reason: str) -> dict[str, Any]:
        return {"index": place.index, "text": "", "logprobs": None, "finish_reason": finish_reason}

    def whole(self, place: ChoicePlace, event: TokenEvent) -> dict[str, Any]:
        choice = self.piece(place, event) or {
            "index": place.index,
            "text": "",
            "logprobs": self._logprobs(place, event, None),
        }
        return {**choice, "finish_reason": event.finish_reason}

    def _prompt_scores(
        self, prompt_index: int, echo: Echo | None, event: TokenEvent
    ) -> PromptScores | None:
        """Return what precedes a choice's own log probabilities; they come with the first choice's news."""
        if echo is None or not self.with_logprobs:
            return None
        if prompt_index not in self._scores:
            offsets = TextOffsets(echo.hidden_ids, start=echo.offset_start)
            self._scores[prompt_index] = PromptScores(
                event.prompt_logprobs or (), echo.first_token, offsets
            )
        return self._scores[prompt_index]

    def _logprobs(
        self, place: ChoicePlace, event: TokenEvent, scores: PromptScores | None
    ) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        output = completion_logprobs(event.logprobs or (), self._offsets[place.index])
        return output if scores is None else scores.followed_by(output)
