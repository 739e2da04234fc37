"""The figures of a simulation as plain data: what the table, the page and machines read.

Latencies have the formulas of `headrace bench`. Service is weighted as fair scheduling weighs it: one
per prompt token, credited with the first token out, and two per output token, credited as they come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.load.report import FRACTIONS, ServiceLevel
from headrace.simulator.outcomes import Outcomes

FORMAT = "headrace-simulation-1"
_CURVE_POINTS = 200
_WINDOWS = 60
_INPUT_WEIGHT, _OUTPUT_WEIGHT = 1.0, 2.0
_MOST_TENANTS = 12
"""Of which the service over time is kept, those with the most requests."""

Floats = NDArray[np.float64]


def figures(outcomes: Outcomes, name: str, level: ServiceLevel) -> dict[str, Any]:
    """Return the figures of one run. Depends on nothing but the outcomes."""
    requests = outcomes.trace.requests
    at = np.array([request.at for request in requests])
    prompt = np.array([request.num_prompt_tokens for request in requests], np.int64)
    output = np.array([request.num_output_tokens for request in requests], np.int64)
    first, end = np.array(outcomes.first_token_at), np.array(outcomes.end_at)
    served = ~np.isnan(end)
    ttft, tpot, e2e = latencies(outcomes)
    seconds = float(end[served].max()) if served.any() else 0.0
    seconds = max(seconds, 1e-9)
    good = _good(at, first, end, output, level)
    cached = np.array(outcomes.cached_tokens)
    return {
        "name": name,
        "requests": len(requests),
        "served": int(served.sum()),
        "refused": dict(sorted(Counter(outcomes.refusals.values()).items())),
        "seconds": seconds,
        "offered_requests_per_second": outcomes.trace.requests_per_second,
        "requests_per_second": float(served.sum() / seconds),
        "output_tokens_per_second": float(output[served].sum() / seconds),
        "slo": str(level),
        "good": int(good.sum()),
        "good_share": float(good.mean()),
        "goodput_requests_per_second": float(good.sum() / seconds),
        "latency_seconds": {
            "ttft": _latency(ttft),
            "tpot": _latency(tpot),
            "e2e": _latency(e2e),
        },
        "cached_share": float(cached[served].sum() / max(1, prompt[served].sum())),
        "preemptions": sum(outcomes.preemptions),
        "steps": outcomes.steps_total,
        "policy_failures": outcomes.policy_failures,
        "curves": {"ttft": _curve(ttft), "tpot": _curve(tpot)},
        "moments": [
            [moment.at, moment.num_waiting, moment.num_running, moment.kv_share]
            for moment in outcomes.moments
        ],
        **_tenants(outcomes, at, first, end, (prompt, output)),
    }


def latencies(outcomes: Outcomes) -> tuple[Floats, Floats, Floats]:
    """Return TTFT, TPOT and E2E of the requests that were served, in seconds; TPOT of more than one token."""
    requests = outcomes.trace.requests
    at = np.array([request.at for request in requests])
    output = np.array([request.num_output_tokens for request in requests], np.int64)
    first, end = np.array(outcomes.first_token_at), np.array(outcomes.end_at)
    served = ~np.isnan(end)
    tpot = ((end - first) / np.maximum(output - 1, 1))[served & (output > 1)]
    return (first - at)[served], tpot, (end - at)[served]


def _good(
    at: Floats, first: Floats, end: Floats, output: NDArray[np.int64], level: ServiceLevel
) -> NDArray[np.bool_]:
    good: NDArray[np.bool_] = ~np.isnan(end)
    if level.ttft is not None:
        good &= first - at <= level.ttft
    if level.tpot is not None:
        good &= (end - first) / np.maximum(output - 1, 1) <= level.tpot
    if level.e2e is not None:
        good &= end - at <= level.e2e
    return good


def _latency(values: Floats) -> dict[str, float] | None:
    if not len(values):
        return None
    ordered = np.sort(values)
    found = {"mean": float(ordered.mean())}
    found |= {name: float(np.quantile(ordered, at)) for name, at in FRACTIONS.items()}
    return found | {"max": float(ordered[-1])}


def _curve(values: Floats) -> list[list[float]]:
    """Return (value, share of requests that took at most so long) pairs, evenly spread over the shares."""
    if not len(values):
        return []
    shares = np.linspace(0, 1, min(_CURVE_POINTS, len(values) + 1))
    return [[float(v), float(s)] for v, s in zip(np.quantile(values, shares), shares, strict=True)]


def _tenants(
    outcomes: Outcomes,
    at: Floats,
    first: Floats,
    end: Floats,
    tokens: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> dict[str, Any]:
    """Return per tenant how it was served, the service over time, and how even it was."""
    names = np.array([request.tenant for request in outcomes.trace.requests], object)
    prompt, output = tokens
    served = ~np.isnan(end)
    if not served.any():
        return {"tenants": {}, "service": {"at": [], "tenants": {}}, "jain_index": None}
    edges = np.linspace(0.0, float(end[served].max()), _WINDOWS + 1)
    counts = Counter(names.tolist())
    rows: dict[str, dict[str, float]] = {}
    curves: dict[str, Floats] = {}
    busy: list[NDArray[np.bool_]] = []
    for name in sorted(counts, key=lambda name: (-counts[name], name)):
        own = served & (names == name)
        if not own.any():
            rows[name] = {"requests": counts[name], "served": 0}
            continue
        service = _service(edges, first[own], end[own], prompt[own], output[own])
        curves[name] = service
        busy.append(_busy(edges, at[own], end[own]))
        ttft = np.sort((first - at)[own])
        rows[name] = {
            "requests": counts[name],
            "served": int(own.sum()),
            "service": float(service[-1]),
            "ttft_p50": float(np.quantile(ttft, 0.5)),
            "ttft_p90": float(np.quantile(ttft, 0.9)),
        }
    kept = list(curves)[:_MOST_TENANTS]
    return {
        "tenants": rows,
        "service": {
            "at": edges.tolist(),
            "tenants": {name: curves[name].tolist() for name in kept},
        },
        "jain_index": _jain(list(curves.values()), busy),
    }


def _service(
    edges: Floats,
    first: Floats,
    end: Floats,
    prompt: NDArray[np.int64],
    output: NDArray[np.int64],
) -> Floats:
    """Return the weighted tokens given up to each edge."""
    spans = np.maximum(end - first, 1e-12)
    total = np.empty(len(edges))
    for place, edge in enumerate(edges):
        done = np.clip((edge - first) / spans, 0.0, 1.0)
        started = first <= edge
        total[place] = (
            _INPUT_WEIGHT * prompt[started].sum() + _OUTPUT_WEIGHT * (done * output)[started].sum()
        )
    return total


def _busy(edges: Floats, at: Floats, end: Floats) -> NDArray[np.bool_]:
    """Return in which windows a tenant had a request waiting or running all the time it matters."""
    return np.array(
        [
            bool(((at <= start) & (end >= stop)).any())
            for start, stop in zip(edges[:-1], edges[1:], strict=True)
        ]
    )


def _jain(curves: Sequence[Floats], busy: Sequence[NDArray[np.bool_]]) -> float | None:
    """Return the mean over windows of Jain's index of the service of tenants busy all through.

    1: all got the same; 1 / n: one got everything. None: never were two tenants busy together.
    """
    if len(curves) < 2:
        return None
    given = np.diff(np.stack(curves), axis=1)
    is_busy = np.stack(busy)
    found = []
    for window in range(given.shape[1]):
        x = given[is_busy[:, window], window]
        if len(x) >= 2 and x.sum() > 0:
            found.append(float(x.sum() ** 2 / (len(x) * (x**2).sum())))
    return float(np.mean(found)) if found else None
