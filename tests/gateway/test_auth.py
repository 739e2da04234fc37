"""Every path and what it asks of a caller; what a caller who lacks it is told; who shares a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace.config import AdminConfig, GatewayConfig
from headrace.errors import ConfigError
from headrace.gateway.admin import ReplicaAdmin, replica_operations
from headrace.gateway.admin_policies import PolicyAdmin, policy_operations
from headrace.gateway.app import create_app, operations
from headrace.gateway.auth import Access, Authenticator, Unauthenticated
from headrace.gateway.operation import Operation
from headrace.testing.fake_gateway import FakeGateway

KEYS = "acme:canary-acme,other:canary-other"
ENVIRON = {"KEYS": KEYS, "ADMIN": "canary-admin"}
ACCESS: dict[tuple[str, str], Access] = {
    ("POST", "/v1/chat/completions"): "key",
    ("POST", "/v1/completions"): "key",
    ("GET", "/v1/models"): "key",
    ("GET", "/v1/models/{model:path}"): "key",
    ("POST", "/tokenize"): "key",
    ("POST", "/detokenize"): "key",
    ("GET", "/health"): "open",
    ("GET", "/ready"): "open",
    ("GET", "/metrics"): "metrics",
    ("GET", "/openapi.json"): "open",
}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


def config(**keys: Any) -> GatewayConfig:
    return GatewayConfig(api_keys_env="KEYS", admin=AdminConfig(key_env="ADMIN"), **keys)


@pytest.fixture
def locked() -> Iterator[TestClient]:
    gateway = FakeGateway(config=config(), environ=ENVIRON)
    with TestClient(gateway.app) as client:
        yield client
    gateway.assert_idle()
    gateway.state.observers.close()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(client: TestClient, method: str, path: str, headers: dict[str, str]) -> Any:
    path = path.replace("{model:path}", "tiny")
    return client.request(method, path, json=BODIES.get(path), headers=headers)


def test_every_path_is_listed_with_what_it_asks() -> None:
    gateway = FakeGateway()
    listed = {(each.method, each.path): each.access for each in operations(gateway.state)}
    assert listed | {("GET", "/openapi.json"): "open"} == ACCESS
    routes = {(sorted(r.methods - {"HEAD"})[0], r.path) for r in gateway.app.app.routes}  # type: ignore[attr-defined]
    assert routes == set(ACCESS)


@pytest.mark.parametrize(("method", "path"), [place for place in ACCESS if place[1] != "/health"])
@pytest.mark.parametrize(
    "headers", [{}, bearer("wrong"), {"x-api-key": "wrong"}, {"authorization": "Basic canary-acme"}]
)
def test_without_a_key_there_is_401(
    locked: TestClient, method: str, path: str, headers: dict[str, str]
) -> None:
    response = ask(locked, method, path, headers)
    if ACCESS[method, path] == "open":
        assert response.status_code == 200
        return
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == 'Bearer realm="headrace"'
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("method", "path"), list(ACCESS))
@pytest.mark.parametrize(
    "headers",
    [bearer("canary-acme"), {"authorization": "bEARER  canary-acme"}, {"x-api-key": "canary-acme"}],
)
def test_a_key_opens_every_path_but_admin(
    locked: TestClient, method: str, path: str, headers: dict[str, str]
) -> None:
    assert ask(locked, method, path, headers).status_code == 200


@pytest.mark.parametrize(("method", "path"), list(ACCESS))
def test_where_no_keys_are_set_any_key_will_do(client: TestClient, method: str, path: str) -> None:
    assert ask(client, method, path, bearer("unused")).status_code == 200


@pytest.mark.parametrize(
    ("access", "open_to"),
    [
        ("key", {"canary-acme", "canary-admin"}),
        ("open", {"", "wrong", "canary-acme", "canary-admin"}),
        ("admin", {"canary-admin"}),
    ],
)
def test_the_metrics_are_open_to(access: str, open_to: set[str]) -> None:
    """M06: the rule of who may read the metrics is configured."""
    gateway = FakeGateway(config=config(metrics_access=access), environ=ENVIRON)
    with TestClient(gateway.app) as client:
        for key in ("", "wrong", "canary-acme", "canary-admin"):
            response = client.get("/metrics", headers=bearer(key) if key else {})
            assert response.status_code == (200 if key in open_to else 401), key


def admin_table(access: Access) -> list[Operation]:
    return [
        *replica_operations(ReplicaAdmin(None, None), access),  # type: ignore[arg-type]
        *policy_operations(PolicyAdmin(None), access),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("environ", [ENVIRON, {**ENVIRON, "ADMIN": ""}])
def test_every_path_of_admin_needs_the_admin_key(environ: dict[str, str]) -> None:
    admin = AdminConfig(key_env="ADMIN" if environ["ADMIN"] else "")
    settings = GatewayConfig(api_keys_env="KEYS", admin=admin)
    gateway = FakeGateway(config=settings, environ=environ)
    app = create_app(gateway.state, admin_table("admin"))
    table = admin_table("admin")
    assert len(table) >= 10
    with TestClient(app) as client:
        for each in table:
            path = each.path.replace("{replica:path}", "tiny/0").replace("{kind}", "routing")
            for headers in ({}, bearer("canary-acme"), bearer("wrong")):
                response = client.request(each.method, path, json={}, headers=headers)
                assert response.status_code == (401 if environ["ADMIN"] else 403), path
        document = client.get("/openapi.json").json()
    gateway.state.observers.close()
    described = {path for path in document["paths"] if path.startswith("/admin")}
    assert described == {each.path.replace(":path", "") for each in table}
    for path in described:
        for operation in document["paths"][path].values():
            assert operation["security"] and operation["summary"]


def scope(key: str = "") -> dict[str, Any]:
    pairs = [(b"authorization", b"Bearer " + key.encode())] if key else []
    return {"type": "http", "path": "/admin", "headers": pairs}


def test_only_the_admin_key_is_an_admin() -> None:
    authenticator = Authenticator(config(), ENVIRON)
    assert authenticator.identify(scope("canary-admin"), "admin").is_admin
    for key in ("", "canary-acme", "canary-admin2"):
        with pytest.raises(Unauthenticated):
            authenticator.identify(scope(key), "admin")
    assert (authenticator.counts.missing, authenticator.counts.unknown) == (1, 2)


def test_the_admin_key_is_no_api_key() -> None:
    with pytest.raises(Unauthenticated):
        Authenticator(config(), ENVIRON).identify(scope("canary-admin"), "key")


def test_without_an_admin_key_nobody_is_an_admin_but_on_a_port_of_its_own() -> None:
    authenticator = Authenticator()
    with pytest.raises(Exception, match=r"gateway\.admin\.key_env") as raised:
        authenticator.identify(scope("anything"), "admin")
    assert raised.value.http_status == 403  # type: ignore[attr-defined]
    assert authenticator.identify(scope(), "admin_port").is_admin
    with pytest.raises(Unauthenticated):
        Authenticator(config(), ENVIRON).identify(scope(), "admin_port")


def test_an_admin_variable_that_is_not_set_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"key_env: the environment variable ADMIN is not set"):
        Authenticator(GatewayConfig(admin=AdminConfig(key_env="ADMIN")), {})


def test_a_key_that_is_not_ascii(locked: TestClient) -> None:
    gateway = FakeGateway(config=config(), environ={**ENVIRON, "KEYS": "acme:schlüssel"})
    with TestClient(gateway.app) as client:
        headers = {"authorization": "Bearer schlüssel".encode()}
        assert client.get("/v1/models", headers=headers).status_code == 200  # type: ignore[arg-type]
        headers = {"authorization": b"Bearer \xff\xfe"}
        assert client.get("/v1/models", headers=headers).status_code == 401  # type: ignore[arg-type]


def test_the_engine_hears_who_asks(locked: TestClient) -> None:
    """C03: the salt comes from the key, and a client's own salt cannot undo it."""
    gateway = FakeGateway(config=config(), environ=ENVIRON)
    salts = []
    with TestClient(gateway.app) as client:
        for key, salt in (("canary-acme", ""), ("canary-other", ""), ("canary-other", "4:acme")):
            body = {**BODIES["/v1/completions"], "cache_salt": salt}
            assert client.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
            request = gateway.engine.requests[-1]
            salts.append((request.tenant, request.cache_salt))
    assert salts == [("acme", "4:acme"), ("other", "5:other"), ("other", "5:other4:acme")]


