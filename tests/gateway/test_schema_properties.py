"""Whatever JSON arrives, the answer is a 200, or a 400 with a whole error object; never a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from headrace.gateway.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from headrace.testing.fake_gateway import FakeGateway, parse_events

BODIES: dict[str, Any] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
SETTINGS = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

NUMBERS = st.one_of(
    st.integers(-3, 30),
    st.integers(),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(-2, 2),
)
TEXT = st.one_of(st.text(max_size=8), st.sampled_from(["", "a", "user", "text", "assistant", "5"]))
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)
ANY = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=8,
)
GOOD_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]), "content": TEXT}
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.one_of(st.sampled_from(["user", "assistant", "system", "tool"]), ANY),
        "content": st.one_of(
            TEXT, st.lists(st.fixed_dictionaries({"type": TEXT, "text": TEXT})), ANY
        ),
        "tool_calls": ANY,
        "name": ANY,
    },
)
PROMPT = st.one_of(
    TEXT,
    st.lists(TEXT, max_size=3),
    st.lists(st.integers(0, 349), max_size=5),
    st.lists(st.lists(st.integers(-1, 350), max_size=3), max_size=3),
    ANY,
)


def body_of(path: str) -> st.SearchStrategy[Any]:
    """Mostly well-formed bodies with fields of any kind in some places."""
    fields = {name: st.one_of(LEAVES, ANY) for name in BODIES[path].__struct_fields__}
    if "messages" in fields:
        good = st.lists(GOOD_MESSAGE, min_size=1, max_size=3)
        fields["messages"] = st.one_of(good, good, st.lists(MESSAGE, max_size=3), ANY)
    if "prompt" in fields:
        fields["prompt"] = PROMPT
    if "tokens" in fields:
        fields["tokens"] = st.one_of(st.lists(st.integers(-1, 400), max_size=5), ANY)
    fields["stream"] = st.one_of(st.booleans(), st.none(), ANY)
    fields["model"] = st.one_of(st.none(), st.just("tiny"), ANY)
    required = {name: fields.pop(name) for name in ("messages", "prompt") if name in fields}
    if path == "/tokenize":
        return st.fixed_dictionaries({}, optional={**fields, **required})
    # few optional fields at a time, or nearly every body would be refused for one of them
    few = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    return few.flatmap(
        lambda names: st.fixed_dictionaries({**required, **{name: fields[name] for name in names}})
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeGateway, TestClient]]:
    gateway = FakeGateway()
    with TestClient(gateway.app) as client:
        yield gateway, client
    gateway.state.observers.close()


def check(shared: tuple[FakeGateway, TestClient], path: str, raw: bytes) -> int:
    gateway, client = shared
    response = client.post(path, content=raw)
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert parse_events(response.content)[-1] == "[DONE]"
        else:
            assert isinstance(response.json(), dict)
    else:
        assert response.status_code in (400, 404), (response.text, raw)
        error = json.loads(response.content, parse_constant=pytest.fail)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and error["code"]
        assert len(error["message"]) < 1000
    gateway.assert_idle()
    return response.status_code


@pytest.mark.parametrize("path", list(BODIES))
def test_structured_bodies(shared: tuple[FakeGateway, TestClient], path: str) -> None:
    statuses: set[int] = set()

    @SETTINGS
    @given(body=body_of(path))
    def run(body: Any) -> None:
        statuses.add(check(shared, path, json.dumps(body).encode()))

    run()
    assert {200, 400} <= statuses, "the test must reach both"


@pytest.mark.parametrize("path", list(BODIES))
def test_any_bytes(shared: tuple[FakeGateway, TestClient], path: str) -> None:
    @SETTINGS
    @given(raw=st.one_of(st.binary(max_size=40), ANY.map(lambda value: json.dumps(value).encode())))
    def run(raw: bytes) -> None:
        check(shared, path, raw)

    run()
