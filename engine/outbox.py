"""What an engine has said and nobody has taken yet: bounded, because news of one choice merges.

An engine never waits for its reader. However long the reader stays away, a choice holds at most the
tokens it may generate, progress and statistics hold their newest value, and everything else is one small
frame per request.
"""

from __future__ import annotations

import threading
from collections import deque

import msgspec

from headrace.types import (
    Accepted,
    EngineStats,
    Failed,
    FromEngine,
    Progress,
    Ready,
    StepEvents,
    TokenEvent,
    TokenLogprobs,
)


class _JoinedEvents:
    """Several events of one choice, growing in place so that joining stays linear."""

    __slots__ = ("first", "last", "logprobs", "texts", "token_ids")

    def __init__(self, first: TokenEvent) -> None:
        self.first = first
        self.last = first
        self.token_ids = list(first.token_ids)
        self.texts = [first.text]
        self.logprobs: list[TokenLogprobs] | None = (
            None if first.logprobs is None else list(first.logprobs)
        )

    def add(self, event: TokenEvent) -> None:
        self.last = event
        self.token_ids += event.token_ids
        self.texts.append(event.text)
        if event.logprobs is not None:
            self.logprobs = (self.logprobs or []) + event.logprobs

    def event(self) -> TokenEvent:
        return msgspec.structs.replace(
            self.last,
            token_ids=self.token_ids,
            text="".join(self.texts),
            logprobs=self.logprobs,
            prompt_logprobs=self.first.prompt_logprobs,
        )


class EventBuffer:
    """Events in order, one per choice: a later event of a choice joins the one that waits."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], TokenEvent | _JoinedEvents] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, event: TokenEvent) -> None:
        key = (event.request_id, event.index)
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = event
            return
        if isinstance(waiting, TokenEvent):
            waiting = self._waiting[key] = _JoinedEvents(waiting)
        waiting.add(event)

    def drop(self, request_id: str) -> None:
        """Forget what waits for a request."""
        for key in [key for key in self._waiting if key[0] == request_id]:
            del self._waiting[key]

    def take(self) -> list[TokenEvent]:
        """Return what waits, joined, and start anew."""
        taken = [
            waiting if isinstance(waiting, TokenEvent) else waiting.event()
            for waiting in self._waiting.values()
        ]
        self._waiting.clear()
        return taken


class Outbox:
    """Frames from the engine's thread to whoever delivers them. Any thread may call any method."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: deque[FromEngine] = deque()
        self._progress: Progress | None = None
        self._events = EventBuffer()
        self._stats: EngineStats | None = None
        self._milestones: list[Ready | Failed] = []
        self._step_seconds = 0.0
        self._closed = False
        self._is_woken = False

    def put(self, frame: FromEngine, *, wakes: bool = True) -> bool:
        """Add a frame, never waiting. Return whether nothing else was waiting to be taken.

        `wakes`: whoever waits for frames is told; without it somebody takes them anyway.
        """
        with self._changed:
            was_empty = not self.has_frames
            if isinstance(frame, StepEvents):
                for event in frame.events:
                    self._events.add(event)
                self._stats = frame.stats
                self._step_seconds += frame.step_seconds
            elif isinstance(frame, Progress):
                self._progress = frame
            elif isinstance(frame, Ready | Failed):
                self._milestones.append(frame)
            else:
                if isinstance(frame, Accepted):
                    self._events.drop(frame.request_id)  # of an aborted request with the same id
                self._frames.append(frame)
            if wakes:
                self._changed.notify()
            return was_empty

    def take(self, timeout: float | None = 0) -> list[FromEngine]:
        """Return all that waits, waiting up to `timeout` seconds for something (None: until closed).

        Answers to submissions come before events, so that a request's Accepted always precedes its
        events. Ready and Failed come last: whoever reads them has read everything before.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.has_frames or self._closed, timeout)
            taken: list[FromEngine] = []
            if self._progress is not None:
                taken.append(self._progress)
            taken += self._frames
            if self._stats is not None:
                taken.append(StepEvents(self._events.take(), self._stats, self._step_seconds))
            taken += self._milestones
            self._frames.clear()
            self._milestones.clear()
            self._progress = self._stats = None
            self._step_seconds = 0.0
            self._is_woken = False
            return taken

    def wait(self) -> None:
        """Wait until there are frames to take, or `wake` or `close` is called."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_frames or self._closed or self._is_woken)

    def wake(self) -> None:
        """End a `wait` even where there is nothing to take."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    @property
    def has_frames(self) -> bool:
        """Whether something waits to be taken."""
        is_news = self._progress is not None or self._stats is not None
        return is_news or bool(self._frames or self._milestones)

    @property
    def is_closed(self) -> bool:
        """Whether nothing more will come."""
        return self._closed

    def close(self) -> None:
        """Wake whoever waits: nothing more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
