"""Tables and plots of self-contained HTML pages, drawn as inline SVG: no script, no font, no address.

Colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 40
_COLOURS = 6
_STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfa; --ink: #22252a; --soft: #6a7078; --line: #d9dad6;
  --c0: #2a6fbb; --c1: #c2570c; --c2: #3a7d44; --c3: #8b4aa8; --c4: #a33a4a; --c5: #5d6470; }
@media (prefers-color-scheme: dark) { :root { --ground: #17191c; --ink: #e6e7e9; --soft: #9aa1aa;
  --line: #363a40; --c0: #72aef0; --c1: #f09a5b; --c2: #7cc78a; --c3: #c99ae0; --c4: #ee8793; --c5: #a8b0bb; } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem } h2 { font-size: 1.05rem; margin: 1.8rem 0 .4rem }
p { margin: .2rem 0; color: var(--soft) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }
.wide { overflow-x: auto }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th { font-weight: 600; color: var(--soft) } th:first-child, td:first-child { text-align: left }
.plots { display: flex; flex-wrap: wrap; gap: 1rem } figure { margin: 0; flex: 1 1 26rem; max-width: 31rem }
figcaption { font-weight: 600; margin-bottom: .2rem } svg { width: 100%; height: auto; display: block }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif }
.grid { stroke: var(--line) } .curve { fill: none; stroke-width: 2; stroke-linejoin: round }
.key { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: 13px; color: var(--soft) }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem;
  vertical-align: -1px }
"""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or cloud of dots, of a plot."""

    name: str
    points: Points
    has_line: bool = True
    has_dots: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows; a logarithmic one begins at its least value, a linear one at 0."""

    title: str
    is_logarithmic: bool = False


def page(title: str, about: str, body: str) -> str:
    """Return a whole page; `body` is HTML, the rest is text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(about)}</p>{body}</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text; its first column is set left."""
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{cells}</tr>{body}</table></div>'


def figure(title: str, lines: Sequence[Series], x_axis: Axis, y_axis: Axis) -> str:
    """Return one plot as a figure with its title and, where there is more than one line, a key."""
    points = [point for line in lines for point in line.points]
    across, x_ticks = _scale([x for x, _ in points], x_axis, _LEFT, _WIDTH - _RIGHT)
    up, y_ticks = _scale([y for _, y in points], y_axis, _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for tick in y_ticks:
        y = f"{up(tick):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{up(tick) + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
        )
    for tick in x_ticks:
        x = f"{across(tick):.1f}"
        parts.append(
            f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_number(tick)}</text>'
        )
    for place, line in enumerate(lines):
        parts.append(_marks(line, f"var(--c{place % _COLOURS})", across, up))
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">'
        f"{html.escape(x_axis.title)}</text>"
        f'<text transform="translate(12 {(_TOP + _HEIGHT - _BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{html.escape(y_axis.title)}</text>'
    )
    key = "".join(
        f'<span><i style="background:var(--c{place % _COLOURS})"></i>{html.escape(line.name)}</span>'
        for place, line in enumerate(lines)
    )
    key = f'<div class="key">{key}</div>' if len(lines) > 1 else ""
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(parts)}</svg>{key}</figure>"
    )


def _marks(
    line: Series, colour: str, across: Callable[[float], float], up: Callable[[float], float]
) -> str:
    places = [(across(x), up(y)) for x, y in line.points]
    parts = []
    if line.has_line and len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="curve" style="stroke:{colour}" points="{path}"/>')
    if line.has_dots or len(places) == 1:
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{colour}"/>' for x, y in places
        ]
    return "".join(parts)


def _scale(
    values: Sequence[float], axis: Axis, start: float, end: float
) -> tuple[Callable[[float], float], list[float]]:
    """Return the map from values to places between `start` and `end`, and the ticks."""
    if axis.is_logarithmic and min(values) > 0:
        low, high = min(values), max(values)
        if high < 1.2 * low:
            low, high = low / 1.1, high * 1.1
        ticks = [
            step * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for step in (1, 2, 5)
        ]
        ticks = [tick for tick in ticks if low <= tick <= high] or [low, high]
        span = math.log(high / low)
        return lambda v: start + (end - start) * math.log(v / low) / span, ticks
    top = max(values) or 1.0
    step = 10.0 ** math.floor(math.log10(top / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if top / (factor * step) <= 6)
    count = math.ceil(top / step - 1e-9)
    high = count * step
    return lambda v: start + (end - start) * v / high, [step * at for at in range(count + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
