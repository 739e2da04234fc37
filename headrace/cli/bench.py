"""`headrace bench`: load on a server, and its latencies, throughput and goodput."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import ConfigFile, ModelSource, Settings
from headrace.cli.progress import stage_progress

if TYPE_CHECKING:
    from headrace.load import LoadPlan, LoadReport, ServiceLevel
    from headrace.load.plan import Endpoint


Url = Annotated[
    str | None,
    typer.Option(help="Measure this server. Default: start one for the run, on a free port."),
]
ServedModel = Annotated[str | None, typer.Option(help="The name to ask the server for.")]
EndpointName = Annotated[str, typer.Option("--endpoint", help="completions or chat.")]
Concurrencies = Annotated[
    str, typer.Option("--concurrency", help="Closed loop: requests in flight, such as 1,4,16.")
]
Rates = Annotated[
    str | None,
    typer.Option("--request-rate", help="Open loop instead: requests per second, such as 2,4,8."),
]
Burstiness = Annotated[
    float,
    typer.Option(
        help="Open loop: shape of the Gamma distributed gaps; 1 is Poisson, less is burstier."
    ),
]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(min=1, help="Open loop: at most so many in flight; waiting for that is latency."),
]
Requests = Annotated[
    int | None,
    typer.Option(min=1, help="How many per load. Default: 4 x concurrency, or 60 s of the rate."),
]
PromptTokens = Annotated[
    str,
    typer.Option(
        help="Tokens of a prompt, about: 120, uniform:50,200, normal:120,30, lognormal:220,1."
    ),
]
OutputTokens = Annotated[str, typer.Option(help="Tokens of an answer, exactly; likewise.")]
SharedPrefix = Annotated[int, typer.Option(min=0, help="Leading prompt tokens requests share.")]
SharedShare = Annotated[
    float,
    typer.Option(
        "--shared-prefix-share",
        min=0.0,
        max=1.0,
        help="Share of the requests that begin with them.",
    ),
]
Slo = Annotated[
    str | None,
    typer.Option(
        help="Also give goodput: requests per second inside ttft=500ms,tpot=50ms,e2e=10s."
    ),
]
Seed = Annotated[int, typer.Option(help="Same seed, same prompts, lengths and arrivals.")]
KeyVariable = Annotated[
    str | None,
    typer.Option("--api-key-env", help="Environment variable that holds the server's API key."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="Also write a page with plots.")]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", help="Measure the engine's step times instead, and write them here."),
]


def bench(
    config: ConfigFile = None,
    model: ModelSource = None,
    url: Url = None,
    served_model: ServedModel = None,
    endpoint: EndpointName = "completions",
    concurrency: Concurrencies = "16",
    request_rate: Rates = None,
    burstiness: Burstiness = 1.0,
    max_concurrency: MaxConcurrency = None,
    requests: Requests = None,
    prompt_tokens: PromptTokens = "120",
    output_tokens: OutputTokens = "96",
    shared_prefix: SharedPrefix = 0,
    shared_share: SharedShare = 1.0,
    slo: Slo = None,
    seed: Seed = 0,
    key_variable: KeyVariable = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    profile_file: ProfileFile = None,
    settings: Settings = None,
) -> None:
    """Measure a server with greedy, streamed requests; or, with --profile, the steps of its engine."""
    from headrace.load import Lengths, LoadPlan, ServiceLevel

    check_folders({"--json": json_file, "--html": html_file, "--profile": profile_file})
    if profile_file is not None:
        write_profile(profile_file, config, model, url, settings)
        return
    level = ServiceLevel.parse(slo) if slo is not None else None
    plan = LoadPlan(
        url="",
        model=served_model,
        endpoint=endpoint_named(endpoint),
        burstiness=positive(burstiness, "--burstiness"),
        max_concurrency=max_concurrency,
        prompt_tokens=Lengths.parse(prompt_tokens, "--prompt-tokens"),
        output_tokens=Lengths.parse(output_tokens, "--output-tokens"),
        shared_prefix_tokens=shared_prefix,
        shared_prefix_share=shared_share,
        seed=seed,
        api_key=api_key(key_variable),
    )
    plans = each_load(plan, concurrency, request_rate, requests)
    with server_at(url, config, model, settings) as address:
        reports = run_all(plans, address, level)
    write_figures([report.as_dict(level) for report in reports], json_file, html_file)
    if any(report.errors for report in reports):
        raise typer.Exit(1)


def check_folders(files: Mapping[str, Path | None]) -> None:
    """Raise ConfigError where a file to write, by its option, has no folder: before anything is measured."""
    from headrace.errors import ConfigError

    for option, file in files.items():
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{option} {file}: {file.parent} is no folder; make it first")


def write_figures(
    rows: Sequence[Mapping[str, Any]], json_file: Path | None, html_file: Path | None
) -> None:
    """Write the runs where they were asked for."""
    document = {"format": "headrace-bench-1", "runs": rows}
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=1) + "\n")
    if html_file is not None:
        from headrace.load.page import render_page

        html_file.write_text(render_page(document), encoding="utf-8")


def endpoint_named(name: str) -> Endpoint:
    """Return `name` as one of the endpoints. ConfigError where it is none."""
    from headrace.errors import ConfigError

    endpoints: dict[str, Endpoint] = {"completions": "completions", "chat": "chat"}
    if name not in endpoints:
        raise ConfigError(f"--endpoint {name!r}: it is completions or chat")
    return endpoints[name]


def positive(number: float, option: str) -> float:
    """Return `number`. ConfigError where it is not above 0."""
    from headrace.errors import ConfigError

    if not number > 0:
        raise ConfigError(f"{option} {number:g}: it is above 0")
    return number


def api_key(variable: str | None) -> str | None:
    """Return what the environment variable holds. ConfigError where it is not set."""
    from headrace.errors import ConfigError

    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"--api-key-env {variable}: there is no such variable, or it is empty")
    return key


def each_load(
    plan: LoadPlan, concurrency: str, request_rate: str | None, requests: int | None
) -> list[LoadPlan]:
    """Return one plan per concurrency or, in the open loop, per rate; prompts differ between them."""
    from dataclasses import replace

    plans = []
    if request_rate is not None:
        for rate in numbers(request_rate, "--request-rate"):
            count = requests or max(1, math.ceil(60 * rate))
            plans.append(replace(plan, request_rate=rate, num_requests=count))
    else:
        for number in numbers(concurrency, "--concurrency", whole=True):
            count = requests or 4 * int(number)
            plans.append(replace(plan, concurrency=int(number), num_requests=count))
    return [replace(plan, seed=plan.seed + 1000 * place) for place, plan in enumerate(plans)]


def numbers(text: str, option: str, *, whole: bool = False) -> list[float]:
    """Return the numbers of a comma-separated list. ConfigError where one is none, or not above 0."""
    from headrace.errors import ConfigError

    found = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf or (whole and not number.is_integer()):
            kind = "whole numbers from 1" if whole else "numbers above 0"
            raise ConfigError(
                f"{option} {text!r}: {part.strip()!r} is none of the {kind} that it takes, such as 4 or 4,16"
            )
        found.append(number)
    return found


def run_all(plans: Sequence[LoadPlan], url: str, level: ServiceLevel | None) -> list[LoadReport]:
    """Run one load after the other, and print each as it ends."""
    from dataclasses import replace

    import anyio

    from headrace.load import run_load

    reports = []
    for plan in plans:
        total = plan.num_requests
        with stage_progress() as report:
            result = anyio.run(
                run_load,
                replace(plan, url=url),
                lambda done, total=total, report=report: report("requests", done / total),
            )
        typer.echo(render(result, level) + "\n")
        reports.append(result)
    return reports


@contextmanager
def server_at(
    url: str | None, config: Path | None, model: str | None, settings: list[str] | None
) -> Iterator[str]:
    """Yield the address to measure: the one given, or that of a server started for the run."""
    if url is not None:
        yield url.rstrip("/")
        return
    from headrace.testing.server import started_server

    with started_server(serve_arguments(config, model, settings)) as server:
        yield server.url


def serve_arguments(
    config: Path | None, model: str | None, settings: list[str] | None
) -> list[str]:
    """Return the command line of `headrace serve` that these flags stand for."""
    arguments = ["--config", str(config)] if config else []
    arguments += ["--model", model] if model else []
    for setting in settings or ():
        arguments += ["--set", setting]
    return arguments


def write_profile(
    file: Path,
    config: Path | None,
    model: str | None,
    url: str | None,
    settings: list[str] | None,
) -> None:
    """Measure the steps of the configured engine in this process, and write them to `file`."""
    from headrace.cli.options import load
    from headrace.config.schema import replica_config
    from headrace.errors import ConfigError
    from headrace.load.profile import measure_profile

    if url is not None:
        raise ConfigError("--profile measures an engine of its own: leave out --url, give --model")
    loaded = load(config, model=model, settings=settings)
    with stage_progress() as report:
        profile: dict[str, Any] = measure_profile(
            replica_config(loaded.config, 0),
            serve_arguments=serve_arguments(config, model, settings),
            report=report,
        )
    file.write_text(json.dumps(profile, indent=1) + "\n")
    fit = profile["step_time"]
    typer.echo(
        f"{len(profile['samples'])} steps of {profile['model']['name']}: "
        f"{1e3 * fit['base_seconds']:.2f} ms + {1e6 * fit['seconds_per_prefill_token']:.1f} us per prompt "
        f"token + {1e6 * fit['seconds_per_sequence']:.1f} us per sequence + "
        f"{1e9 * fit['seconds_per_kv_row']:.1f} ns per KV row, off by "
        f"{100 * profile['fit']['mean_relative_error']:.1f} % in the mean; written to {file}"
    )


def render(result: LoadReport, level: ServiceLevel | None = None) -> str:
    """Return the figures as a small table."""
    from headrace.load.report import FRACTIONS, LATENCIES

    plan = result.plan
    load = f"{plan.concurrency} at a time"
    if plan.request_rate is not None:
        load = f"{plan.request_rate:g} per second, burstiness {plan.burstiness:g}"
    lines = [
        f"{len(result.outcomes)} requests, {load}, {plan.prompt_tokens} prompt / {plan.output_tokens} "
        f"output tokens, {result.wall_seconds:.1f} s, {len(result.errors)} failed",
        " " * 9 + "".join(f"{name:>10}" for name in ("mean", *FRACTIONS)),
    ]
    for latency, title in LATENCIES.items():
        found = result.latency(latency)
        cells = [
            f"{1e3 * found[name]:10.1f}" if found else f"{'-':>10}" for name in ("mean", *FRACTIONS)
        ]
        lines.append(f"{title} (ms)" + "".join(cells))
    lines += [
        f"requests/s      {result.requests_per_second:10.2f}",
        f"output tokens/s {result.output_tokens_per_second:10.1f}",
        f"total tokens/s  {result.total_tokens_per_second:10.1f}",
    ]
    if level is not None:
        met = sum(map(level.is_met_by, result.outcomes))
        lines.append(
            f"goodput         {result.goodput(level):10.2f} requests/s inside {level} "
            f"({met} of {len(result.outcomes)})"
        )
    if result.cached_share > 0:
        lines.append(f"prompt tokens from the prefix cache: {100 * result.cached_share:.0f} %")
    if result.errors:
        lines.append(f"first failure: {result.errors[0]}")
    return "\n".join(lines)
