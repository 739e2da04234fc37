"""`headrace replicas`: list, add, drain, restart and take out the replicas of a running server."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from headrace.cli.table import print_table
from headrace.errors import ConfigError

replicas = typer.Typer(
    name="replicas",
    help="List, add, drain, restart and take out the replicas of a running server.",
    no_args_is_help=True,
)
Url = Annotated[str, typer.Option("--url", help="The server's admin API.")]
KeyEnv = Annotated[str, typer.Option("--key-env", help="Variable that holds the admin key.")]
ReplicaId = Annotated[str, typer.Argument(help="A replica's id, as `list` shows it.")]
_URL = "http://127.0.0.1:8000"
_KEY_ENV = "HEADRACE_ADMIN_KEY"


@replicas.command("list")
def list_replicas(url: Url = _URL, key_env: KeyEnv = _KEY_ENV) -> None:
    """Show every replica: its state, requests in flight, restarts."""
    rows = [("ID", "KIND", "STATE", "REQUESTS", "RESTARTS", "REASON")]
    for each in _call("GET", "/admin/replicas", url, key_env)["replicas"]:
        names = ("id", "kind", "state", "requests", "restarts", "reason")
        rows.append(tuple(str(each.get(name, "")) for name in names))  # type: ignore[arg-type]
    print_table(rows)


@replicas.command("add")
def add(
    model: Annotated[str, typer.Argument(help="The model that it shall serve.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="--set kind=http --set url=http://10.0.0.7:8000. Repeatable."),
    ] = None,
    url: Url = _URL,
    key_env: KeyEnv = _KEY_ENV,
) -> None:
    """Add replicas to a model; without settings, one engine process."""
    body: dict[str, Any] = {"model": model}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: write KEY=VALUE, such as kind=http")
        body[name] = _value(value)
    for name in _call("POST", "/admin/replicas", url, key_env, body)["added"]:
        typer.echo(name)


@replicas.command("drain")
def drain(replica: ReplicaId, url: Url = _URL, key_env: KeyEnv = _KEY_ENV) -> None:
    """Send a replica nothing new; what it runs goes on."""
    _change("POST", f"/{replica}/drain", url, key_env)


@replicas.command("resume")
def resume(replica: ReplicaId, url: Url = _URL, key_env: KeyEnv = _KEY_ENV) -> None:
    """Send a drained replica requests again."""
    _change("POST", f"/{replica}/resume", url, key_env)


@replicas.command("restart")
def restart(replica: ReplicaId, url: Url = _URL, key_env: KeyEnv = _KEY_ENV) -> None:
    """Drain a replica, then start it anew under the same id."""
    _change("POST", f"/{replica}/restart", url, key_env)


@replicas.command("remove")
def remove(replica: ReplicaId, url: Url = _URL, key_env: KeyEnv = _KEY_ENV) -> None:
    """Drain a replica, then stop it and forget it."""
    _change("DELETE", f"/{replica}", url, key_env)


@replicas.command("reload")
def reload(url: Url = _URL, key_env: KeyEnv = _KEY_ENV) -> None:
    """Make the replicas those of the server's YAML, read again."""
    typer.echo(json.dumps(_call("POST", "/admin/reload", url, key_env)))


def _change(method: str, path: str, url: str, key_env: str) -> None:
    answer = _call(method, f"/admin/replicas{path}", url, key_env)
    typer.echo(f"{answer['id']}: {answer['state']}")


def _call(method: str, path: str, url: str, key_env: str, body: object = None) -> dict[str, Any]:
    """Return the server's answer. ConfigError with its reason where it refuses or is not there."""
    import httpx

    key = os.environ.get(key_env, "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    content = b"" if body is None else json.dumps(body).encode()
    try:
        response = httpx.request(
            method, url.rstrip("/") + path, headers=headers, content=content, timeout=30
        )
        answer: dict[str, Any] = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(
            f"--url {url}: no admin API answers there ({error}); name the server's address"
        ) from error
    if response.is_error:
        raise ConfigError(str(answer.get("error", {}).get("message", response.status_code)))
    return answer


def _value(text: str) -> object:
    """Return a number as such, everything else as text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (int, float)) else text
