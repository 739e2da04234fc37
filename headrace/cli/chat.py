"""`headrace chat`: a conversation in the terminal, with a running server or with an engine of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import typer

from headrace.cli.options import ConfigFile, ModelSource, Settings, load
from headrace.cli.progress import stage_progress

Reply = Callable[[list[dict[str, str]]], Iterator[str]]


def chat(
    config: ConfigFile = None,
    model: ModelSource = None,
    url: str | None = typer.Option(
        None, help="Talk to this server, such as http://127.0.0.1:8000, instead of loading a model."
    ),
    system: str | None = typer.Option(None, help="A system message to start with."),
    max_tokens: int = typer.Option(512, help="Tokens of one answer at most."),
    temperature: float | None = typer.Option(None, help="0 is greedy. Default: the model's own."),
    settings: Settings = None,
) -> None:
    """Talk to a model. An empty line or Ctrl-D ends the conversation."""
    options: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        options["temperature"] = temperature
    messages = [{"role": "system", "content": system}] if system else []
    if url is not None:
        converse(messages, lambda history: http_reply(url, model, history, options))
        return
    loaded = load(config, model=model, settings=settings)
    from headrace.llm import LLM
    from headrace.logs import configure_logging

    configure_logging(
        loaded.config.logging.format, loaded.config.logging.level
    )  # not among the text

    with stage_progress() as report:
        llm = LLM.from_config(loaded.config, report=report)
    with llm:
        sampling = llm.sampling(**options)
        converse(messages, lambda history: llm.stream(history, sampling))


def converse(messages: list[dict[str, str]], reply: Reply) -> None:
    """Read lines and print answers until the input ends. The history grows in `messages`."""
    while True:
        try:
            line = input("you> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            break
        if not line:
            break
        messages.append({"role": "user", "content": line})
        pieces = []
        for piece in reply(messages):
            sys.stdout.write(piece)
            sys.stdout.flush()
            pieces.append(piece)
        sys.stdout.write("\n")
        messages.append({"role": "assistant", "content": "".join(pieces)})


def http_reply(
    url: str, model: str | None, history: list[dict[str, str]], options: dict[str, Any]
) -> Iterator[str]:
    """Yield the pieces of a streamed chat answer. Raises HeadraceError with the server's own message."""
    import httpx

    from headrace.errors import HeadraceError

    url = url.rstrip("/")
    body = {"model": model, "messages": history, "stream": True, **options}
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as response:
            if response.status_code != 200:
                response.read()
                raise HeadraceError(f"{url} answered {response.status_code}: {response.text[:500]}")
            yield from pieces_of(response.iter_lines())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise HeadraceError(
            f"{url}: {error}. Give --url the address that `headrace serve` prints, "
            "such as http://127.0.0.1:8000"
        ) from error


def pieces_of(lines: Iterable[str]) -> Iterator[str]:
    """Yield the text of a stream's events. Raises HeadraceError with an error the server sends."""
    from headrace.errors import HeadraceError

    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line[6:])
        if event.get("error"):
            raise HeadraceError(str(event["error"].get("message")))
        for choice in event.get("choices") or ():
            yield choice["delta"].get("content") or ""
