"""The example dashboard and alert rules ask for metrics and labels that exist."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from headrace.testing.fake_gateway import FakeGateway

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"
DASHBOARD: dict[str, Any] = json.loads((CONFIGS / "grafana-dashboard.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((CONFIGS / "prometheus-alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
QUERIES = {
    **{f"alert {rule['alert']}": rule["expr"] for rule in RULES},
    **{
        f"panel {panel['title']}, {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    },
}


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Every sample's name with its labels, of a gateway that has served, refused and lost a request."""
    gateway = FakeGateway()
    gateway.state.admission.refusals["queue_full"] += 1
    with TestClient(gateway.app) as client:
        body = {"prompt": "a", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200
        gateway.engine.fails_after = 0
        assert client.post("/v1/completions", json=body).status_code == 500
        page = client.get("/metrics").text
    gateway.state.observers.close()
    found: dict[str, set[str]] = {"headrace_request_aborts_total": {"model", "endpoint"}}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("name", QUERIES)
def test_what_is_asked_for_exists(name: str, labels: dict[str, set[str]]) -> None:
    query = QUERIES[name]
    metrics = re.findall(r"\bheadrace_\w+", query)
    assert metrics
    for metric in metrics:
        assert metric in labels, metric
    known = set().union(*(labels[metric] for metric in metrics))
    for group in re.findall(r"\bby \(([^)]*)\)", query):
        assert {label.strip() for label in group.split(",")} <= known, query
    for metric, matchers in re.findall(r"\b(headrace_\w+)\{([^}]*)\}", query):
        for matcher in re.findall(r"(\w+)\s*[=!]=?~?\"", matchers):
            assert matcher in labels[metric], query


@pytest.mark.parametrize("name", QUERIES)
def test_brackets_are_closed(name: str) -> None:
    for pair in ("()", "[]", "{}"):
        assert QUERIES[name].count(pair[0]) == QUERIES[name].count(pair[1])


def test_every_alert_says_what_and_where_to_read_on() -> None:
    operations = (CONFIGS.parent / "docs" / "operations.md").read_text()
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical"), rule
        assert rule["annotations"]["summary"], rule
        section = rule["annotations"]["runbook"].removeprefix("docs/operations.md, section ")
        assert re.search(rf"^#+ {section}$", operations, re.M), section


def test_panels_do_not_overlap() -> None:
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
