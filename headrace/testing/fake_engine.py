"""An engine without a model: each step gives every running request the next number as its token.

For tests of whatever stands around an engine (loop, clients, router, gateway): its output is known
beforehand and its failures happen when asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.engine.policy_switch import PolicySwitch
from headrace.errors import InvalidRequest, Unavailable
from headrace.types import EngineStats, GenerationRequest, ModelCard, TokenEvent, Usage

FAILING_TOKEN = 13
"""A prompt that starts with this token makes the step that serves it raise, once it has 3 tokens."""


class FakeEngine:
    """Runs at most `max_running` requests; a step takes `step_seconds` of real time."""

    def __init__(
        self, *, max_running: int = 4, max_queued: int = 64, step_seconds: float = 0.0
    ) -> None:
        self.step_seconds = step_seconds
        self.is_closed = False
        self.aborted: list[str] = []
        self.prefilled: list[str] = []
        self._max_running = max_running
        self._max_queued = max_queued
        self._waiting: dict[str, GenerationRequest] = {}
        self._running: dict[str, tuple[GenerationRequest, int]] = {}
        self._steps = 0
        self._tokens = 0

    def submit(self, request: GenerationRequest) -> None:
        if request.prompt_token_ids[0] == 0:
            raise InvalidRequest("token 0 is refused", param="prompt")
        if len(self._waiting) >= self._max_queued:
            raise Unavailable("the queue is full", retry_after_seconds=1.0)
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        waiting = self._waiting.pop(request_id, None)
        running = self._running.pop(request_id, None)
        return waiting is not None or running is not None

    def prepare(self) -> bool:
        return False

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[TokenEvent]:
        self._steps += 1
        if self.step_seconds:
            time.sleep(self.step_seconds)
        while self._waiting and len(self._running) < self._max_running:
            request_id = next(iter(self._waiting))
            self._running[request_id] = (self._waiting.pop(request_id), 0)
            self.prefilled.append(request_id)
        events: list[TokenEvent] = []
        for request_id, (request, count) in list(self._running.items()):
            if request.prompt_token_ids[0] == FAILING_TOKEN and count == 3:
                raise RuntimeError("the kernel failed in /secret/path")
            events += self._advance(request_id, request, count + 1)
        return events

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks=64,
            num_free_blocks=64 - len(self._running),
            generation_tokens_total=self._tokens,
            steps_total=self._steps,
            step_seconds_total=self._steps * self.step_seconds,
        )

    def close(self) -> None:
        self.is_closed = True

    def _advance(self, request_id: str, request: GenerationRequest, count: int) -> list[TokenEvent]:
        is_last = count == (request.sampling.max_tokens or 16)
        if is_last:
            del self._running[request_id]
        else:
            self._running[request_id] = (request, count)
        self._tokens += request.sampling.n
        usage = Usage(len(request.prompt_token_ids), count, 0) if is_last else None
        return [
            TokenEvent(
                request_id=request_id,
                index=index,
                token_ids=[count],
                text=f"{count} ",
                finish_reason="length" if is_last else None,
                usage=usage,
            )
            for index in range(request.sampling.n)
        ]


@dataclass(frozen=True, slots=True)
class FakeBuilt:
    """What a build function returns."""

    engine: FakeEngine
    card: ModelCard
    switch: PolicySwitch | None = None


def fake_card(name: str = "fake") -> ModelCard:
    """Return the card of a model that knows no text."""
    return ModelCard(
        name=name,
        revision="fake",
        architecture="fake",
        tokenizer_json="{}",
        chat_template=None,
        special_tokens={},
        add_bos_token=False,
        eos_token_ids=(2,),
        vocab_size=1000,
        max_model_len=4096,
        max_queued_requests=64,
        block_size=16,
        num_blocks=64,
        default_sampling={},
        weight_bytes=0,
        kv_bytes_per_token=0,
        backend="fake",
        dtype="float32",
    )


def build_fake(replica: Mapping[str, Any], *, report: Callable[[str, float], None]) -> FakeBuilt:
    """Stand in for headrace.build.build_engine; `replica` holds FakeEngine's arguments and "name"."""
    options = dict(replica)
    card = fake_card(options.pop("name", "fake"))
    report("load", 0.5)
    return FakeBuilt(FakeEngine(**options), card)
