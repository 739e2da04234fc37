"""What one choice has said so far, and when it ends: tokens in, text that may be sent out.

Everything that ends a choice is decided here and nowhere else, token by token, so that a run of
several tokens ends at the same place as the tokens one at a time:

- An EOS id (unless ignored) or a stop token id ends it once `min_tokens` tokens came before. Its text
  is not part of the output.
- A stop string ends it, except inside the text of the first `min_tokens - 1` tokens, which is not
  searched. The output ends just before the string.
- `max_tokens` tokens end it with "length", unless the last of them is a stop.

An event's `token_ids` are all tokens generated, the ending ones included, so that their number is the
usage. Its log probabilities are those of tokens that are part of the output: a token goes out with the
first character it contributes to, a token cut in the middle by a stop string is there whole, and tokens
that lie entirely in a stop string, or end the choice themselves, have no entry.

Where the answer is wanted whole, a choice says its first news and then nothing until it ends; what needs
no look at each token's text is decoded then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headrace.errors import ErrorInfo
from headrace.text.detokenizer import Detokenizer
from headrace.text.stop_matcher import StopMatcher
from headrace.text.tokenizer import Tokenizer
from headrace.types import SamplingParams, TokenAlternative, TokenEvent, TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot write."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One drawn token, its log probability and the likeliest alternatives, best first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(tokenizer: Tokenizer, row: TokenRow, num_top: int) -> TokenLogprobs:
    """Return a row's log probabilities as they travel, with `num_top` alternatives at most."""
    return TokenLogprobs(
        chosen=_alternative(tokenizer, row.token_id, row.logprob),
        top=[
            _alternative(tokenizer, token_id, logprob)
            for token_id, logprob in row.top[:num_top]
            if token_id >= 0
        ],
    )


