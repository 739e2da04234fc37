"""Logs are one line per event and never hold text or secrets."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest
import structlog

from headrace.cli.progress import stage_progress
from headrace.logs import LEVELS, configure_logging, get_logger

CANARY = "the-canary-sings"


@pytest.fixture(autouse=True)
def leave_logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    before = structlog.get_config()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**before)


def logged(format: str = "json", level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(format, level, stream)
    return stream


def test_json_is_one_object_per_line() -> None:
    stream = logged()
    get_logger("headrace.gateway").info(
        "request_finished", request_id="r\n1", tokens=3, odd=object()
    )
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event["event"] == "request_finished"
    assert (event["request_id"], event["tokens"], event["level"]) == ("r\n1", 3, "info")
    assert event["module"] == "headrace.gateway"


def test_console_is_for_people() -> None:
    stream = logged("console")
    get_logger("m").warning("policy_failed", policy="odd")
    assert "policy_failed" in stream.getvalue()
    assert "policy=odd" in stream.getvalue()
    assert "\x1b[" not in stream.getvalue()


@pytest.mark.parametrize("level", LEVELS)
def test_events_below_the_level_are_dropped(level: str) -> None:
    stream = logged(level=level)
    for name in LEVELS:
        getattr(get_logger("m"), name)(name)
    names = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert names == list(LEVELS)[list(LEVELS).index(level) :]


def test_libraries_log_the_same_way() -> None:
    stream = logged()
    logging.getLogger("uvicorn.error").warning("port %s is taken", 8000)
    logging.getLogger("uvicorn.error").info("chatter")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["event"] == "port 8000 is taken"


def test_a_bound_request_id_is_in_every_event() -> None:
    stream = logged()
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        get_logger("m").info("a")
    get_logger("m").info("b")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["request_id"] == "r1"
    assert "request_id" not in second


@pytest.mark.parametrize("format", ["json", "console"])
@pytest.mark.parametrize(
    "field",
    [
        "prompt",
        "messages",
        "text",
        "content",
        "body",
        "authorization",
        "api_key",
        "headers",
        "token_ids",
        "stop",
    ],
)
def test_a_field_that_holds_text_or_a_secret_is_blanked(format: str, field: str) -> None:
    stream = logged(format)
    get_logger("m").info("x", **{field: [CANARY]})
    assert CANARY not in stream.getvalue()
    assert field in stream.getvalue()


@pytest.mark.parametrize("format", ["json", "console"])
@pytest.mark.parametrize("secret", ["Bearer {}", "bearer  {}", "sk-{}", "hf_{}"])
def test_keys_inside_other_text_are_blanked(format: str, secret: str) -> None:
    stream = logged(format)
    text = f"upstream refused {secret.format(CANARY)}, gave 401"
    get_logger("m").info(text, error=text)
    logging.getLogger("httpx").warning("%s", text)
    try:
        raise RuntimeError(text)
    except RuntimeError:
        get_logger("m").exception("failed")
        logging.getLogger("httpx").exception("failed")
    assert CANARY not in stream.getvalue()
    assert "401" in stream.getvalue()


@pytest.mark.parametrize("format", ["json", "console"])
def test_tracebacks_show_no_local_variables(format: str) -> None:
    stream = logged(format)

    def serve(prompt: str) -> None:
        raise RuntimeError("the engine broke")

    try:
        serve("".join(["the-canary", "-sings"]))
    except RuntimeError:
        get_logger("m").exception("failed")
    assert "the engine broke" in stream.getvalue()
    assert CANARY not in stream.getvalue()


def test_configuring_twice_does_not_log_twice() -> None:
    logged()
    stream = logged()
    get_logger("m").info("once")
    logging.getLogger("lib").warning("once")
    assert len(stream.getvalue().splitlines()) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_go_above_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar is drawn again and again on its line; an event must not end up behind it."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    configure_logging("console")
    with stage_progress() as report:
        report("load", 0.5)
        structlog.get_logger("t").warning("something happened")
        logging.getLogger("library").warning("something else")
        report("load", 0.6)
    lines = terminal.getvalue().splitlines()
    for event in ("something happened", "something else"):
        (line,) = [line for line in lines if event in line]
        before = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line.partition(event)[0])
        assert "load" not in before and "%" not in before, line


@pytest.mark.parametrize("name", ["tenant", "organization", "key", "api_key"])
def test_who_asks_is_not_told(name: str) -> None:
    """U03: should a plugin log whom a request is for, the name stays out."""
    stream = logged()
    get_logger("policy").info("refused", **{name: CANARY})
    assert CANARY not in stream.getvalue() and "refused" in stream.getvalue()
