"""Tenants of one real server: who shares a prefix cache, and what nobody is told."""

from __future__ import annotations

import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace.gateway.api_keys import digest_of
from headrace.testing.script_file import write_script
from headrace.testing.server import StartedServer, started_server

ACME, ACME_TOO, OTHER, LATE = (f"canary-key-{name}" for name in ("a", "b", "c", "d"))
ADMIN = "canary-key-admin"
TENANTS = {ACME: "canary-acme", ACME_TOO: "canary-acme", OTHER: "canary-other"}
SECRET_PROMPT = "a prompt of many blocks that only one tenant knows, " * 10


def write_keys(path: pathlib.Path, tenants: dict[str, str]) -> None:
    entries = [
        f"  - sha256: {digest_of(key)}\n    tenant: {tenant}\n" for key, tenant in tenants.items()
    ]
    path.write_text("keys:\n" + "".join(entries))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def server(folder: pathlib.Path) -> Iterator[StartedServer]:
    write_script(folder / "script.json", [" word"] * 8)
    write_keys(folder / "keys.yaml", TENANTS)
    (folder / "headrace.yaml").write_text(
        "gateway: {api_keys_file: keys.yaml, metrics_access: admin, admin: {key_env: ADMIN_KEY}}\n"
        "models: [{name: m, source: 'scripted:script.json', engine: {kv_memory: 16MiB}}]\n"
        "logging: {format: json, level: debug}\n"
    )
    arguments = ["--config", str(folder / "headrace.yaml")]
    with started_server(arguments, environment={"ADMIN_KEY": ADMIN}) as server:
        yield server


def complete(url: str, key: str, **body: Any) -> httpx.Response:
    body = {"prompt": SECRET_PROMPT, "max_tokens": 2, **body}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def cached_tokens(url: str, key: str, **body: Any) -> int:
    usage = complete(url, key, **body).json()["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


def test_a_prompt_is_cached_for_its_own_tenant_only(server: StartedServer) -> None:
    """C03: the same tenant hits, another does not, whatever salt it sends."""
    assert cached_tokens(server.url, ACME) == 0
    assert cached_tokens(server.url, ACME) > 0
    assert cached_tokens(server.url, ACME_TOO) > 0
    assert cached_tokens(server.url, OTHER) == 0
    for salt in ("canary-acme", "11:canary-acme"):
        assert cached_tokens(server.url, OTHER, cache_salt=salt) == 0
    assert cached_tokens(server.url, OTHER) > 0


def test_keys_are_read_again_on_sighup(server: StartedServer, folder: pathlib.Path) -> None:
    assert complete(server.url, LATE).status_code == 401
    write_keys(folder / "keys.yaml", {**TENANTS, LATE: "canary-late"})
    server.process.send_signal(signal.SIGHUP)
    deadline = 200
    while complete(server.url, LATE).status_code != 200:
        deadline -= 1
        assert deadline, "the new key is not taken"


def test_keys_stay_where_the_rest_of_the_configuration_cannot_change(
    server: StartedServer, folder: pathlib.Path
) -> None:
    """What the log calls "as before" is as before, the keys too."""
    path, newest = folder / "headrace.yaml", "canary-key-newest"
    before = path.read_text()
    elsewhere = "replicas: [{kind: http, url: 'http://127.0.0.1:9', api_key_env: NOT_SET}]"
    path.write_text(before.replace("name: m,", f"name: m, {elsewhere},"))
    write_keys(folder / "keys.yaml", {**TENANTS, newest: "canary-newest"})
    server.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 30
    while not any("the configuration is as before" in line for line in server.output):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert complete(server.url, newest).status_code == 401
    path.write_text(before)


def test_no_key_and_no_tenant_is_told(server: StartedServer) -> None:
    """U03, M06: not in errors, headers, metrics, the log, nor what the engine prints."""
    seen = []
    for key in (ACME, OTHER, "canary-key-wrong"):
        for body in ({}, {"temperature": -1}, {"model": "none"}, {"max_tokens": 10**6}):
            response = complete(server.url, key, **body)
            seen.append(response.text + str(response.headers))
    headers = {"authorization": f"Bearer {ADMIN}"}
    assert httpx.get(f"{server.url}/metrics", timeout=60).status_code == 401
    page = httpx.get(f"{server.url}/metrics", headers=headers, timeout=60)
    assert 'headrace_auth_failures_total{reason="unknown"}' in page.text
    seen += [page.text, httpx.get(f"{server.url}/admin/replicas", headers=headers).text]
    seen += server.output
    assert any("request finished" in line for line in server.output)
    assert [text for text in seen if "canary" in text] == []
