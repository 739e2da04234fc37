"""`headrace simulate`: serve a trace in virtual time, policies side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.bench import check_folders, numbers
from headrace.cli.options import ConfigFile, Settings, load
from headrace.cli.policies import with_class

if TYPE_CHECKING:
    from headrace.simulator.hardware import Hardware
    from headrace.simulator.simulation import Setup
    from headrace.simulator.trace import Trace

TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Mooncake JSONL, Azure or BurstGPT CSV, or a gateway's JSON log."),
]
WorkloadName = Annotated[
    str | None, typer.Option("--workload", help="A made-up load instead, such as agent-loop.")
]
Requests = Annotated[
    int | None,
    typer.Option(min=1, help="How many requests. Default: all of the trace, or 1000 made up."),
]
Seed = Annotated[int, typer.Option(help="Same seed, same load, same outcome to the last byte.")]
Rate = Annotated[
    float | None, typer.Option(min=1e-6, help="Requests per second of a made-up load.")
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="A scheduling policy's name or file, or kind=name; several of one run with commas. "
        "Repeatable: a run each. Default: the configuration's.",
    ),
]
Replicas = Annotated[
    int | None, typer.Option(min=1, help="Replicas. Default: the configuration's.")
]
Speeds = Annotated[
    str, typer.Option("--speeds", help="Offer the trace at these multiples of its rate: 0.5,1,2.")
]
Device = Annotated[str, typer.Option(help="Analytic model: h200, a100 or l4.")]
ModelSize = Annotated[str, typer.Option("--model-size", help="What runs on it.")]
Profile = Annotated[
    Path | None,
    typer.Option("--profile", help="Step times that `headrace bench --profile` measured instead."),
]
Slo = Annotated[str, typer.Option(help="What a good request keeps: ttft=500ms,tpot=50ms,e2e=10s.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")]
ReportFile = Annotated[
    Path | None, typer.Option("--report", help="Also write a page with plots here.")
]
WriteTrace = Annotated[
    Path | None, typer.Option("--write-trace", help="Also write the load, as Mooncake JSONL.")
]
DEFAULT_SLO = "ttft=1s,tpot=100ms"


def simulate(
    trace: TraceFile = None,
    workload: WorkloadName = None,
    requests: Requests = None,
    seed: Seed = 0,
    rate: Rate = None,
    config: ConfigFile = None,
    policy: Policies = None,
    replicas: Replicas = None,
    speeds: Speeds = "1",
    device: Device = "h200",
    model_size: ModelSize = "llama-3.1-8b",
    profile: Profile = None,
    slo: Slo = DEFAULT_SLO,
    json_file: JsonFile = None,
    report: ReportFile = None,
    write_trace: WriteTrace = None,
    settings: Settings = None,
) -> None:
    """Serve a trace in virtual time: the real scheduler, caches, policies, admission and routing."""
    from headrace.load.report import ServiceLevel
    from headrace.simulator.trace import write_mooncake

    check_folders({"--json": json_file, "--report": report, "--write-trace": write_trace})
    level = ServiceLevel.parse(slo)
    load_of_run = load_named(trace, workload, requests, seed, rate)
    if write_trace is not None:
        write_mooncake(load_of_run, write_trace)
    hardware = hardware_named(device, model_size, profile)
    setup = make_setup(config, settings, hardware, replicas)
    runs = []
    targeted = load_of_run.with_targets(level.ttft, level.tpot)
    for choices in policy or [""]:
        chosen = with_policies(setup, choices)
        runs += [
            run_one(chosen, targeted.faster(speed), level) for speed in numbers(speeds, "--speeds")
        ]
    document = {
        "format": "headrace-simulation-1",
        "trace": load_of_run.name,
        "hardware": hardware.name,
        "replicas": setup.replicas,
        "engine": engine_facts(setup),
        "runs": runs,
    }
    typer.echo(render(document))
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if report is not None:
        from headrace.simulator.page import render_page

        report.write_text(render_page(document), encoding="utf-8")


def load_named(
    trace: Path | None,
    workload: str | None,
    requests: int | None,
    seed: int,
    rate: float | None,
) -> Trace:
    """Return the trace of a file, or made up. ConfigError where both or neither is asked for."""
    from headrace.errors import ConfigError
    from headrace.simulator.trace_files import read_trace
    from headrace.simulator.workloads import WORKLOADS, generate

    if (trace is None) == (workload is None):
        raise ConfigError(
            "give either --trace FILE or --workload NAME; made-up loads are "
            + ", ".join(f"{name} ({each.about})" for name, each in WORKLOADS.items())
        )
    if trace is not None:
        if rate is not None:
            raise ConfigError("--rate is for made-up loads; with --trace use --speeds")
        return read_trace(trace, limit=requests)
    assert workload is not None
    return generate(workload, num_requests=requests or 1000, seed=seed, rate=rate)


def hardware_named(device: str, model_size: str, profile: Path | None) -> Hardware:
    """Return what the replicas run on."""
    from headrace.simulator.hardware import analytic, from_profile

    return analytic(device, model_size) if profile is None else from_profile(profile)


def make_setup(
    config: Path | None,
    settings: Sequence[str] | None,
    hardware: Hardware,
    replicas: int | None,
) -> Setup:
    """Return what is simulated, policies as configured."""
    from headrace.plugins.manager import create_plugin_manager
    from headrace.plugins.registry import Registries
    from headrace.simulator.simulation import Setup, engine_settings

    loaded = load(config, settings=list(settings or ()))
    plugins = loaded.config.plugins
    registries = Registries.from_manager(
        create_plugin_manager(discover=plugins.discover, blocked=plugins.blocked)
    )
    engine, num_blocks = engine_settings(loaded.config, hardware, loaded.origins)
    count = replicas or len(loaded.config.models[0].replica_entries)
    return Setup(loaded.config, hardware, engine, num_blocks, registries, replicas=count)


def with_policies(setup: Setup, text: str) -> Setup:
    """Return the setup with the policies that one --policy names. ConfigError where one is none."""
    from dataclasses import replace

    from headrace.config import Choice
    from headrace.errors import ConfigError
    from headrace.plugins.script import is_script
    from headrace.simulator.simulation import KINDS

    choices = dict(setup.choices)
    for part in filter(None, text.split(",")):
        kind, is_said, use = part.partition("=")
        if not is_said:
            kind, use = "scheduling", part
        if kind not in KINDS:
            raise ConfigError(
                f"--policy {part!r}: {kind!r} is no kind of policy that can be simulated; those are "
                f"{', '.join(KINDS)}"
            )
        if is_script(use):
            use = with_class(use)
        configured = setup.choice(kind)
        options = configured.options if configured.use == use else {}
        choices[kind] = Choice(use, options)
    changed = replace(setup, choices=choices)
    for kind in choices:
        changed.create(kind, changed.choice(kind))
    return changed


def policy_label(setup: Setup) -> str:
    """Return how a run is called: its scheduling policy, and what else was chosen for it."""
    from headrace.plugins.script import is_script

    def short(use: str) -> str:
        return use.rpartition(":")[2] if is_script(use) else use

    others = [
        f"{kind} {short(choice.use)}"
        for kind, choice in setup.choices.items()
        if kind != "scheduling"
    ]
    return ", ".join([short(setup.choice("scheduling").use), *others])


def run_one(setup: Setup, trace: Trace, level: Any) -> dict[str, Any]:
    """Simulate once, and say on stderr how long that took."""
    from headrace.simulator.figures import figures
    from headrace.simulator.simulation import simulate as run

    name = policy_label(setup)
    start = time.perf_counter()
    outcomes = run(setup, trace)
    spent = time.perf_counter() - start
    rate = 60 * len(trace.requests) / max(spent, 1e-9)
    typer.echo(
        f"{name}: {len(trace.requests)} requests in {spent:.1f} s, {rate:,.0f} a minute", err=True
    )
    return figures(outcomes, name, level)


def engine_facts(setup: Setup) -> dict[str, int]:
    """Return the engine settings that matter."""
    settings = setup.settings
    return {
        "max_model_len": settings.max_model_len,
        "max_num_sequences": settings.max_num_sequences,
        "max_batched_tokens": settings.max_batched_tokens,
        "block_size": settings.block_size,
        "num_blocks": setup.num_blocks,
    }


def render(document: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    from headrace.simulator.page import about, at_last_rate, latency_rows, run_rows, tenant_rows

    runs = document["runs"]
    parts = [
        about(document),
        _columns(*run_rows(runs)),
        _columns(*latency_rows(runs), unit=" (ms)"),
    ]
    last = at_last_rate(runs)
    if len(last[0]["tenants"]) > 1:
        parts.append(_columns(*tenant_rows(last)))
    for run in runs:
        parts += [f"{run['name']}: {text}" for text in run["policy_failures"]]
    return "\n\n".join(parts)


def _columns(head: list[str], rows: list[list[str]], unit: str = "") -> str:
    table = [head, *rows]
    widths = [max(len(row[place]) for row in table) for place in range(len(head))]
    lines = []
    for row in table:
        first = (row[0] or f"latency{unit}").ljust(max(widths[0], 12))
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *cells]).rstrip())
    return "\n".join(lines)
