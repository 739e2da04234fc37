"""Text to tokens and back over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace.testing.fake_client import FakeClient, fake_card
from headrace.testing.fake_gateway import FakeGateway


def test_there_and_back(client: TestClient) -> None:
    text = "Hello \U0001f600 \u4f60\u597d"
    answer = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256
    back = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}


def test_a_chat_gives_the_tokens_the_endpoint_uses(client: TestClient, engine: FakeClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    client.post("/v1/chat/completions", json={"messages": messages})
    answer = client.post("/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == engine.requests[0].prompt_token_ids
    spelled = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert spelled == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_bos() -> None:
    with TestClient(FakeGateway(FakeClient(card=fake_card(add_bos_token=True))).app) as client:
        with_bos = client.post("/tokenize", json={"prompt": "hi"}).json()["tokens"]
        without = client.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False})
    assert with_bos[1:] == without.json()["tokens"] == [104, 105]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)
def test_refusals(client: TestClient, path: str, body: dict[str, Any], param: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
