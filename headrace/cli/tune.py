"""`headrace tune`: find the settings that serve a trace best, in virtual time, and write them down."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.bench import check_folders
from headrace.cli.options import ConfigFile, Settings
from headrace.cli.simulate import (
    DEFAULT_SLO,
    Device,
    ModelSize,
    Profile,
    Rate,
    Replicas,
    Requests,
    Seed,
    Slo,
    TraceFile,
    WorkloadName,
    hardware_named,
    load_named,
    make_setup,
)
from headrace.types.units import format_duration

if TYPE_CHECKING:
    from headrace.load.report import ServiceLevel
    from headrace.simulator.simulation import Setup
    from headrace.simulator.tune import Tried

Output = Annotated[
    Path, typer.Option("--output", "-o", help="The YAML to write; one that exists is kept.")
]
Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", help="Scheduling policies to try. Repeatable. Default: the built-in."),
]


def tune(
    trace: TraceFile = None,
    workload: WorkloadName = None,
    requests: Requests = None,
    seed: Seed = 0,
    rate: Rate = None,
    slo: Slo = DEFAULT_SLO,
    config: ConfigFile = None,
    policy: Policies = None,
    replicas: Replicas = None,
    device: Device = "h200",
    model_size: ModelSize = "llama-3.1-8b",
    profile: Profile = None,
    output: Output = Path("tuned.yaml"),
    settings: Settings = None,
) -> None:
    """Search chunk budget, sequences and policy for the most requests per second inside --slo."""
    from headrace.load.report import ServiceLevel
    from headrace.simulator import tune as search

    check_folders({"--output": output})
    refuse_to_overwrite(output)
    level = ServiceLevel.parse(slo)
    setup = make_setup(config, settings, hardware_named(device, model_size, profile), replicas)
    for name in policy or ():
        setup.registries.of("scheduling").get(name)
    load = load_named(trace, workload, requests, seed, rate).with_targets(level.ttft, level.tpot)
    typer.echo(f"{'good/s':>8}  {'good':>7}  {'TTFT p90':>9}  {'tokens':>6}  {'seqs':>5}  policy")
    tried = search.tune(
        setup, load, level, policies=policy or search.POLICIES, report=lambda t: typer.echo(row(t))
    )
    best = tried[0]
    output.write_text(as_yaml(setup, best, level, load.name), encoding="utf-8")
    typer.echo(f"\nbest of {len(tried)}, written to {output}:\n{row(best)}")


def refuse_to_overwrite(output: Path) -> None:
    """Raise ConfigError where the file exists."""
    from headrace.errors import ConfigError

    if output.exists():
        raise ConfigError(f"--output {output} exists already; remove it or name another file")


def row(tried: Tried) -> str:
    """Return a point and how it served, as a line."""
    found, point = tried.figures, tried.point
    ttft = found["latency_seconds"]["ttft"]
    p90 = f"{1e3 * ttft['p90']:.0f} ms" if ttft else "-"
    return (
        f"{found['goodput_requests_per_second']:8.2f}  {100 * found['good_share']:5.1f} %  {p90:>9}  "
        f"{point.max_batched_tokens:6}  {point.max_num_sequences:5}  {point.scheduling}"
    )


def as_yaml(setup: Setup, best: Tried, level: ServiceLevel, trace: str) -> str:
    """Return the best settings as a configuration file; a policy that takes targets gets those of `level`."""
    import json

    point, found, model = best.point, best.figures, setup.config.models[0]
    configured = setup.choice("scheduling")
    options = dict(configured.options) if configured.use == point.scheduling else {}
    taken = getattr(setup.registries.of("scheduling").get(point.scheduling), "Options", None)
    for name in ("ttft", "tpot"):
        target = getattr(level, name)
        if target is not None and name in getattr(taken, "__dataclass_fields__", {}):
            options[name] = format_duration(target)
    policy = json.dumps({"use": point.scheduling, "options": options})
    return f"""\
# headrace tune: {found["goodput_requests_per_second"]:.2f} requests/s inside {level} on {trace}
# ({setup.replicas} x {setup.hardware.name})
models:
  - source: {model.source}
    engine:
      max_batched_tokens: {point.max_batched_tokens}
      max_num_sequences: {point.max_num_sequences}
      max_model_len: {setup.settings.max_model_len}
      block_size: {setup.settings.block_size}
    policies:
      scheduling: {policy}
"""
