"""Rendering equals transformers' for templates of the common kinds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.errors import InvalidRequest, ModelError
from headrace.testing import CHATML_TEMPLATE
from headrace.text.chat_template import ChatTemplate

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'
        + message['content'] | trim + '<|eot_id|>' %}
    {{- content }}
{%- endfor %}
{%- if tools is not none %}{{- tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
QWEN = """{%- macro turn(role, content) -%}
{{ '<|im_start|>' ~ role ~ '\n' ~ content ~ '<|im_end|>\n' }}
{%- endmacro -%}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "tool" %}{% continue %}{% endif %}
    {%- if message.role == "assistant" and '</think>' in message.content %}
        {%- generation %}{{ turn('assistant', message.content.split('</think>')[-1].lstrip('\n')) }}
        {%- endgeneration %}
    {%- else %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
TEMPLATES = {
    "smollm2": SMOLLM2,
    "chatml": CHATML_TEMPLATE,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "qwen": QWEN,
}
USER = {"role": "user", "content": "What is é <b>'x'</b> 😀?\n"}
ANSWER = {"role": "assistant", "content": "  <think>hm</think>\nThe answer "}
CHATS: tuple[list[dict[str, Any]], ...] = (
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, ANSWER, {"role": "user", "content": "And now?"}],
    [{"role": "system", "content": ""}, USER, ANSWER],
)
TOOLS = [{"type": "function", "function": {"name": "f<x>", "parameters": {"é": 1}}}]


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    rendered, _ = render_jinja_template(
        conversations=[messages], chat_template=source, **SPECIAL_TOKENS, **options
    )
    return str(rendered[0])


def ours(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source, SPECIAL_TOKENS).render(messages, **options)


