"""Templates from the model file, over HTTP: absent, broken, hostile, refusing, and how often BOS is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tokenizers
import transformers
from starlette.testclient import TestClient

from headrace.testing.fake_client import FakeClient, fake_card
from headrace.testing.fake_gateway import FakeGateway
from headrace.testing.tokenizers import CHATML_TEMPLATE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"messages": [{"role": "user", "content": "hi"}]}
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n\n' "
    "+ message['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] | trim }}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>model\n' }}{%- endif -%}"
)
Serve = Callable[..., TestClient]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return `serve(**changes)`: a client of a gateway whose model card has these changes."""
    gateways: list[FakeGateway] = []
    clients: list[TestClient] = []

    def start(**changes: Any) -> TestClient:
        gateway = FakeGateway(FakeClient(card=fake_card(**changes)))
        client = TestClient(gateway.app)
        client.__enter__()
        gateways.append(gateway)
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.__exit__()
    for gateway in gateways:
        gateway.assert_idle()
        gateway.state.observers.close()


def refusal(client: TestClient, body: dict[str, Any] = USER) -> str:
    """Return the message of a chat's 400, once completions are known to work beside it."""
    response = client.post(CHAT, json=body)
    assert response.status_code == 400, response.text
    assert client.post(COMPLETIONS, json={"prompt": "hi"}).status_code == 200
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize("template", [None, "{% for message in", "{{ messages | nothing }}"])
def test_without_a_usable_template_only_completions_work(
    serve: Serve, template: str | None
) -> None:
    """T11: no template and one that cannot be parsed; nothing stands in for it silently."""
    assert "template" in refusal(serve(chat_template=template))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
    ],
)
def test_a_template_that_attacks_is_a_refusal(serve: Serve, template: str) -> None:
    """T10: neither Python nor endless loops; the server answers on."""
    assert "uid=" not in refusal(serve(chat_template=template))


def test_a_templates_own_refusal_is_told(serve: Serve) -> None:
    """T10: raise_exception is a 400 with its words."""
    client = serve(chat_template="{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in refusal(client)


@pytest.mark.parametrize("template", [LLAMA3_TEMPLATE, GEMMA_TEMPLATE, CHATML_TEMPLATE])
@pytest.mark.parametrize("add_bos_token", [True, False])
def test_a_chat_has_exactly_the_tokens_of_the_reference(
    serve: Serve, template: str, add_bos_token: bool
) -> None:
    """T01: what the template writes is all there is, although the tokenizer's own rule adds BOS."""
    card = fake_card(chat_template=template, add_bos_token=add_bos_token)
    data = json.loads(card.tokenizer_json)
    bos = card.special_tokens["bos_token"]
    bos_id = next(token["id"] for token in data["added_tokens"] if token["content"] == bos)
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }  # fmt: skip
    client = serve(
        chat_template=template, add_bos_token=add_bos_token, tokenizer_json=json.dumps(data)
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is \u00e9? \U0001f600 "},
        {"role": "assistant", "content": "A letter."},
        {"role": "user", "content": "And now"},
    ]
    tokens = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(data)), **card.special_tokens
    )
    assert tokens == reference.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    assert tokens.count(bos_id) == (0 if template == CHATML_TEMPLATE else 1)
    raw = client.post("/tokenize", json={"prompt": "hi"}).json()["tokens"]
    pasted = client.post("/tokenize", json={"prompt": bos + "hi"}).json()["tokens"]
    assert raw.count(bos_id) == int(add_bos_token)
    assert pasted.count(bos_id) == 1


@pytest.mark.parametrize("content", ["To be ", [{"type": "text", "text": "To be "}]])
@pytest.mark.parametrize("generation", [True, False, None])
@pytest.mark.parametrize("continuing", [True, False, None])
def test_continuing_an_answer_in_all_combinations(
    serve: Serve, content: object, generation: bool | None, continuing: bool | None
) -> None:
    """T07: both flags are a refusal; a continuation adds nothing behind the content, space included."""
    client = serve()
    messages = [*USER["messages"], {"role": "assistant", "content": content}]
    flags = {"add_generation_prompt": generation, "continue_final_message": continuing}
    body = {"messages": messages, **flags}
    if generation and continuing:
        assert "continue_final_message" in refusal(client, body)
        return
    tokens = client.post("/tokenize", json=body).json()["tokens"]
    prompt = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    if continuing:
        assert prompt.endswith("<|im_start|>assistant\nTo be ")
    else:
        turn = "" if generation is False else "<|im_start|>assistant\n"
        assert prompt.endswith("<|im_start|>assistant\nTo be <|im_end|>\n" + turn)
    answer = client.post(CHAT, json=body).json()
    assert answer["choices"][0]["message"]["content"] == "Hello world"
