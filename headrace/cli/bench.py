"""`headrace bench`: closed-loop load on a server, and its TTFT, TPOT and throughput."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.cli.options import ConfigFile, ModelSource, Settings
from headrace.cli.progress import stage_progress

if TYPE_CHECKING:
    from headrace.load import LoadReport


def bench(
    config: ConfigFile = None,
    model: ModelSource = None,
    url: str | None = typer.Option(
        None, help="Measure this server. Default: start one for the run, on a free port."
    ),
    served_model: str | None = typer.Option(None, help="The name to ask the server for."),
    concurrency: int = typer.Option(16, min=1, help="Requests in flight."),
    requests: int | None = typer.Option(None, min=1, help="How many. Default: 4 x concurrency."),
    prompt_tokens: int = typer.Option(120, min=1, help="Tokens of each prompt, about."),
    output_tokens: int = typer.Option(96, min=1, help="Tokens of each answer, exactly."),
    shared_prefix: int = typer.Option(0, min=0, help="Leading prompt tokens all requests share."),
    seed: int = typer.Option(0, help="Same seed, same prompts."),
    json_file: Path | None = typer.Option(None, "--json", help="Also write the figures here."),
    settings: Settings = None,
) -> None:
    """Measure a server: closed loop, greedy, streamed completions of fixed length."""
    import anyio

    from headrace.errors import ConfigError
    from headrace.load import LoadPlan, run_load

    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"--json {json_file}: {json_file.parent} is no folder; make it first")
    with server_at(url, config, model, settings) as address:
        plan = LoadPlan(
            url=address,
            model=served_model,
            concurrency=concurrency,
            num_requests=requests or 4 * concurrency,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            shared_prefix_tokens=shared_prefix,
            seed=seed,
        )
        with stage_progress() as report:
            result = anyio.run(
                run_load, plan, lambda done: report("requests", done / plan.num_requests)
            )
    typer.echo(render(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_dict(), indent=2) + "\n")
    if result.errors:
        raise typer.Exit(1)


@contextmanager
def server_at(
    url: str | None, config: Path | None, model: str | None, settings: list[str] | None
) -> Iterator[str]:
    """Yield the address to measure: the one given, or that of a server started for the run."""
    if url is not None:
        yield url.rstrip("/")
        return
    from headrace.testing.server import started_server

    arguments = ["--config", str(config)] if config else []
    arguments += ["--model", model] if model else []
    for setting in settings or ():
        arguments += ["--set", setting]
    with started_server(arguments) as server:
        yield server.url


def render(result: LoadReport) -> str:
    """Return the figures as a small table."""

    def milliseconds(name: str) -> str:
        cells = []
        for fraction in (0.5, 0.9, 0.99):
            value = result.percentile(name, fraction)
            cells.append("       -" if value is None else f"{1e3 * value:8.1f}")
        return " ".join(cells)

    plan = result.plan
    lines = [
        f"{len(result.outcomes)} requests, {plan.concurrency} at a time, "
        f"{plan.prompt_tokens} prompt / {plan.output_tokens} output tokens, "
        f"{result.wall_seconds:.1f} s, {len(result.errors)} failed",
        "                     p50      p90      p99",
        f"TTFT (ms)       {milliseconds('ttft_seconds')}",
        f"TPOT (ms)       {milliseconds('tpot_seconds')}",
        f"request (ms)    {milliseconds('duration_seconds')}",
        f"output tokens/s {result.output_tokens_per_second:8.1f}",
        f"total tokens/s  {result.total_tokens_per_second:8.1f}",
    ]
    if result.errors:
        lines.append(f"first failure: {result.errors[0]}")
    return "\n".join(lines)