class SequenceOutput:
    """The output of one choice of one request. Called by the engine's thread only.

    Without a tokenizer it says token ids and no text, which is all that a simulation looks at.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        request_id: str,
        index: int,
        sampling: SamplingParams,
        eos_token_ids: Collection[int],
        max_tokens: int,
        is_whole: bool = False,
    ) -> None:
        """`is_whole`: there is one event at the beginning and one at the end, and none between."""
        self.token_ids: list[int] = []
        """Every token accepted, the one that ended the choice included."""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._request_id = request_id
        self._index = index
        self._max_tokens = max_tokens
        self._min_tokens = sampling.min_tokens
        self._num_top = sampling.logprobs
        self._eos_ids = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._ending_ids = self._eos_ids | self._stop_ids
        self._is_plain = not sampling.stop and sampling.logprobs is None
        self.ends_by_length_only = self._is_plain and not self._ending_ids
        """Whether what is drawn cannot end the choice, only how much."""
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._matcher = StopMatcher(sampling.stop)
        self._num_decoded = 0  # characters the tokens have given
        self._num_released = 0  # of those, how many may be sent
        self._text = ""  # released, for the next event
        self._waiting: deque[tuple[int, TokenRow]] = deque()  # (num_decoded before it, row), unsent
        self._num_sent = 0  # tokens whose ids have gone out
        self._is_whole = is_whole
        self._first_undecoded = -1  # of tokens whose text nobody asked for yet; -1: there are none

    @property
    def num_tokens(self) -> int:
        """Tokens generated: the completion tokens of the usage."""
        return len(self.token_ids)

    @property
    def num_tokens_left(self) -> int:
        """Tokens until max_tokens."""
        return self._max_tokens - len(self.token_ids)

    def append_token(self, token_id: int) -> TokenEvent | None:
        """Take one token without log probabilities, which is what most steps give. See `append`."""
        token_ids = self.token_ids
        num_tokens = len(token_ids) + 1
        if (
            not self._is_plain
            or num_tokens >= self._max_tokens
            or token_id in self._ending_ids
            or self.finish_reason is not None
        ):
            return self.append((TokenRow(token_id),))
        token_ids.append(token_id)
        if self._is_whole and self._num_sent:
            if self._first_undecoded < 0:
                self._first_undecoded = num_tokens - 1
            return None
        text = ""
        if self._detokenizer is not None:
            text = self._detokenizer.append(token_id)
            if not text:
                return None
        start, self._num_sent = self._num_sent, num_tokens
        return TokenEvent(
            request_id=self._request_id,
            index=self._index,
            token_ids=[token_id] if num_tokens == start + 1 else token_ids[start:],
            text=text,
        )

    def append_run(self, token_ids: Sequence[int]) -> TokenEvent | None:
        """Take the tokens of several steps, at most `num_tokens_left`, where only the length can end it."""
        assert self.ends_by_length_only, "a run is taken unseen"
        self._catch_up()
        self.token_ids += token_ids
        if self._detokenizer is not None:
            self._text += "".join(map(self._detokenizer.append, token_ids))
        if self.num_tokens >= self._max_tokens:
            self._end("length")
            return self._event()
        if self._is_whole and self._num_sent:
            return None
        text, self._text = self._text, ""
        if not text and self._detokenizer is not None:
            return None
        said = self.token_ids[self._num_sent :]
        self._num_sent = self.num_tokens
        return TokenEvent(request_id=self._request_id, index=self._index, token_ids=said, text=text)

    def append(self, rows: Sequence[TokenRow]) -> TokenEvent | None:
        """Take the tokens of a step. Return what may be said now, None where there is nothing.

        Tokens behind the one that ends the choice are dropped. With `max_tokens` 0 every call ends it.
        """
        if self.finish_reason is not None:
            return None
        if self._max_tokens == 0:
            return self.finish("length")
        self._catch_up()
        for row in rows:
            self._take(row)
            if self.finish_reason is not None:
                break
        return self._event()

    def finish(self, reason: str, *, error: ErrorInfo | None = None) -> TokenEvent | None:
        """End the choice from outside ("abort", "error", "length"). None where it had ended already."""
        if self.finish_reason is not None:
            return None
        self._catch_up()
        self._end(reason)
        return self._event(error)

    def _catch_up(self) -> None:
        """Decode the tokens whose text nobody asked for yet."""
        first, self._first_undecoded = self._first_undecoded, -1
        if first >= 0 and self._detokenizer is not None:
            self._text += "".join(map(self._detokenizer.append, self.token_ids[first:]))

    def _take(self, row: TokenRow) -> None:
        token_id = row.token_id
        self.token_ids.append(token_id)
        if self.num_tokens > self._min_tokens:
            if token_id in self._eos_ids:
                return self._end("stop")
            if token_id in self._stop_ids:
                return self._end("stop", token_id)
        if not self._is_plain:
            self._waiting.append((self._num_decoded, row))
        if self._detokenizer is not None:
            self._release(self._detokenizer.append(token_id))
        if self.finish_reason is None and self.num_tokens >= self._max_tokens:
            self._end("length")

    def _release(self, text: str) -> None:
        """Pass decoded text on, through the stop strings once they count."""
        self._num_decoded += len(text)
        if self.num_tokens >= self._min_tokens:
            text = self._matcher.append(text)
            if self._matcher.matched is not None:
                self.finish_reason = "stop"
                self.stop_reason = self._matcher.matched
        self._text += text
        self._num_released += len(text)

    def _end(self, reason: str, stop_reason: int | None = None) -> None:
        """Release all that was held: nothing follows it. A stop string may still show up in it."""
        if self._detokenizer is not None:
            self._release(self._detokenizer.flush())
        if self.finish_reason is not None:
            return
        tail = self._matcher.flush()
        self._text += tail
        self._num_released += len(tail)
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def _event(self, error: ErrorInfo | None = None) -> TokenEvent | None:
        ended = self.finish_reason is not None
        if not ended and self._is_whole and self._num_sent:
            return None
        if not (self._text or ended or self._detokenizer is None):
            return None
        rows = self._visible_rows()
        says_all = ended or self._is_plain  # without stop strings, text in hand is of every token
        num_sent = self.num_tokens if says_all else self._num_sent + len(rows)
        event = TokenEvent(
            request_id=self._request_id,
            index=self._index,
            token_ids=self.token_ids[self._num_sent : num_sent],
            text=self._text,
            logprobs=self._logprobs(rows),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=error,
        )
        self._num_sent = num_sent
        self._text = ""
        return event

    def _visible_rows(self) -> list[TokenRow]:
        """Take from the waiting rows those whose first character has been released."""
        rows: list[TokenRow] = []
        waiting = self._waiting
        cut = self._matcher.matched is not None
        uncut_end = self.finish_reason is not None and not cut
        while waiting and (uncut_end or waiting[0][0] < self._num_released):
            rows.append(waiting.popleft()[1])
        return rows

    def _logprobs(self, rows: Sequence[TokenRow]) -> list[TokenLogprobs] | None:
        num_top = self._num_top
        if num_top is None:
            return None
        assert self._tokenizer is not None, "log probabilities spell their tokens"
        return [token_logprobs(self._tokenizer, row, num_top) for row in rows]


def _alternative(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> TokenAlternative:
    value = LOWEST_LOGPROB if logprob is None else max(logprob, LOWEST_LOGPROB)
    return TokenAlternative(
        token_id=token_id,
        logprob=value,
        text=tokenizer.token_text(token_id),
        raw=tokenizer.token_bytes(token_id),
    )
