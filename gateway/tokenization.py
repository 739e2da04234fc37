"""POST /tokenize and /detokenize: the model's own tokens, without running the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from headrace.errors import InvalidRequest, shown
from headrace.gateway.call import TargetModel
from headrace.gateway.chat import chat_token_ids
from headrace.gateway.dispatch import find_target
from headrace.gateway.errors import JSONBytes
from headrace.gateway.identity import identity_of
from headrace.gateway.json_body import decode_body, read_body
from headrace.gateway.openai_schema import (
    DETOKENIZE_DECODER,
    TOKENIZE_DECODER,
    DetokenizeBody,
    TokenizeBody,
)
from headrace.gateway.readiness import check_any_ready
from headrace.gateway.state import GatewayState, Limits

BodyT = TypeVar("BodyT", TokenizeBody, DetokenizeBody)


async def read_call(
    state: GatewayState, scope: Scope, receive: Receive, decoder: msgspec.json.Decoder[BodyT]
) -> tuple[BodyT, TargetModel, int]:
    """Return the body, the model it asks for, and the bytes it had. Raises the refusal."""
    check_any_ready(state)
    raw = await read_body(scope, receive, state.config.gateway.max_body_bytes)
    body = decode_body(raw, decoder)
    target = await find_target(state, body.model)
    identity_of(scope).check_model(target.card.name)
    return body, target, len(raw)


@dataclass(frozen=True, slots=True)
class Tokenize:
    """POST /tokenize."""

    state: GatewayState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self.state
        body, target, num_bytes = await read_call(state, scope, receive, TOKENIZE_DECODER)
        answer = await state.texts.run(
            lambda: tokenize(body, target, state.limits), num_bytes=num_bytes
        )
        await JSONBytes(answer)(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Detokenize:
    """POST /detokenize."""

    state: GatewayState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self.state
        body, target, num_bytes = await read_call(state, scope, receive, DETOKENIZE_DECODER)
        answer = await state.texts.run(lambda: detokenize(body, target), num_bytes=num_bytes)
        await JSONBytes(answer)(scope, receive, send)


def tokenize(body: TokenizeBody, target: TargetModel, limits: Limits) -> dict[str, Any]:
    """Return the answer of /tokenize."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    tokenizer = target.text.tokenizer
    if body.prompt is not None:
        add_bos = False if body.add_special_tokens is False else None
        tokens = tokenizer.encode(body.prompt, add_bos=add_bos)
    else:
        tokens = chat_token_ids(body, target.text, limits)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": target.card.max_model_len,
        "tokens": tokens,
    }
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in tokens]
    return answer


def detokenize(body: DetokenizeBody, target: TargetModel) -> dict[str, Any]:
    """Return the answer of /detokenize; special tokens are written out."""
    if body.tokens is None:
        raise InvalidRequest("tokens is missing: give a list of token ids", param="tokens")
    vocab_size = target.card.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"tokens: token id {shown(token_id)} is outside the vocabulary of {vocab_size} "
                f"tokens (0 to {vocab_size - 1})",
                param="tokens",
            )
    return {"prompt": target.text.tokenizer.decode(body.tokens, skip_special=False)}
