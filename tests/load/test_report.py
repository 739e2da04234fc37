"""The figures are those of `vllm bench serve`, and the page shows them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.load import LoadPlan, LoadReport, RequestOutcome, ServiceLevel
from headrace.load.page import render_page


def outcome(ttft: float, tpot: float, tokens: int = 11, start: float = 0.0) -> RequestOutcome:
    return RequestOutcome(
        start_seconds=start,
        ttft_seconds=ttft,
        tpot_seconds=tpot if tokens > 1 else None,
        e2e_seconds=ttft + tpot * (tokens - 1),
        itl_seconds=[tpot] * (tokens - 1),
        prompt_tokens=7,
        output_tokens=tokens,
        finish_reason="length",
    )


FAILED = RequestOutcome(output_tokens=5, prompt_tokens=7, error="HTTP 500: <broken>")


def report(*outcomes: RequestOutcome, **plan: float) -> LoadReport:
    return LoadReport(LoadPlan(url="", **plan), 2.0, outcomes)  # type: ignore[arg-type]


def test_percentiles_interpolate_as_numpy_does() -> None:
    values = np.random.default_rng(0).random(57)
    found = report(*(outcome(float(v), 0.01) for v in values)).latency("ttft")
    assert found is not None
    for name, at in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert found[name] == pytest.approx(np.percentile(values, at))
    assert found["mean"] == pytest.approx(values.mean())
    assert found["std"] == pytest.approx(values.std())


def test_a_failure_counts_as_one_and_enters_no_figure() -> None:
    """S12: neither its tokens nor a time of 0 reach the figures."""
    both = report(outcome(0.5, 0.01), FAILED)
    assert both.output_tokens_per_second == 11 / 2.0
    assert both.total_tokens_per_second == 18 / 2.0
    assert both.requests_per_second == 0.5
    assert both.seconds("ttft") == [0.5] and len(both.seconds("itl")) == 10
    assert both.goodput(ServiceLevel()) == 0.5
    assert both.as_dict()["errors"] == 1
    assert report(FAILED).latency("e2e") is None


def test_goodput_asks_for_every_limit_at_once() -> None:
    level = ServiceLevel.parse("ttft=500ms, tpot=50ms,e2e=1s")
    assert level == ServiceLevel(0.5, 0.05, 1.0) and str(level) == "ttft=500ms,tpot=50ms,e2e=1000ms"
    run = report(
        outcome(0.5, 0.05),  # on the limits
        outcome(0.51, 0.01),
        outcome(0.1, 0.051),
        outcome(0.45, 0.05, tokens=20),  # 1.4 s in all
        outcome(0.2, 9.0, tokens=1),  # one token has no TPOT
    )
    assert run.goodput(level) == 2 / 2.0
    assert run.as_dict(level)["slo_share"] == pytest.approx(0.4)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "speed=3ms", "ttft=3ms;tpot=4ms"])
def test_a_wrong_service_level_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        ServiceLevel.parse(text)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]


@pytest.mark.parametrize("key", ["concurrency", "request_rate"])
def test_the_page_stands_alone_and_its_plots_are_well_formed(key: str) -> None:
    runs = [
        report(*(outcome(0.1 * n * i, 0.01 * n, start=i) for i in range(1, 9)), FAILED, **{key: n})
        for n in (1, 4, 16)
    ]
    level = ServiceLevel(ttft=0.5)
    document = json.loads(json.dumps({"runs": [run.as_dict(level) for run in runs]}))
    page = render_page(document)
    seen = _Page()
    seen.feed(page)
    assert seen.addresses == [] and "script" not in seen.tags and "http" not in page
    assert seen.tags.count("svg") == 8
    for part in page.split("<svg")[1:]:
        svg = ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")
        for line in svg.iter("polyline"):
            for pair in line.attrib["points"].split():
                x, y = map(float, pair.split(","))
                assert 0 <= x <= 460 and 0 <= y <= 260
    assert "prefers-color-scheme: dark" in page and "goodput" in page.lower()


def test_the_page_of_a_run_that_failed_has_its_count() -> None:
    page = render_page({"runs": [report(FAILED).as_dict()]})
    assert "<td>1</td><td>1</td>" in page and "<svg" not in page
