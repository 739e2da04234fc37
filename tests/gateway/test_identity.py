"""Who asks: salts that cannot imitate each other, models and priorities within a key's bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.gateway.identity import (
    ANONYMOUS,
    Identity,
    ModelNotAllowed,
    identity_of,
    set_identity,
)


def test_nobody_was_asked_for_a_key() -> None:
    assert identity_of({"type": "http"}) is ANONYMOUS


def test_an_identity_travels_in_the_scope() -> None:
    scope = {"type": "http"}
    set_identity(scope, Identity(tenant="acme"))
    assert identity_of(scope).tenant == "acme"


@given(st.text(), st.text(), st.text(), st.text())
def test_different_pairs_of_salts_give_different_salts(a: str, b: str, c: str, d: str) -> None:
    first, second = Identity(cache_salt=a).salt_with(b), Identity(cache_salt=c).salt_with(d)
    assert (first == second) == ((a, b) == (c, d))


def test_a_client_salt_cannot_imitate_a_tenant() -> None:
    assert ANONYMOUS.salt_with("4:acme") != Identity(cache_salt="acme").salt_with("")


def test_models_of_a_key() -> None:
    ANONYMOUS.check_model("anything")
    identity = Identity(models=frozenset({"small"}))
    identity.check_model("small")
    with pytest.raises(ModelNotAllowed, match="'large'") as raised:
        identity.check_model("large")
    assert raised.value.info().http_status == 403


@pytest.mark.parametrize(
    ("bounds", "asked", "priority"),
    [(None, None, 0), (None, -7, -7), ((-2, 5), 3, 3), ((2, 5), None, 2), ((-5, -1), None, -1)],
)
def test_priorities(bounds: tuple[int, int] | None, asked: int | None, priority: int) -> None:
    assert Identity(priority_bounds=bounds).priority_of(asked) == priority


def test_a_priority_outside_the_bounds_of_a_key_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="between 0 and 5 for this API key, got -1"):
        Identity(priority_bounds=(0, 5)).priority_of(-1)
