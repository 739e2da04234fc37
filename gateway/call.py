"""One generation call, parsed: everything from a body that is needed to run it and to answer.

Each endpoint turns its own body into a Call; from there on chat and completions are the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.errors import InvalidRequest
from headrace.gateway.answer import AnswerFormat
from headrace.gateway.identity import ANONYMOUS, Identity
from headrace.gateway.openai_schema import GenerationBody, ServiceObjective
from headrace.gateway.sampling import TokenRule, resolve_max_tokens
from headrace.gateway.state import Limits
from headrace.gateway.text_assets import ModelText
from headrace.prefix_hash import block_digests, root_digest
from headrace.types import GenerationRequest, ModelCard, SamplingParams, check_token_ids


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and when: what a request carries besides its body."""

    request_id: str
    arrival_time: float
    identity: Identity = ANONYMOUS
    session: str = ""
    """What the X-Session-ID header says belongs together."""

    def session_of(self, body: GenerationBody) -> str:
        """Return what a request belongs to: the header's word, else the body's `user`."""
        return self.session or (body.user if isinstance(body.user, str) else "")


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model a call is for: its card and its text side."""

    card: ModelCard
    text: ModelText


@dataclass(frozen=True, slots=True)
class Call:
    """One valid call."""

    card: ModelCard
    requests: tuple[GenerationRequest, ...]
    """One per prompt."""
    format: AnswerFormat
    stream: bool
    include_usage: bool
    session: str = ""

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.requests[0].sampling.n


def check_num_choices(num_prompts: int, num_choices: int, limits: Limits) -> None:
    """Bound what one call may ask for at once."""
    total = num_prompts * num_choices
    if total > limits.max_choices:
        raise InvalidRequest(
            f"n: {num_prompts} prompts with {num_choices} choices each are {total}; one call may "
            f"have at most {limits.max_choices}",
            param="n",
        )


def build_requests(
    body: GenerationBody,
    caller: Caller,
    card: ModelCard,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    rule: TokenRule,
) -> tuple[GenerationRequest, ...]:
    """Return one request per prompt; each gets an id of our own, whatever ids clients send.

    Hashes the prompts, so it belongs on a text thread.
    """
    objective = body.slo or ServiceObjective()
    identity = caller.identity
    salt = identity.salt_with(body.cache_salt or "")
    root = root_digest(model_revision=card.revision, salt=salt)
    requests: list[GenerationRequest] = []
    for index, token_ids in enumerate(prompts):
        max_tokens = resolve_max_tokens(rule, num_prompt_tokens=len(token_ids), card=card)
        own_sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
        check_token_ids(token_ids, own_sampling, card.vocab_size)
        request = GenerationRequest(
            request_id=caller.request_id if len(prompts) == 1 else f"{caller.request_id}-{index}",
            model=card.name,
            prompt_token_ids=token_ids,
            sampling=own_sampling,
            tenant=identity.tenant,
            priority=identity.priority_of(body.priority),
            arrival_time=caller.arrival_time,
            ttft_target_seconds=_seconds(objective.ttft_ms),
            tpot_target_seconds=_seconds(objective.tpot_ms),
            cache_salt=salt,
            cache_ttl_seconds=body.cache_ttl,
            prefix_hashes=tuple(block_digests(root, token_ids, card.block_size)),
            is_whole=not body.stream,
        )
        requests.append(request)
    return tuple(requests)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
