"""One self-contained HTML page of a bench run: tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.load.plot import Axis, Series, figure, page, table
from headrace.load.report import FRACTIONS, LATENCIES


def render_page(document: Mapping[str, Any]) -> str:
    """Return the page of what `headrace bench --json` writes."""
    runs = document["runs"]
    is_open = runs[0]["load"]["request_rate"] is not None
    names = [_load_name(run) for run in runs]
    figures = [*_over_loads(runs, is_open)] if len(runs) > 1 else []
    figures += [
        _distribution(runs, names, latency)
        for latency in ("ttft", "tpot", "e2e")
        if any(run["seconds"][latency] for run in runs)
    ]
    figures += [_over_time(runs, names)] if any(run["seconds"]["ttft"] for run in runs) else []
    load = runs[0]["load"]
    prefix = ""
    if load["shared_prefix_tokens"]:
        share = f"{100 * load['shared_prefix_share']:.0f} %"
        prefix = f"; {share} of the requests share {load['shared_prefix_tokens']} tokens"
    about = (
        f"{load['endpoint']}, {load['prompt_tokens']} prompt and {load['output_tokens']} output tokens"
        f"{prefix}; seed {load['seed']}; {'open' if is_open else 'closed'} loop"
    )
    if "slo" in runs[0]:
        about += f"; good is inside {runs[0]['slo']}"
    body = (
        f"<h2>Loads</h2>{_loads_table(runs, names)}"
        f"<h2>Latencies (ms)</h2>{_latency_table(runs, names)}"
        f'<h2>Plots</h2><div class="plots">{"".join(figures)}</div>'
        "<p>TTFT: first text minus due. E2E: end of text minus due. TPOT: (E2E − TTFT) / (tokens − 1). "
        "ITL: gaps between events. Failed requests enter no figure but their count.</p>"
    )
    return page("Headrace bench", about, body)


def _load_name(run: Mapping[str, Any]) -> str:
    load = run["load"]
    if load["request_rate"] is None:
        return f"{load['concurrency']} at a time"
    name = f"{load['request_rate']:g} per second"
    return name if load["burstiness"] == "1" else f"{name}, burstiness {load['burstiness']}"


def _loads_table(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    head = ["load", "requests", "failed", "requests/s", "output tok/s", "total tok/s", "cached"]
    if "slo" in runs[0]:
        head += ["good requests/s", "good"]
    rows = []
    for run, name in zip(runs, names, strict=True):
        row = [name, f"{run['requests']}", f"{run['errors']}", f"{run['requests_per_second']:.2f}"]
        row += [
            f"{run[key]:.1f}" for key in ("output_tokens_per_second", "total_tokens_per_second")
        ]
        row.append(f"{100 * run['cached_share']:.0f} %")
        if "slo" in run:
            row += [
                f"{run['goodput_requests_per_second']:.2f}",
                f"{100 * run['slo_share']:.0f} %",
            ]
        rows.append(row)
    return table(head, rows)


def _latency_table(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    columns = ("mean", *FRACTIONS)
    rows = []
    for run, name in zip(runs, names, strict=True):
        for latency, title in LATENCIES.items():
            found = run["seconds"][latency]
            if found:
                rows.append([f"{title}, {name}", *(f"{1e3 * found[c]:.1f}" for c in columns)])
    return table(["", *columns], rows)


def _over_loads(runs: Sequence[Mapping[str, Any]], is_open: bool) -> list[str]:
    """Throughput and latency against concurrency or rate."""
    key = "request_rate" if is_open else "concurrency"
    axis = Axis("requests per second offered" if is_open else "requests in flight")

    def line(name: str, value: Callable[[Mapping[str, Any]], float]) -> Series:
        points = [(float(run["load"][key]), value(run)) for run in runs if run["seconds"]["ttft"]]
        return Series(name, sorted(points))

    throughput = [line("output tokens/s", lambda run: float(run["output_tokens_per_second"]))]
    figures = [figure("Throughput", throughput, axis, Axis("output tokens per second"))]
    if "slo" in runs[0]:
        good = [
            line("all requests", lambda run: float(run["requests_per_second"])),
            line("inside the limits", lambda run: float(run["goodput_requests_per_second"])),
        ]
        figures.append(
            figure(f"Goodput ({runs[0]['slo']})", good, axis, Axis("requests per second"))
        )
    for latency in ("ttft", "tpot"):
        lines = [
            line(at, lambda run, at=at, of=latency: 1e3 * (run["seconds"][of] or {at: 0.0})[at])  # type: ignore[misc]
            for at in ("p50", "p90", "p99")
        ]
        title = f"{LATENCIES[latency]} against load"
        figures.append(figure(title, lines, axis, Axis("milliseconds")))
    return figures


def _distribution(runs: Sequence[Mapping[str, Any]], names: Sequence[str], latency: str) -> str:
    """Share of the requests that took at most so long."""
    lines = []
    for run, name in zip(runs, names, strict=True):
        values = sorted(
            1e3 * outcome[f"{latency}_seconds"]
            for outcome in run["outcomes"]
            if outcome[f"{latency}_seconds"] is not None and outcome["error"] is None
        )
        points = [(value, 100 * (at + 1) / len(values)) for at, value in enumerate(values)]
        lines.append(Series(name, points, has_dots=False))
    title = f"{LATENCIES[latency]}: share of requests within"
    return figure(title, lines, Axis("milliseconds", is_logarithmic=True), Axis("%"))


def _over_time(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    lines = []
    for run, name in zip(runs, names, strict=True):
        points = [
            (outcome["start_seconds"], 1e3 * outcome["ttft_seconds"])
            for outcome in run["outcomes"]
            if outcome["ttft_seconds"] is not None
        ]
        lines.append(Series(name, points, has_line=False))
    return figure("TTFT over the run", lines, Axis("seconds from the start"), Axis("milliseconds"))
