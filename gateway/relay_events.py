"""The events of another server's stream on their way through: whole events out, few of them looked into.

Almost always a piece that arrives is whole events, and goes out as it is. A piece that ends inside an event
is held until the rest is there, with a bound: a server that never ends an event is cut off.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from headrace.errors import ErrorInfo
from headrace.gateway.upstream_errors import UpstreamFailed

MAX_EVENT_BYTES = 8 << 20
_ENDS = (b"\n\n", b"\n\r\n")
_FINISH = re.compile(rb'"finish_reason":\s*"([a-z_]{1,32})"')
_EVENTS = re.compile(rb"\r?\n\r?\n")
_COMMENTS = re.compile(rb"(?::[^\n]*\n\r?\n)+")
_DONE = b"[DONE]"
_LAST = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]\s")
_Count = Annotated[int, msgspec.Meta(ge=0)]


class RelayedUsage(msgspec.Struct, frozen=True):
    """The tokens that the other server counted."""

    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    prompt_tokens_details: dict[str, Any] | None = None

    @property
    def cached_tokens(self) -> int:
        cached = (self.prompt_tokens_details or {}).get("cached_tokens")
        return cached if isinstance(cached, int) else 0


class _Event(msgspec.Struct, frozen=True):
    choices: list[msgspec.Raw] | None = None
    usage: Any = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


class RelayedEvents:
    """One stream. `feed` gives what may go out of what has arrived."""

    def __init__(self, *, drop_usage: bool, rename: tuple[bytes, bytes] | None = None) -> None:
        """`rename` is (the other server's name of the model, ours) as JSON, where they differ."""
        self.usage: RelayedUsage | None = None
        self.finish_reasons: list[str] = []
        self.error: ErrorInfo | None = None
        """What the other server says went wrong, once it has said so."""
        self.is_done = False
        """Whether the event that ends a stream has come."""
        self.num_events = 0
        """So many went out, about one per token: what counts where they say nothing of usage."""
        self._drop_usage = drop_usage
        self._renames = _renames(*rename) if rename else ()
        self._held: list[bytes] = []
        self._held_bytes = 0

    def feed(self, piece: bytes) -> bytes:
        """Return the whole events that are complete now. Raises UpstreamFailed where one has no end."""
        if self._held or not piece.endswith(_ENDS):
            piece = self._complete(piece)
        if not self.num_events and piece.startswith(b":"):
            piece = _COMMENTS.sub(b"", piece, 1)  # a sign of life is no answer
        if b'"usage"' in piece or b'"error"' in piece:
            piece = self._inspect(piece)
        for theirs, ours in self._renames:
            piece = piece.replace(theirs, ours)
        if b'"finish_reason"' in piece:
            self.finish_reasons += [found.decode() for found in _FINISH.findall(piece)]
        if _DONE in piece and _LAST.search(piece):
            self.is_done = True
        self.num_events += piece.count(b"\n\n") + piece.count(b"\n\r\n")
        return piece

    def finish(self) -> bytes:
        """Return what is left at the end: some servers write no blank line after the last event."""
        return self.feed(b"\n\n") if b"".join(self._held).strip() else b""

    def _complete(self, piece: bytes) -> bytes:
        """Return the whole events of what is held and `piece`; hold the rest."""
        seam = b"".join(self._held[-2:])[-2:]
        joined = seam + piece
        ends = [joined.rfind(end) + len(end) for end in _ENDS if end in joined]
        if not ends:
            self._hold(piece)
            return b""
        cut = max(ends) - len(seam)
        whole = b"".join([*self._held, piece[: max(0, cut)]])
        self._held, self._held_bytes = [], 0
        if cut < len(piece):
            self._hold(piece[max(0, cut) :])
        return whole

    def _hold(self, piece: bytes) -> None:
        if not piece:
            return
        self._held.append(piece)
        self._held_bytes += len(piece)
        if self._held_bytes > MAX_EVENT_BYTES:
            raise UpstreamFailed(f"the server behind sent an event of over {MAX_EVENT_BYTES} bytes")

    def _inspect(self, piece: bytes) -> bytes:
        """Take usage and errors out of whole events; leave out the event that has only usage."""
        kept = []
        for event in _EVENTS.split(piece)[:-1]:
            try:
                seen = _EVENT.decode(event.partition(b"data:")[2])
            except msgspec.MsgspecError:
                seen = _Event()
            if seen.error is not None:
                self.error = error_of(seen.error, 502)
            if seen.usage is not None:
                self.usage = usage_of(seen.usage) or self.usage
                if self._drop_usage and not seen.choices and seen.error is None:
                    continue
            kept.append(event + b"\n\n")
        return b"".join(kept)


def usage_of(usage: Any) -> RelayedUsage | None:
    """Return another server's usage object; None where it has none, or none that makes sense."""
    try:
        return msgspec.convert(usage, RelayedUsage)
    except msgspec.ValidationError:
        return None


def _renames(theirs: bytes, ours: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """Return what to replace in an answer, for both ways of writing JSON.

    Inside a text the quotes would be escaped, so that no answer's content is touched.
    """
    return tuple((b'"model":' + gap + theirs, b'"model":' + gap + ours) for gap in (b"", b" "))


def renamed(content: bytes, theirs: bytes, ours: bytes) -> bytes:
    """Return an answer in one piece with our name of the model."""
    for old, new in _renames(theirs, ours):
        content = content.replace(old, new, 1)
    return content


def error_of(error: Any, http_status: int, retry_after_seconds: float | None = None) -> ErrorInfo:
    """Return another server's error object as ours; a form that nobody knows as itself."""
    fields = error if isinstance(error, dict) else {"message": error}
    message, code = fields.get("message"), fields.get("code")
    return ErrorInfo(
        code=code if isinstance(code, str) else "upstream_failed",
        message=message if isinstance(message, str) else "the server behind reported an error",
        http_status=http_status,
        retry_after_seconds=retry_after_seconds,
    )
