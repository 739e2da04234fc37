"""What must hold between the keys of one replica, and of one replica and its model."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from headrace.config.schema import Config, ReplicaEntry
from headrace.errors import ConfigError
from headrace.plugins.values import show

_ONLY_HTTP = (
    "url",
    "model",
    "api_key_env",
    "send_cache_salt",
    "connect_timeout",
    "first_byte_timeout",
    "idle_timeout",
)
_ONLY_PROCESS = ("hang_timeout",)


def check_replicas(config: Config, origins: Mapping[str, str]) -> None:
    """Raise ConfigError for the first entry of a `replicas` list that cannot work."""
    for model_index, model in enumerate(config.models):
        if isinstance(model.replicas, int):
            continue
        for index, entry in enumerate(model.replicas):
            prefix = f"models.{model_index}.replicas.{index}"
            problem = entry_problem(entry)
            if problem is not None:
                key, text = problem
                where = origins.get(f"{prefix}.{key}", "default")
                raise ConfigError(f"{where}, key {prefix}.{key}: {text}")


def entry_problem(entry: ReplicaEntry) -> tuple[str, str] | None:
    """Return (key, what is wrong with it), or None where the entry can work."""
    if entry.kind == "http":
        problem = url_problem(entry.url)
        if problem is not None:
            return "url", problem
    if not 1 <= entry.count <= 64:
        return "count", f"must be from 1 to 64, got {entry.count}"
    for name in ("connect_timeout", "first_byte_timeout", "idle_timeout", "hang_timeout"):
        if not getattr(entry, name) >= 0.01:
            return name, f"must be at least 0.01 s, got {getattr(entry, name):g}"
    foreign = {"http": _ONLY_PROCESS, "process": _ONLY_HTTP}.get(
        entry.kind, _ONLY_HTTP + _ONLY_PROCESS
    )
    for field in msgspec.structs.fields(ReplicaEntry):
        if field.name in foreign and getattr(entry, field.name) != field.default:
            return field.name, f"a replica of kind {entry.kind} has no {field.name}; take it out"
    return None


def url_problem(url: str) -> str | None:
    """Return what is wrong with the URL of an http replica."""
    if not url:
        return "is missing; a replica of kind http needs one, such as http://10.0.0.7:8000"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return f"{show(url)} is no URL: {error}"
    if any(character <= " " or character == "\x7f" for character in url):
        return f"must have no spaces or control characters, got {show(url)}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"must start with http:// or https:// and name a host, got {show(url)}"
    if parts.username is not None or parts.query or parts.fragment:
        return "must have no user, query or fragment; name a key's variable in api_key_env"
    return None
