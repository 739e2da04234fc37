"""Who asks: decided once at the door, before a body is read, and carried in the ASGI scope.

A tenant's name is a fact for policies and for the prefix cache. It never becomes a metric's label, a
log field or part of an error.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from starlette.types import Scope

from headrace.errors import InvalidRequest, RequestError

_SCOPE_KEY = "headrace.identity"


class ModelNotAllowed(RequestError):
    """The caller's key does not reach this model."""

    code = "model_not_allowed"
    http_status = 403


@dataclass(frozen=True, slots=True)
class Identity:
    """One caller. The default is the anonymous one, who may use every model."""

    tenant: str = ""
    """Whose limits and whose cache; "" is everybody without a key."""
    organization: str = ""
    """What the tenant belongs to; "" is none."""
    cache_salt: str = ""
    """Mixed into prefix-cache keys; callers with different salts share nothing."""
    is_admin: bool = False
    """Whether the caller may use /admin."""
    models: frozenset[str] | None = None
    """Models the caller may use; None is all."""
    priority_bounds: tuple[int, int] | None = None
    """Lowest and highest `priority` that a request of the caller may carry; None is any."""

    def salt_with(self, client_salt: str) -> str:
        """Return the prefix-cache salt of a request whose body asks for `client_salt`.

        The caller's own part goes first with its length, so that no client salt can imitate another
        caller's. Empty only where both parts are.
        """
        if not self.cache_salt and not client_salt:
            return ""
        return f"{len(self.cache_salt)}:{self.cache_salt}{client_salt}"

    def salt_elsewhere(self, client_salt: str) -> str:
        """Return the same for another server: a digest, which tells it nothing of the tenant's name.

        Empty where the caller has no salt of its own; what its body asks for then goes there as it is.
        """
        if not self.cache_salt:
            return ""
        salt = self.salt_with(client_salt).encode("utf-8", "surrogatepass")
        return hashlib.sha256(b"headrace/" + salt).hexdigest()[:32]

    def may_use(self, model: str) -> bool:
        """Whether this model exists for the caller."""
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Raise ModelNotAllowed where the caller's key does not reach this model."""
        if not self.may_use(model):
            raise ModelNotAllowed(
                f"this API key may not use the model '{model}'; GET /v1/models lists what it may use",
                param="model",
            )

    def priority_of(self, asked: int | None) -> int:
        """Return the priority of a request: what was asked for, or the nearest to 0 that is allowed.

        Raises InvalidRequest where what was asked for is outside the caller's bounds.
        """
        low, high = self.priority_bounds or (min(asked or 0, 0), max(asked or 0, 0))
        if asked is None:
            return min(max(0, low), high)
        if not low <= asked <= high:
            raise InvalidRequest(
                f"priority must be between {low} and {high} for this API key, got {asked}",
                param="priority",
            )
        return asked


ANONYMOUS = Identity()


def identity_of(scope: Scope) -> Identity:
    """Return who asks; the anonymous caller where nobody was asked for a key."""
    identity = scope.get(_SCOPE_KEY, ANONYMOUS)
    assert isinstance(identity, Identity)
    return identity


def set_identity(scope: Scope, identity: Identity) -> None:
    """Note who asks, for everything that handles the request from here on."""
    scope[_SCOPE_KEY] = identity
