"""Structured logs, one line per event: for people on a console or as JSON for machines.

Text of prompts and answers never enters a log. Events carry facts; should a field that holds text or
a secret slip in all the same, it is blanked here, and tracebacks never show local variables.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO, cast

import structlog

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
HIDDEN = "(hidden)"
_PRIVATE_FIELDS = frozenset(
    "prompt prompts messages content text body completion prompt_token_ids token_ids input inputs "
    "authorization api_key key token secret password cookie headers grammar stop tenant "
    "organization".split()
)
_SECRETS = re.compile(r"(?i)\b(bearer\s+)\S+|\b(sk-|hf_|hr-)[A-Za-z0-9_\-]{8,}")


def configure_logging(
    format: str = "console", level: str = "info", stream: TextIO | None = None
) -> None:
    """Send every event of this process, and those of libraries, to `stream` (standard error by default).

    `format` is "console" or "json". A second call replaces the first. While a progress bar stands on
    the terminal, lines go above it.
    """
    target = stream or cast(TextIO, _StandardError())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        hide_private_fields,
        structlog.processors.format_exc_info,
        hide_secrets,
    ]
    renderer = _renderer(format, target)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(target),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(LEVELS[level], logging.WARNING) if level != "debug" else logging.INFO)


def get_logger(name: str) -> Any:
    """Return a logger whose events name the module they come from."""
    return structlog.get_logger(name, module=name)


def hide_private_fields(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Blank the fields that by their name hold text or a secret."""
    for name in event:
        if name in _PRIVATE_FIELDS:
            event[name] = HIDDEN
    return event


def hide_secrets(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Blank API keys inside any text of the event, its traceback included."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = _SECRETS.sub(lambda match: f"{match[1] or match[2]}{HIDDEN}", value)
    return event


class _StandardError:
    """Whatever standard error is at the moment of a write: a progress bar puts itself in its place."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


def _renderer(format: str, target: TextIO) -> structlog.typing.Processor:
    if format == "json":
        return structlog.processors.JSONRenderer(default=str)
    return structlog.dev.ConsoleRenderer(colors=target.isatty())
