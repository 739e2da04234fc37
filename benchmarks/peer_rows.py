"""The rows of the table that benchmarks/peers.py prints: what is compared, the targets, met or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Key = tuple[str, str]
"""A figure's place: the model ("smollm2", "gemma3", "" for neither) and what was measured."""
Found = Mapping[str, Mapping[Key, float | str]]
"""Per peer its figures, and where one could not be measured the reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """One target. With peers, the limit is on ours / the best peer's; without, on our figure itself."""

    name: str
    title: str
    key: Key
    peers: tuple[str, ...]
    at_least: float
    aim: float
    unit: str = "ms"
    is_rate: bool = False
    """Higher is better, and the limits are lower ones."""


def model_rows(model: str, prefix: str, limits: Mapping[str, tuple[float, float]]) -> list[Row]:
    """Return the rows of one model; `limits` has (at least, aim) by row name."""

    def row(name: str, title: str, peers: tuple[str, ...], **rest: Any) -> Row:
        key = (model, name)
        return Row(f"{prefix}{name}", f"{model}: {title}", key, peers, *limits[name], **rest)

    both = ("openvino", "vllm")
    rate: dict[str, Any] = {"unit": "tok/s", "is_rate": True}
    return [
        row("tpot", "TPOT, 1 request", ("llama-bench",)),
        row("ttft-120", "TTFT, 120 tokens", ("openvino",)),
        row("ttft-1000", "TTFT, 1,000 tokens", both),
        row("rate-16", "output at 16 concurrent", ("openvino",), **rate),
        row("rate-64", "output at 64 concurrent", both, **rate),
    ]


SMOL = {
    "tpot": (0.5, 0.33),
    "ttft-120": (0.7, 0.45),
    "ttft-1000": (0.8, 0.5),
    "rate-16": (2.2, 3.0),
    "rate-64": (2.0, 3.0),
}
GEMMA = {name: (1.0, 2.0 if name.startswith("rate") else 0.5) for name in SMOL}
ROWS = [
    *model_rows("smollm2", "", SMOL),
    *model_rows("gemma3", "gemma-", GEMMA),
    Row(
        "long-context",
        "smollm2: TPOT at 4,000 less at 100, over extra KV bytes / bandwidth",
        ("smollm2", "long-context"),
        (),
        1.5,
        1.1,
        "x",
    ),
    Row("start", "start to ready, warm cache", ("smollm2", "start"), ("llama-server",), 4, 2, "s"),
    Row("first-start", "first start ever", ("smollm2", "first-start"), (), 30, 30, "s"),
    Row("overhead", "engine per step, 32 sequences", ("", "overhead"), (), 1.0, 0.3),
    Row("memory", "RssAnon less weights and KV pool", ("smollm2", "memory"), (), 350, 250, "MB"),
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A row with its figures. None: not measured, and `note` says why."""

    name: str
    title: str
    unit: str
    peer: str
    theirs: float | None
    ours: float | None
    ratio: float | None
    at_least: float
    aim: float
    met: bool | None
    core_ratio: float | None = None
    """Our core time per request over that peer's: what is left where other work disturbs the clock."""
    note: str = ""


def judge(row: Row, found: Found, cores: Found) -> Verdict:
    """Return how a row stands; a peer that failed is named, and the row judged against the others.

    `cores` has core seconds per request, where `found` has a figure of a load.
    """
    ours = found.get("headrace", {}).get(row.key, "not measured")
    notes = [f"headrace: {ours}"] if isinstance(ours, str) else []
    best: tuple[str, float] | None = None
    for peer in row.peers:
        figure = found.get(peer, {}).get(row.key, "not given")
        if isinstance(figure, str):
            notes.append(f"{peer}: {figure}")
        elif best is None or (figure > best[1]) == row.is_rate:
            best = peer, figure
    ratio = met = None
    if isinstance(ours, float):
        if not row.peers:
            ratio = ours
        elif best is not None:
            ratio = ours / best[1]
    if ratio is not None:
        met = ratio >= row.at_least if row.is_rate else ratio <= row.at_least
    return Verdict(
        name=row.name,
        title=row.title,
        unit=row.unit,
        peer=best[0] if best else "-",
        theirs=best[1] if best else None,
        ours=ours if isinstance(ours, float) else None,
        ratio=ratio,
        at_least=row.at_least,
        aim=row.aim,
        met=met,
        core_ratio=core_ratio(row, best[0] if best else "", cores),
        note="; ".join(notes),
    )


def core_ratio(row: Row, peer: str, cores: Found) -> float | None:
    """Return our core time per request over a peer's; None where either was not measured."""
    ours = cores.get("headrace", {}).get(row.key)
    theirs = cores.get(peer, {}).get(row.key)
    if isinstance(ours, float) and isinstance(theirs, float) and theirs > 0:
        return ours / theirs
    return None


def render(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as a Markdown table."""
    lines = [
        "| row | against | theirs | ours | ratio | core time | at least | aim | met |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for verdict in verdicts:
        met = {True: "yes", False: "**no**", None: "-"}[verdict.met]
        cells = [
            verdict.title,
            verdict.peer,
            number(verdict.theirs, verdict.unit),
            number(verdict.ours, verdict.unit),
            "-" if verdict.ratio is None or verdict.peer == "-" else f"{verdict.ratio:.2f}",
            "-" if verdict.core_ratio is None else f"{verdict.core_ratio:.2f}",
            f"{verdict.at_least:g}",
            f"{verdict.aim:g}",
            met + (f" ({verdict.note})" if verdict.note else ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def as_data(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the verdicts as plain data."""
    return [asdict(verdict) for verdict in verdicts]
