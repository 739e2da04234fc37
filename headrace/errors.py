"""Every error Headrace raises on purpose, as one tree.

    HeadraceError
    ├── ConfigError           the YAML, a flag or an environment variable is wrong
    ├── PluginError           a plugin cannot be loaded, or breaks its contract at start
    ├── BackendUnavailable    the chosen backend cannot run here
    ├── ModelError            a checkpoint cannot be fetched, read or served
    └── RequestError          one request cannot be served; knows its HTTP status
        ├── InvalidRequest            400  the caller can fix it; names the parameter
        │   └── ContextLengthExceeded 400
        ├── ModelNotFound             404
        ├── RateLimited               429  the caller's own limit
        ├── RequestAborted            499  the caller left
        ├── EngineFailed              500  the engine broke while serving it
        └── Unavailable               503  overloaded, starting or stopping; carries Retry-After

A message says what, the value, the allowed values and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

import msgspec

_SHOWN_CHARACTERS = 60


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request error as data: what travels in frames and becomes a JSON body or an SSE event."""

    code: str
    message: str
    http_status: int
    param: str | None = None
    retry_after_seconds: float | None = None
    reason: str | None = None
    """For machines: which limit, which kind of overload. A word of ours, never of a caller's."""


class HeadraceError(Exception):
    """Anything Headrace reports on purpose."""


class ConfigError(HeadraceError):
    """A configuration value is wrong. The message names file, line and key."""


class PluginError(HeadraceError):
    """A plugin cannot be loaded or does not keep its contract."""


class BackendUnavailable(HeadraceError):
    """The chosen backend cannot run on this machine."""


class ModelError(HeadraceError):
    """A checkpoint cannot be fetched, read or served."""


class RequestError(HeadraceError):
    """One request cannot be served."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self.reason = reason

    def info(self) -> ErrorInfo:
        return ErrorInfo(
            code=self.code,
            message=str(self),
            http_status=self.http_status,
            param=self.param,
            retry_after_seconds=self.retry_after_seconds,
            reason=self.reason,
        )


class InvalidRequest(RequestError):
    code = "invalid_value"
    http_status = 400


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    code = "model_not_found"
    http_status = 404


class RateLimited(RequestError):
    code = "rate_limit_exceeded"
    http_status = 429


class RequestAborted(RequestError):
    code = "request_aborted"
    http_status = 499


class EngineFailed(RequestError):
    code = "engine_failed"
    http_status = 500


class Unavailable(RequestError):
    code = "unavailable"
    http_status = 503


class RemoteError(RequestError):
    """A request error that arrived as data from an engine process."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(
            info.message,
            param=info.param,
            retry_after_seconds=info.retry_after_seconds,
            reason=info.reason,
        )
        self._info = info

    def info(self) -> ErrorInfo:
        return self._info


def shown(value: float | str) -> str:
    """Return a value as messages show it: short, however long a caller made it."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'? Known: a, b, x" (the first sentence only where something is near)."""
    names = sorted(known)
    near = difflib.get_close_matches(shown(value), names, n=1)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    return f"{hint}Known: {', '.join(names) or 'none'}"