def test_keys_and_tenants_are_not_told(
    locked: TestClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """U03, M06: no key and no tenant in an error, a header, a log line or a metric."""
    seen = []
    for key in ("canary-acme", "canary-unknown"):
        for method, path in ACCESS:
            response = ask(locked, method, path, bearer(key))
            seen.append(response.text + str(response.headers))
    seen.append(locked.get("/metrics", headers=bearer("canary-acme")).text)
    seen.append("".join(capsys.readouterr()))
    for text in seen:
        assert "canary" not in text
        assert "acme" not in text


# --- web pages ----------------------------------------------------------------


PREFLIGHT = {
    "origin": "https://app.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_web_pages_may_not_call_unless_configured(client: TestClient) -> None:
    assert client.options("/v1/models", headers=PREFLIGHT).status_code == 405
    response = client.get("/v1/models", headers={"origin": "https://app.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_web_pages_of_a_configured_origin_may_call() -> None:
    gateway = FakeGateway(config=config(cors_origins=("https://app.example",)), environ=ENVIRON)
    with TestClient(gateway.app) as client:
        allowed = client.options("/v1/models", headers=PREFLIGHT)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        refused = client.get("/v1/models", headers={"origin": "https://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        foreign = client.options("/v1/models", headers={**PREFLIGHT, "origin": "https://x.example"})
        assert "access-control-allow-origin" not in foreign.headers
