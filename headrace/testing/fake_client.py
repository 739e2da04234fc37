"""An engine client that says what a script tells it: for tests of whatever sits in front of engines.

Stop strings, EOS, limits and log probability alignment are the real ones (SequenceOutput); only the
tokens are scripted, and acceptance, tokens and failures come when the test says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.engine.output import SequenceOutput, TokenRow, token_logprobs
from headrace.engine.streams import StreamingClient
from headrace.errors import EngineFailed, ErrorInfo, RequestError
from headrace.testing.tokenizers import (
    CHATML_TEMPLATE,
    SPECIAL_TOKENS,
    tiny_special_tokens,
    tiny_tokenizer_json,
)
from headrace.text.tokenizer import Tokenizer
from headrace.types import (
    Abort,
    Accepted,
    EngineStats,
    Failed,
    GenerationRequest,
    ModelCard,
    Progress,
    Ready,
    Refused,
    RequestTimings,
    StepEvents,
    Submit,
    ToEngine,
    TokenEvent,
    TokenLogprobs,
    Usage,
)

Script = Callable[[GenerationRequest, int], Sequence[int]]
"""(request, choice) -> the token ids that choice draws, EOS where the script wants to stop."""


def fake_card(name: str = "tiny", **changes: Any) -> ModelCard:
    """Return the card of a model with the tiny byte-level tokenizer."""
    tokenizer_json = tiny_tokenizer_json()
    vocab_size = 256 + len(msgspec.json.decode(tokenizer_json)["model"]["merges"])
    vocab_size += len(SPECIAL_TOKENS)
    end_id = vocab_size - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index("<|im_end|>")
    card = ModelCard(
        name=name,
        revision="0123456789abcdef",
        architecture="fake",
        tokenizer_json=tokenizer_json,
        chat_template=CHATML_TEMPLATE,
        special_tokens=tiny_special_tokens(),
        add_bos_token=False,
        eos_token_ids=(end_id,),
        vocab_size=vocab_size,
        max_model_len=256,
        max_queued_requests=16,
        block_size=16,
        num_blocks=64,
        default_sampling={},
        weight_bytes=1 << 20,
        kv_bytes_per_token=64,
        backend="fake",
        dtype="float32",
        created=1_700_000_000,
    )
    return msgspec.structs.replace(card, **changes)


def fake_tokenizer(card: ModelCard) -> Tokenizer:
    """Return the tokenizer of a card."""
    return Tokenizer(
        card.tokenizer_json, special_tokens=card.special_tokens, add_bos_token=card.add_bos_token
    )


class FakeClient(StreamingClient):
    """Serves every request from a script, one token per choice and step, in the event loop."""

    def __init__(
        self, client_id: str = "tiny/0", card: ModelCard | None = None, *, text: str = "Hello world"
    ) -> None:
        super().__init__(client_id)
        self.card_when_ready = card or fake_card()
        self.tokenizer = fake_tokenizer(self.card_when_ready)
        self.script: Script = lambda request, choice: self.tokens_of(text)
        self.step_seconds = 0.0
        self.logprob = -0.5
        self.refusal: RequestError | None = None
        """Set: every request is refused with it."""
        self.fails_after: int | None = None
        """Set: the engine breaks on a request once it has this many steps."""
        self.may_accept = asyncio.Event()
        """Cleared: requests stay in the queue."""
        self.may_step = asyncio.Event()
        """Cleared: accepted requests stay without tokens."""
        self.may_accept.set()
        self.may_step.set()
        self.cached_tokens = 0
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def tokens_of(self, text: str, *, ends: bool = True) -> list[int]:
        """Return the tokens of a text and, where it `ends`, EOS."""
        end = self.card_when_ready.eos_token_ids[:1] if ends else ()
        return [*self.tokenizer.encode(text), *end]

    @property
    def num_running(self) -> int:
        """Requests that hold something of the engine."""
        return len(self._tasks)

    async def start(self) -> None:
        self.become_ready()

    def become_ready(self) -> None:
        """What start() does, for tests without an event loop."""
        self._receive(Ready(self.card_when_ready))

    def report(self, stage: str, fraction: float) -> None:
        """Go back to starting, so far."""
        self._set_state("starting")
        self._receive(Progress(stage, fraction))

    def fail(self, reason: str) -> None:
        """Fail for good."""
        self._receive(Failed(reason))
        self._set_state("failed")

    def die(self, message: str = "the engine process was killed by SIGKILL") -> None:
        """End every stream with EngineFailed and start again."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self._set_state("starting")
        self._streams.fail_all(lambda: EngineFailed(message))

    async def close(self) -> None:
        self._stop_streams()
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    def _send(self, frame: ToEngine) -> None:
        if isinstance(frame, Submit):
            request = msgspec.msgpack.decode(
                msgspec.msgpack.encode(frame.request), type=GenerationRequest
            )
            self.requests.append(request)
            task = asyncio.get_running_loop().create_task(self._serve(request))
            self._tasks[request.request_id] = task
        elif isinstance(frame, Abort):
            self.aborted.append(frame.request_id)
            task_or_none = self._tasks.pop(frame.request_id, None)
            if task_or_none is not None:
                task_or_none.cancel()

    async def _serve(self, request: GenerationRequest) -> None:
        request_id = request.request_id
        await self.may_accept.wait()
        if self.refusal is not None:
            self._tasks.pop(request_id, None)
            self._receive(Refused(request_id, self.refusal.info()))
            return
        self._receive(Accepted(request_id))
        outputs = [self._output(request, index) for index in range(request.sampling.n)]
        scripts = [list(self.script(request, index)) for index in range(request.sampling.n)]
        step = 0
        while any(output.finish_reason is None for output in outputs):
            await self.may_step.wait()
            await asyncio.sleep(self.step_seconds)
            events = self._step(request, outputs, scripts, step)
            step += 1
            if all(output.finish_reason is not None for output in outputs):
                self._tasks.pop(request_id, None)
            self._receive(StepEvents(events, EngineStats()))

    def _output(self, request: GenerationRequest, index: int) -> SequenceOutput:
        return SequenceOutput(
            self.tokenizer,
            request_id=request.request_id,
            index=index,
            sampling=request.sampling,
            eos_token_ids=self.card_when_ready.eos_token_ids,
            max_tokens=request.sampling.max_tokens or 0,
        )

    def _step(
        self,
        request: GenerationRequest,
        outputs: Sequence[SequenceOutput],
        scripts: Sequence[list[int]],
        step: int,
    ) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for output, script in zip(outputs, scripts, strict=True):
            if output.finish_reason is not None:
                continue
            if self.fails_after is not None and step >= self.fails_after:
                error = ErrorInfo(code="engine_failed", message="the step broke", http_status=500)
                event = output.finish("error", error=error)
            else:
                event = output.append([self._row(script, step)])
            tells_prompt = step == 0 and output is outputs[0]
            if event is None and tells_prompt and request.sampling.prompt_logprobs is not None:
                event = TokenEvent(request_id=request.request_id)
            if event is not None:
                events.append(self._complete(request, output, event, tells_prompt))
        return events

    def _row(self, script: Sequence[int], step: int) -> TokenRow:
        """Draw the script's token; behind its end the last one repeats."""
        token_id = script[min(step, len(script) - 1)]
        likely = [(token_id, self.logprob)]
        others = (other for other in range(97, 128) if other != token_id)
        likely += [(other, self.logprob - 1.0 - place) for place, other in enumerate(others)]
        return TokenRow(token_id, self.logprob, tuple(likely))

    def _complete(
        self,
        request: GenerationRequest,
        output: SequenceOutput,
        event: TokenEvent,
        tells_prompt: bool,
    ) -> TokenEvent:
        """Attach what the engine attaches: prompt log probabilities first, usage and timings last."""
        if tells_prompt and request.sampling.prompt_logprobs is not None:
            event = msgspec.structs.replace(event, prompt_logprobs=self._prompt_logprobs(request))
        if event.finish_reason is None:
            return event
        usage = Usage(len(request.prompt_token_ids), output.num_tokens, self.cached_tokens)
        timings = RequestTimings(
            queue_seconds=0.0,
            prefill_seconds=0.0,
            decode_seconds=0.0,
            ttft_seconds=0.0 if output.num_tokens else None,
            num_preemptions=0,
        )
        return msgspec.structs.replace(event, usage=usage, timings=timings)

    def _prompt_logprobs(self, request: GenerationRequest) -> list[TokenLogprobs | None]:
        wanted = request.sampling.prompt_logprobs or 0
        rows = (self._row([token_id], 0) for token_id in request.prompt_token_ids[1:])
        return [None, *(token_logprobs(self.tokenizer, row, wanted) for row in rows)]
