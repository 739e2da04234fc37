"""The OpenAPI document and the server say the same: schemathesis drives one by the other."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import load_all_checks
from schemathesis.config import SchemathesisConfig
from schemathesis.core.result import Ok
from starlette.routing import Route
from starlette.testclient import TestClient

from headrace.config import AdminConfig, GatewayConfig
from headrace.testing.fake_gateway import FakeGateway

ENVIRON = {"KEYS": "acme:canary", "ADMIN": "admin-canary"}
FAST, WITHOUT_BODY, THOROUGH = 8, 3, 150
"""Examples of each operation."""

load_all_checks()
CONFIG = SchemathesisConfig.from_dict(
    {
        "checks": {
            # a prompt and max_tokens that do not fit, or sum up to too much, are valid by their schema
            "positive_data_acceptance": {"expected-statuses": ["2xx", "400", "401", "404"]},
        }
    }
)


def locked_gateway() -> FakeGateway:
    config = GatewayConfig(api_keys_env="KEYS", admin=AdminConfig(key_env="ADMIN"))
    gateway = FakeGateway(config=config, environ=ENVIRON)
    gateway.state.observers.close()
    return gateway


GATEWAYS = {"open": FakeGateway(), "locked": locked_gateway()}
SCHEMAS = {
    name: schemathesis.openapi.from_asgi("/openapi.json", gateway.app, config=CONFIG)
    for name, gateway in GATEWAYS.items()
}
HEADERS = {"open": {}, "locked": {"Authorization": "Bearer canary"}}
OPERATIONS: list[tuple[str, Any]] = [
    (name, result.ok())
    for name, schema in SCHEMAS.items()
    for result in schema.get_all_operations()
    if isinstance(result, Ok)
]


def drive(name: str, operation: Any, num_examples: int) -> None:
    """Send what the document allows and what it does not, and check every answer against it."""
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    for mode in modes:

        @hypothesis.settings(
            max_examples=num_examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def once(case: Any) -> None:
            case.call_and_validate(headers=HEADERS[name])

        try:
            once()
        except hypothesis.errors.Unsatisfiable:
            assert mode is schemathesis.GenerationMode.NEGATIVE, "nothing is valid"
        GATEWAYS[name].assert_idle()


@pytest.mark.parametrize(
    ("name", "operation"), OPERATIONS, ids=[f"{n} {o.method} {o.path}" for n, o in OPERATIONS]
)
def test_the_server_does_what_its_document_says(name: str, operation: Any) -> None:
    drive(name, operation, FAST if operation.body and name == "open" else WITHOUT_BODY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "operation"), OPERATIONS, ids=[f"{n} {o.method} {o.path}" for n, o in OPERATIONS]
)
def test_the_server_does_what_its_document_says_at_length(name: str, operation: Any) -> None:
    drive(name, operation, THOROUGH)


def documents() -> dict[str, Any]:
    found = {}
    for name, gateway in GATEWAYS.items():
        with TestClient(gateway.app) as client:
            found[name] = client.get("/openapi.json").json()
    return found


def test_every_route_is_described() -> None:
    document = documents()["open"]
    described = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item
    }
    routes = {
        (method, route.path.replace(":path", ""))
        for route in GATEWAYS["open"].app.app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert described == routes
    driven = {(each.method.upper(), each.path) for _, each in OPERATIONS}
    assert driven == routes - {("GET", "/openapi.json")}
    operations = [each for item in document["paths"].values() for each in item.values()]
    assert len({each["operationId"] for each in operations}) == len(operations)
    assert all(each["summary"] for each in operations)


def test_the_document_says_where_a_key_is_needed() -> None:
    def asks(name: str) -> set[str]:
        paths = documents()[name]["paths"]
        return {p for p, item in paths.items() for each in item.values() if each["security"]}

    assert asks("open") == set()
    assert asks("locked") == set(documents()["locked"]["paths"]) - {
        "/health", "/ready", "/openapi.json",
    }  # fmt: skip
