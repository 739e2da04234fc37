"""Before a model is ready everything that needs it says how far it is; liveness never depends on it."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from headrace.testing.fake_client import FakeClient, fake_card
from headrace.testing.fake_gateway import FakeGateway

USER = {"messages": [{"role": "user", "content": "hi"}]}
NEEDS_A_MODEL = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]


@pytest.mark.parametrize(("method", "path"), NEEDS_A_MODEL)
@pytest.mark.parametrize("body", [b"{}", b"not json"])
def test_starting(
    client: TestClient, engine: FakeClient, method: str, path: str, body: bytes
) -> None:
    engine.report("load", 0.25)
    response = client.request(method, path, content=body if method == "POST" else None)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    error = response.json()["error"]
    assert (error["code"], error["stage"], error["progress"]) == ("not_ready", "load", 0.25)
    assert error["type"] == "service_unavailable_error"
    assert error["message"] == "model 'tiny' is not ready: starting, load 25 %"


def test_ready_and_health(client: TestClient, engine: FakeClient) -> None:
    assert client.get("/ready").status_code == 200
    assert client.get("/ready").json()["ready"] is True
    engine.report("compile", 0.5)
    response = client.get("/ready")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert response.json() == {
        "ready": False,
        "models": {"tiny": {"state": "starting", "stage": "compile", "progress": 0.5}},
    }
    assert client.get("/health").status_code == 200
    engine.become_ready()
    assert client.get("/ready").status_code == 200
    assert client.post("/v1/chat/completions", json=USER).status_code == 200


def test_an_engine_that_died(client: TestClient, engine: FakeClient) -> None:
    engine.die()
    assert client.get("/ready").status_code == 503
    assert client.post("/v1/chat/completions", json=USER).status_code == 503
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/ready", "/v1/models"])
def test_the_last_words_of_an_engine_are_not_for_callers(
    client: TestClient, engine: FakeClient, path: str
) -> None:
    engine.fail("the engine process exited with code 7\nits last output:\n/home/me: a secret")
    response = client.get(path)
    assert response.status_code == 503
    assert "exited with code 7" in response.text
    assert "output" not in response.text and "secret" not in response.text


def test_the_reason_of_a_failed_start_is_told(client: TestClient, engine: FakeClient) -> None:
    engine.fail("model.gguf is an HTML page")
    status = client.get("/ready").json()["models"]["tiny"]
    assert (status["state"], status["reason"]) == ("failed", "model.gguf is an HTML page")
    message = client.get("/v1/models").json()["error"]["message"]
    assert message == "model 'tiny' is not ready: failed, model.gguf is an HTML page"


def test_one_replica_of_two_is_enough() -> None:
    first, second = FakeClient("tiny/0"), FakeClient("tiny/1")
    gateway = FakeGateway(first, second)
    first.report("load", 0.5)
    with TestClient(gateway.app) as client:
        assert client.get("/ready").status_code == 200
        assert client.post("/v1/chat/completions", json=USER).status_code == 200
    assert (len(first.requests), len(second.requests)) == (0, 1)


def test_two_models_are_ready_apart() -> None:
    first = FakeClient("a/0", fake_card("a"))
    second = FakeClient("b/0", fake_card("b"))
    gateway = FakeGateway(first, second)
    with TestClient(gateway.app) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["a", "b"]
        response = client.post("/v1/chat/completions", json=USER)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "model"
        second.report("load", 0.1)
        assert client.get("/ready").status_code == 503
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["a"]
        assert client.post("/v1/chat/completions", json={**USER, "model": "a"}).status_code == 200
        assert client.post("/v1/chat/completions", json={**USER, "model": "b"}).status_code == 503
        assert client.get("/v1/models/b").status_code == 503


def test_models(client: TestClient) -> None:
    model = {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "headrace",
        "root": "tiny",
        "max_model_len": 256,
    }
    assert client.get("/v1/models").json() == {"object": "list", "data": [model]}
    assert client.get("/v1/models/tiny").json() == model


@pytest.mark.parametrize("name", ["none", "org/name", "tinny"])
def test_an_unknown_model(client: TestClient, name: str) -> None:
    for response in (
        client.get(f"/v1/models/{name}"),
        client.post("/v1/chat/completions", json={**USER, "model": name}),
        client.post("/v1/completions", json={"prompt": "a", "model": name, "stream": True}),
        client.post("/tokenize", json={"prompt": "a", "model": name}),
    ):
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert name in error["message"] and "tiny" in error["message"]


@pytest.mark.parametrize("template", [None, "", "{% if %}"])
def test_without_a_template_completions_still_work(
    template: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeClient(card=fake_card(chat_template=template))
    gateway = FakeGateway(engine)
    with TestClient(gateway.app) as client:
        assert client.get("/ready").status_code == 200
        assert "chat is not available" in capsys.readouterr().out
        response = client.post("/v1/chat/completions", json=USER)
        assert response.status_code == 400
        assert "template" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "messages"
        assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
    gateway.assert_idle()


def test_what_a_template_refuses_is_a_400() -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with TestClient(FakeGateway(FakeClient(card=fake_card(chat_template=source))).app) as client:
        response = client.post("/v1/chat/completions", json=USER)
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]


def test_defaults_come_from_the_models_generation_config() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    engine = FakeClient(card=fake_card(default_sampling={**defaults, "max_new_tokens": 3}))
    with TestClient(FakeGateway(engine).app) as client:
        client.post("/v1/chat/completions", json=USER)
        client.post("/v1/completions", json={"prompt": "hi", "temperature": 0, "top_k": -1})
    chat, completion = (request.sampling for request in engine.requests)
    assert {name: getattr(chat, name) for name in defaults} == defaults
    assert (completion.temperature, completion.top_k, completion.top_p) == (0.0, -1, 0.9)