@pytest.mark.parametrize("messages", CHATS, ids=["user", "system", "turns", "answered"])
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(
    source: str, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    assert ours(source, messages, add_generation_prompt=add_generation_prompt) == theirs(
        source, messages, add_generation_prompt=add_generation_prompt
    )


def test_further_variables_and_tools_reach_the_template() -> None:
    extra = {"enable_thinking": False}
    assert ours(QWEN, [USER], extra=extra) == theirs(
        QWEN, [USER], add_generation_prompt=True, **extra
    )
    assert ours(LLAMA3, [USER], tools=TOOLS) == theirs(
        LLAMA3, [USER], tools=TOOLS, add_generation_prompt=True
    )


def test_a_real_models_template(smollm2_gguf: Path) -> None:
    from headrace.testing.model_driver import open_checkpoint

    assets = open_checkpoint(smollm2_gguf).text
    assert assets.chat_template is not None
    template = ChatTemplate(assets.chat_template, assets.special_tokens)
    for messages in CHATS:
        rendered, _ = render_jinja_template(
            conversations=[messages],
            chat_template=assets.chat_template,
            add_generation_prompt=True,
            **assets.special_tokens,
        )
        assert template.render(messages) == rendered[0]


# --- continuing the last message ------------------------------------------------------


@pytest.mark.parametrize("content", ["The capital ", " x", "", "a\n", "half </think> thought"])
@pytest.mark.parametrize("source", [SMOLLM2, CHATML_TEMPLATE])
def test_a_continuation_ends_with_the_content_exactly(source: str, content: str) -> None:
    text = ours(
        source, [USER, {"role": "assistant", "content": content}], continue_final_message=True
    )
    assert text.endswith("<|im_start|>assistant\n" + content)


@pytest.mark.parametrize("source", [LLAMA3, GEMMA])
def test_a_template_that_trims_keeps_the_end_of_a_continued_message(source: str) -> None:
    text = ours(
        source, [USER, {"role": "assistant", "content": "The "}], continue_final_message=True
    )
    assert text.endswith("\nThe ")


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_continuation_equals_transformers(source: str) -> None:
    messages = [USER, {"role": "assistant", "content": "The capital is"}]
    assert ours(source, messages, continue_final_message=True) == theirs(
        source, messages, continue_final_message=True
    )


def test_content_that_looks_like_the_mark_is_continued_whole() -> None:
    content = "x\ue000continue\ue001"
    messages = [USER, {"role": "assistant", "content": content}]
    assert ours(CHATML_TEMPLATE, messages, continue_final_message=True).endswith(content)


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [USER, {"role": "assistant", "content": "x"}]
    ours(CHATML_TEMPLATE, messages, continue_final_message=True)
    assert messages == [USER, {"role": "assistant", "content": "x"}]


def test_four_combinations_of_the_two_flags() -> None:
    messages = [USER, {"role": "assistant", "content": "The"}]

    def render(start: bool | None, go_on: bool) -> str:
        return ours(
            CHATML_TEMPLATE, messages, add_generation_prompt=start, continue_final_message=go_on
        )

    closed = render(False, False)
    assert closed.endswith("The<|im_end|>\n")
    assert render(True, False) == render(None, False) == closed + "<|im_start|>assistant\n"
    assert render(False, True) == render(None, True) == closed.removesuffix("<|im_end|>\n")
    with pytest.raises(InvalidRequest, match="cannot both be true") as caught:
        render(True, True)
    assert caught.value.param == "continue_final_message"


def test_a_message_the_template_does_not_print_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="does not print the last message") as caught:
        ours("{{ messages[0].content }}", [USER, ANSWER], continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    with pytest.raises(InvalidRequest, match="messages is empty"):
        ours(CHATML_TEMPLATE, [], continue_final_message=True)


# --- content ----------------------------------------------------------------------------


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("continue_final_message", [True, False])
def test_a_string_and_its_part_give_the_same_prompt(
    source: str, continue_final_message: bool
) -> None:
    def chat(content: Any) -> list[dict[str, Any]]:
        return [USER, {"role": "assistant", "content": content}]

    parts = [{"type": "text", "text": "The answer "}]
    assert ours(source, chat(parts), continue_final_message=continue_final_message) == ours(
        source, chat("The answer "), continue_final_message=continue_final_message
    )


def test_parts_are_lines_of_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, "c"]
    assert "user\na\nb\nc<|im_end|>" in ours(CHATML_TEMPLATE, [{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "x"}}],
            r"messages\[1\]\.content\[0\].*'image_url'",
        ),
        ([{"type": "text"}], r"messages\[1\]\.content\[0\]"),
        ([{"type": "text", "text": 3}], r"messages\[1\]\.content\[0\]"),
        (7, r"messages\[1\]\.content must be a string or a list"),
    ],
)
def test_content_that_is_no_text_is_refused_with_its_place(content: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        ours(CHATML_TEMPLATE, [USER, {"role": "user", "content": content}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": [], "name": None}])
def test_an_assistant_message_without_content_is_empty(message: Mapping[str, Any]) -> None:
    call = {"role": "assistant", "tool_calls": [], **message}
    assert "assistant\n<|im_end|>" in ours(SMOLLM2, [USER, call])


# --- refusals ---------------------------------------------------------------------------


def test_the_templates_own_refusal_is_a_400_with_its_words() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ours(GEMMA, [USER, USER])
    assert str(caught.value).startswith("Conversation roles must alternate")
    assert (caught.value.http_status, caught.value.param) == (400, "messages")


def test_messages_the_template_cannot_render_are_a_400() -> None:
    with pytest.raises(InvalidRequest, match="cannot render these messages: .*'role'"):
        ours(SMOLLM2, [{"content": "x"}])


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_variables_of_the_request_cannot_be_overridden(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'{name}' is set by the request") as caught:
        ours(CHATML_TEMPLATE, [USER], extra={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    ["{% for m in messages %}", "{{ messages | nonsense }}", "{% endif %}", "{{ 1 +* 2 }}"],
)
def test_a_broken_template_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="chat template cannot be"):
        ChatTemplate(source, {})
