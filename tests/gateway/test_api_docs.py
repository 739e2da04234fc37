"""docs/api.md has every path, field, code and setting that the gateway has."""

from __future__ import annotations

import pathlib

import pytest
from starlette.routing import Route

from headrace.errors import RequestError
from headrace.gateway.errors import NotReady
from headrace.gateway.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from headrace.testing.fake_gateway import FakeGateway

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
FIELDS = {
    name
    for body in (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
    for name in body.__struct_fields__
}
NOT_SENT = {"request_aborted", "client_stalled"}  # the client is gone: nobody reads them


def codes(kind: type[RequestError]) -> set[str]:
    return {kind.code}.union(*(codes(sub) for sub in kind.__subclasses__()))


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_fields(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_paths() -> None:
    routes = [route for route in FakeGateway().app.app.routes if isinstance(route, Route)]
    assert len(routes) >= 9
    for route in routes:
        (method,) = (route.methods or set()) - {"HEAD"}
        assert f"`{method} {route.path.replace(':path', '')}`" in PAGE


def test_codes() -> None:
    assert NotReady.code in codes(RequestError)
    for code in codes(RequestError) - NOT_SENT:
        assert f"`{code}`" in PAGE, code
