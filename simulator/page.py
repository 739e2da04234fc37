"""One self-contained HTML page of a simulation: tables, and policies side by side in plots."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.load.plot import Axis, Series, figure, page, table

Run = Mapping[str, Any]
_MOST_TENANTS = 6


def render_page(document: Mapping[str, Any]) -> str:
    """Return the page of what `headrace simulate --json` writes."""
    runs: Sequence[Run] = document["runs"]
    by_rate = len({run["offered_requests_per_second"] for run in runs}) > 1
    shown = at_last_rate(runs)
    figures = []
    if by_rate:
        figures += _over_rates(runs)
    figures += [_distribution(shown, "ttft", "TTFT"), _distribution(shown, "tpot", "TPOT")]
    figures += [
        _over_time(shown, 1, "Requests waiting", 1.0, "requests"),
        _over_time(shown, 2, "Sequences running", 1.0, "sequences"),
        _over_time(shown, 3, "KV blocks in use", 100.0, "%"),
    ]
    body = (
        f"<h2>Runs</h2>{table(*run_rows(runs))}"
        f"<h2>Latencies (ms)</h2>{table(*latency_rows(runs))}"
        f'<h2>Plots</h2><div class="plots">{"".join(figures)}</div>'
    )
    if len(shown[0]["tenants"]) > 1:
        body += f"<h2>Tenants</h2>{table(*tenant_rows(shown))}"
        body += f'<div class="plots">{"".join(_service(run) for run in shown)}</div>'
    failures = [
        f"<p>{html.escape(run['name'])}: {html.escape(text)}</p>"
        for run in runs
        for text in run["policy_failures"]
    ]
    body += "".join(failures)
    body += (
        "<p>TTFT: first token minus arrival. TPOT: (end − first token) / (tokens − 1). Good: inside every "
        "target. Service: prompt tokens + 2 × output tokens. Jain index: 1 where tenants that were busy at "
        "the same time were given the same, 1/n where one was given everything.</p>"
    )
    return page("Headrace simulation", about(document), body)


def about(document: Mapping[str, Any]) -> str:
    """Return what was simulated, in a line."""
    return (
        f"{document['trace']}: {document['runs'][0]['requests']} requests; {document['replicas']} x "
        f"{document['hardware']}; good is inside {document['runs'][0]['slo'] or 'no target'}"
    )


def run_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of runs."""
    head = ["policy", "offered/s", "served", "refused", "good/s", "good", "output tok/s", "cached"]
    head += ["preempted", "Jain"]
    rows = []
    for run in runs:
        jain = run["jain_index"]
        rows.append(
            [
                run["name"],
                f"{run['offered_requests_per_second']:.3g}",
                f"{run['served']}",
                f"{sum(run['refused'].values())}",
                f"{run['goodput_requests_per_second']:.3g}",
                f"{100 * run['good_share']:.1f} %",
                f"{run['output_tokens_per_second']:.0f}",
                f"{100 * run['cached_share']:.0f} %",
                f"{run['preemptions']}",
                "-" if jain is None else f"{jain:.2f}",
            ]
        )
    return head, rows


def latency_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of latencies, in milliseconds."""
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    rows = []
    for latency in ("ttft", "tpot", "e2e"):
        for run in runs:
            found = run["latency_seconds"][latency]
            if found:
                name = f"{latency.upper()}, {_label(run, runs)}"
                rows.append([name, *(f"{1e3 * found[column]:.1f}" for column in columns)])
    return ["", *columns], rows


def tenant_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of tenants, those with the most requests."""
    rows = []
    for name in list(runs[0]["tenants"])[:_MOST_TENANTS]:
        for run in runs:
            row = run["tenants"][name]
            if row["served"]:
                times = [f"{1e3 * row[key]:.1f}" for key in ("ttft_p50", "ttft_p90")]
                cells = [f"{row['served']}", f"{row['service']:.0f}", *times]
                rows.append([f"{name or '(none)'}, {run['name']}", *cells])
    return ["tenant", "served", "service", "TTFT p50 (ms)", "TTFT p90 (ms)"], rows


def _label(run: Run, runs: Sequence[Run]) -> str:
    alike = [other for other in runs if other["name"] == run["name"]]
    rate = f" at {run['offered_requests_per_second']:.3g}/s"
    name: str = run["name"]
    return name + (rate if len(alike) > 1 else "")


def at_last_rate(runs: Sequence[Run]) -> list[Run]:
    """Return each policy's run at the highest rate."""
    most = max(run["offered_requests_per_second"] for run in runs)
    return [run for run in runs if run["offered_requests_per_second"] == most]


def _over_rates(runs: Sequence[Run]) -> list[str]:
    figures = []
    names = list(dict.fromkeys(run["name"] for run in runs))
    for key, title, unit, factor in (
        ("goodput_requests_per_second", "Goodput against rate", "good requests per second", 1.0),
        ("good_share", "Requests inside their targets against rate", "%", 100.0),
    ):
        lines = [
            Series(
                name,
                sorted(
                    (run["offered_requests_per_second"], factor * run[key])
                    for run in runs
                    if run["name"] == name
                ),
            )
            for name in names
        ]
        figures.append(figure(title, lines, Axis("requests per second offered"), Axis(unit)))
    return figures


def _distribution(runs: Sequence[Run], latency: str, title: str) -> str:
    lines = [
        Series(
            run["name"],
            [(max(1e3 * value, 1e-3), 100 * share) for value, share in run["curves"][latency]]
            or [(1.0, 0.0)],
            has_dots=False,
        )
        for run in runs
    ]
    axis = Axis("milliseconds", is_logarithmic=True)
    return figure(f"{title}: share of requests within", lines, axis, Axis("%"))


def _over_time(runs: Sequence[Run], column: int, title: str, factor: float, unit: str) -> str:
    lines = [
        Series(
            run["name"],
            [(moment[0], factor * moment[column]) for moment in run["moments"]] or [(0.0, 0.0)],
            has_dots=False,
        )
        for run in runs
    ]
    return figure(title, lines, Axis("seconds"), Axis(unit))


def _service(run: Run) -> str:
    at = run["service"]["at"]
    lines = [
        Series(name or "(none)", list(zip(at, given, strict=True)), has_dots=False)
        for name, given in list(run["service"]["tenants"].items())[:_MOST_TENANTS]
    ]
    title = f"Service given to tenants: {run['name']}"
    return figure(
        title, lines or [Series("", [(0.0, 0.0)])], Axis("seconds"), Axis("weighted tokens")
    )
