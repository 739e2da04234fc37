"""Tokenizer and chat template of each model, built once from its card on a worker thread.

All text work (rendering, encoding, decoding) goes through `run`, whose few threads keep all but the
shortest off the event loop. Long texts have a thread of their own, so that a burst of them makes no short
prompt wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import anyio.to_thread
import structlog

from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.types import ModelCard

_logger = structlog.get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelText:
    """What turns one model's text into tokens and back. `template` is None where chat cannot work."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    template_problem: str = ""
    """Why there is no template, for the error that a chat request gets."""


@dataclass(slots=True)
class TextAssets:
    """One ModelText per model and revision; a restarted replica with the same card costs nothing."""

    num_threads: int = 2
    short_bytes: int = 2 << 10
    """Work on no more than this needs no thread."""
    long_bytes: int = 128 << 10
    """Work on more than this is long."""
    _texts: dict[tuple[str, str], ModelText] = field(default_factory=dict)
    _lock: anyio.Lock = field(default_factory=anyio.Lock)
    _short: anyio.CapacityLimiter | None = None
    _long: anyio.CapacityLimiter | None = None

    async def get(self, card: ModelCard) -> ModelText:
        """Return the text side of a model, building it on first use."""
        key = (card.name, card.revision)
        if key not in self._texts:
            async with self._lock:
                if key not in self._texts:
                    self._texts[key] = await self.run(lambda: build_model_text(card))
        return self._texts[key]

    async def run(self, work: Callable[[], T], *, num_bytes: int = 0) -> T:
        """Run `work` on a text thread; `num_bytes` is how much text it has, 0 where that is not known.

        A few hundred tokens are done at once: they take less time than two changes of threads.
        """
        if 0 < num_bytes <= self.short_bytes:
            return work()
        if self._short is None or self._long is None:
            self._short = anyio.CapacityLimiter(self.num_threads)
            self._long = anyio.CapacityLimiter(1)
        limiter = self._long if num_bytes > self.long_bytes else self._short
        return await anyio.to_thread.run_sync(work, limiter=limiter)


def build_model_text(card: ModelCard) -> ModelText:
    """Build the tokenizer and the template; a missing or broken template is a warning, not an end."""
    tokenizer = Tokenizer(
        card.tokenizer_json, special_tokens=card.special_tokens, add_bos_token=card.add_bos_token
    )
    problem = f"model '{card.name}' has no chat template; use /v1/completions"
    template = None
    if card.chat_template:
        try:
            template = ChatTemplate(card.chat_template, card.special_tokens)
        except Exception as error:
            problem = f"the chat template of model '{card.name}' cannot be used: {error}"
    if template is None:
        _logger.warning("chat is not available", model=card.name, reason=problem)
    return ModelText(tokenizer, template, "" if template else problem)
