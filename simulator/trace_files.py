"""Reads traces: Mooncake JSONL, Azure and BurstGPT CSV, and the gateway's own JSON log.

The format is seen from the first line that says something. A line that cannot be read is an error with
its number, because a trace that loses lines is another load.
"""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError
from headrace.simulator.trace import (
    HASH_BLOCK_TOKENS,
    MooncakeRow,
    Trace,
    TraceRequest,
    in_order,
)

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_FORMATS = (
    "Mooncake JSONL (timestamp, input_length, output_length), Azure CSV (TIMESTAMP, ContextTokens, "
    "GeneratedTokens), BurstGPT CSV (Timestamp, Request tokens, Response tokens), or the gateway's log "
    "as JSON lines"
)

Lines = Iterable[tuple[int, str]]


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """Return the trace in a file, its first `limit` requests at most.

    Raises ConfigError where the file is none, with the line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            first = next(lines, None)
            if first is None:
                raise ConfigError(f"--trace {path}: the file is empty; give {_FORMATS}")
            read = _reader(path, first[1])
            requests = []
            for request in read(path, first[1], lines):
                requests.append(request)
                if len(requests) == limit:
                    break
    except OSError as error:
        raise ConfigError(f"--trace {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--trace {path}: is no text; give {_FORMATS}") from None
    if not requests:
        raise ConfigError(f"--trace {path}: no request with an output is in it; give {_FORMATS}")
    return in_order(path.stem, requests)


def _reader(path: Path, first: str) -> Callable[[Path, str, Lines], Iterator[TraceRequest]]:
    if first.lstrip().startswith("{"):
        return _mooncake if '"input_length"' in first else _own_log
    names = [name.strip() for name in next(csv.reader([first]))]
    if all(name in names for name in _AZURE):
        return _azure
    if all(name in names for name in _BURSTGPT):
        return _burstgpt
    raise ConfigError(f"--trace {path}: line 1 is no format known here; give {_FORMATS}")


def _mooncake(path: Path, first: str, lines: Lines) -> Iterator[TraceRequest]:
    decode = msgspec.json.Decoder(MooncakeRow).decode
    for number, line in _again(first, lines):
        try:
            row = decode(line)
        except msgspec.DecodeError as error:
            raise _bad(path, number, str(error)) from None
        expected = -(-row.input_length // HASH_BLOCK_TOKENS)
        if row.hash_ids and len(row.hash_ids) != expected:
            raise _bad(
                path,
                number,
                f"hash_ids has {len(row.hash_ids)} ids, and input_length {row.input_length} makes "
                f"{expected} blocks of {HASH_BLOCK_TOKENS} tokens",
            )
        yield _request(
            path,
            number,
            at=row.timestamp / 1000,
            prompt=row.input_length,
            output=row.output_length,
            hash_ids=row.hash_ids,
            tenant=row.tenant,
            session=row.session_id,
            priority=row.priority,
            ttft_target_seconds=row.ttft,
            tpot_target_seconds=row.tpot,
        )


def _azure(path: Path, first: str, lines: Lines) -> Iterator[TraceRequest]:
    for number, row in _table(path, first, lines):
        try:
            at = datetime.datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, TypeError) as error:
            raise _bad(path, number, str(error)) from None
        if output:
            yield _request(path, number, at=at, prompt=prompt, output=output)


def _burstgpt(path: Path, first: str, lines: Lines) -> Iterator[TraceRequest]:
    """Rows without response tokens are requests that failed, and are left out."""
    for number, row in _table(path, first, lines):
        try:
            at = float(row["Timestamp"])
            prompt, output = int(row["Request tokens"]), int(row["Response tokens"])
        except (ValueError, TypeError) as error:
            raise _bad(path, number, str(error)) from None
        if output:
            session = row.get("Session ID") or ""
            yield _request(path, number, at=at, prompt=prompt, output=output, session=session)


def _own_log(path: Path, first: str, lines: Lines) -> Iterator[TraceRequest]:
    """Of the gateway's log, the requests that were answered; other events are passed over."""
    for number, line in _again(first, lines):
        try:
            entry = json.loads(line)
            if entry.get("event") != "request finished" or not entry.get("completion_tokens"):
                continue
            ended = datetime.datetime.fromisoformat(entry["timestamp"]).timestamp()
            at = ended - float(entry["duration_seconds"])
            prompt, output = int(entry["prompt_tokens"]), int(entry["completion_tokens"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _bad(path, number, f"{type(error).__name__}: {error}") from None
        if prompt:
            tenant = str(entry.get("tenant") or "")
            yield _request(path, number, at=at, prompt=prompt, output=output, tenant=tenant)


def _again(first: str, lines: Lines) -> Iterator[tuple[int, str]]:
    yield 1, first
    yield from lines


def _table(path: Path, first: str, lines: Lines) -> Iterator[tuple[int, dict[str, str]]]:
    names = [name.strip() for name in next(csv.reader([first]))]
    for number, line in lines:
        cells = next(csv.reader([line]))
        if len(cells) < len(names):
            raise _bad(path, number, f"it has {len(cells)} of {len(names)} columns")
        yield number, dict(zip(names, cells, strict=False))


def _request(
    path: Path, number: int, *, at: float, prompt: int, output: int, **more: Any
) -> TraceRequest:
    if prompt < 1 or output < 1 or not abs(at) < 1e15:
        raise _bad(
            path,
            number,
            f"time {at:g}, prompt {prompt}, output {output}: times are finite, lengths from 1 token",
        )
    return TraceRequest(at, prompt, output, **more)


def _bad(path: Path, number: int, reason: str) -> ConfigError:
    return ConfigError(f"--trace {path}: line {number}: {reason}; correct or remove the line")
