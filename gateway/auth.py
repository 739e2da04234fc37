"""Who may use which path. A route cannot be made without saying so: each endpoint stands behind a Guarded.

Where no API keys are configured, everybody may use everything but /admin. What a caller presents never
goes into an error, a log or a metric.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.config import GatewayConfig
from headrace.errors import ConfigError, RequestError
from headrace.gateway.api_keys import ApiKeys, digest_of
from headrace.gateway.identity import ANONYMOUS, Identity, set_identity

Access = Literal["open", "key", "metrics", "admin", "admin_port"]
"""What a path asks for: nothing; an API key where keys are configured; what `gateway.metrics_access`
says; the admin key; on a port of its own, the admin key where there is one.
"""
_ADMIN = Identity(is_admin=True)


class Unauthenticated(RequestError):
    """No key was presented, or one that nobody has."""

    code = "invalid_api_key"
    http_status = 401


class AdminIsOff(RequestError):
    """The path needs an admin key and the server has none."""

    code = "admin_is_off"
    http_status = 403


@dataclass(slots=True)
class AuthCounts:
    """Refusals so far, by what was wrong with them."""

    missing: int = 0
    unknown: int = 0


@dataclass(slots=True)
class Authenticator:
    """Decides who asks. ConfigError where a variable that should hold a key is not set."""

    config: GatewayConfig = field(default_factory=GatewayConfig)
    environ: Mapping[str, str] = field(default_factory=dict)
    counts: AuthCounts = field(default_factory=AuthCounts)
    keys: ApiKeys = field(init=False)
    _admin_digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.keys = ApiKeys(self.config, self.environ)
        self._admin_digest = _admin_digest(self.config.admin.key_env, self.environ)

    def identify(self, scope: Scope, access: Access) -> Identity:
        """Return who asks. Raises Unauthenticated, or AdminIsOff where no key could help."""
        rule = self.config.metrics_access if access == "metrics" else access
        if rule == "open":
            return ANONYMOUS
        if rule == "admin_port" and not self._admin_digest:
            return _ADMIN
        if rule in ("admin", "admin_port"):
            return self._admin(scope)
        if not self.keys.is_required:
            return ANONYMOUS
        key = presented_key(scope)
        identity = self.keys.identify(key) if key else None
        if identity is None and access == "metrics" and self._is_admin_key(key):
            identity = _ADMIN
        if identity is None:
            raise self._refusal(key, "an API key", "ask whoever runs this server for one")
        return identity

    def _admin(self, scope: Scope) -> Identity:
        if not self._admin_digest:
            raise AdminIsOff(
                "this path needs the admin key, and the server has none; set gateway.admin.key_env "
                "to the name of an environment variable that holds one"
            )
        key = presented_key(scope)
        if not self._is_admin_key(key):
            raise self._refusal(key, "the admin key", "it is in the server's environment")
        return _ADMIN

    def _is_admin_key(self, key: str) -> bool:
        return hmac.compare_digest(digest_of(key), self._admin_digest)

    def _refusal(self, key: str, what: str, remedy: str) -> Unauthenticated:
        if key:
            self.counts.unknown += 1
            return Unauthenticated(f"the key presented is not {what} of this server; {remedy}")
        self.counts.missing += 1
        return Unauthenticated(
            f"this path needs {what}, as `Authorization: Bearer KEY` or `x-api-key: KEY`; {remedy}"
        )


@dataclass(frozen=True, slots=True)
class Guarded:
    """An endpoint that only those reach who may use it; it finds who asks in the scope."""

    app: ASGIApp
    authenticator: Authenticator
    access: Access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        set_identity(scope, self.authenticator.identify(scope, self.access))
        await self.app(scope, receive, send)


def presented_key(scope: Scope) -> str:
    """Return the key that a request carries, from `Authorization: Bearer` or `x-api-key`; "" for none."""
    found = ""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = value.partition(b" ")
            if kind.lower() == b"bearer":
                return _text(key)
        elif name == b"x-api-key":
            found = _text(value)
    return found


def _text(value: bytes) -> str:
    return value.strip().decode("utf-8", "surrogateescape")


def _admin_digest(variable: str, environ: Mapping[str, str]) -> str:
    if not variable:
        return ""
    key = environ.get(variable, "")
    if not key:
        raise ConfigError(
            f"gateway.admin.key_env: the environment variable {variable} is not set; put the admin "
            "key in it"
        )
    return digest_of(key)
