"""`headrace generate`: one prompt, no server."""

from __future__ import annotations

import sys

import typer

from headrace.cli.options import ConfigFile, ModelSource, Settings, load
from headrace.cli.progress import stage_progress


def generate(
    prompt: str = typer.Argument(..., help="The text to continue; - reads standard input."),
    config: ConfigFile = None,
    model: ModelSource = None,
    max_tokens: int = typer.Option(128, help="Tokens to generate at most."),
    temperature: float | None = typer.Option(None, help="0 is greedy. Default: the model's own."),
    seed: int | None = typer.Option(None, help="Same seed, same text."),
    chat: bool = typer.Option(False, "--chat", help="Render the prompt as a user's message."),
    settings: Settings = None,
) -> None:
    """Continue one prompt and print the text as it comes."""
    loaded = load(config, model=model, settings=settings)
    text = sys.stdin.read() if prompt == "-" else prompt
    from headrace.llm import LLM
    from headrace.logs import configure_logging

    configure_logging(
        loaded.config.logging.format, loaded.config.logging.level
    )  # not among the text
    with stage_progress() as report:
        llm = LLM.from_config(loaded.config, report=report)
    with llm:
        sampling = llm.sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
        source: str | list[dict[str, str]] = text
        if chat:
            source = [{"role": "user", "content": text}]
        for piece in llm.stream(source, sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
