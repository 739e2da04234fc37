"""What a request has to satisfy before it may wait, and the sequences it becomes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from headrace.engine.output import SequenceOutput
from headrace.engine.sampling_rows import SequenceSampling
from headrace.engine.sequence import Family, Sequence, Status, choice_seed
from headrace.errors import ContextLengthExceeded, InvalidRequest
from headrace.text.tokenizer import Tokenizer
from headrace.types import GenerationRequest, RequestView, SamplingParams, check_token_ids


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the engine itself has to know of the model that its runner runs."""

    name: str
    revision: str
    """Digest of the checkpoint: part of every prefix-cache key."""
    tokenizer: Tokenizer | None
    """None: the engine says token ids and no text, and takes no request that needs text."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int


class Intake:
    """Checks requests against this engine's model and pool, and builds their sequences."""

    def __init__(
        self, model: ServedModel, *, max_model_len: int, block_size: int, num_blocks: int
    ) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._num_blocks = num_blocks

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequest where the request can never be served here, with the arithmetic."""
        sampling = request.sampling
        if self._model.tokenizer is None:  # a simulation: it reads no embedding of its ids
            _check_textless(sampling)
        else:
            check_token_ids(request.prompt_token_ids, sampling, self._model.vocab_size)
        if sampling.grammar is not None:
            raise InvalidRequest("grammar is not supported by this engine", param="grammar")
        num_prompt_tokens = len(request.prompt_token_ids)
        least = 0 if sampling.max_tokens == 0 else 1
        if num_prompt_tokens + least > self._max_model_len:
            blocks = -(-(num_prompt_tokens + least) // self._block_size)
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt_tokens} tokens and at least {least} more would be "
                f"generated: {blocks} blocks of {self._block_size} tokens. A sequence can have "
                f"{self._max_model_len} tokens here (the pool has {self._num_blocks} blocks); "
                "shorten the prompt",
                param="prompt",
            )
        if sampling.max_tokens and num_prompt_tokens + sampling.max_tokens > self._max_model_len:
            room = self._max_model_len - num_prompt_tokens
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is "
                f"{sampling.max_tokens}: {num_prompt_tokens + sampling.max_tokens} in all. A "
                f"sequence can have {self._max_model_len} tokens here; ask for at most {room} or "
                "shorten the prompt",
                param="max_tokens",
            )

    def family(self, request: GenerationRequest, now: float) -> Family:
        """Return the request's sequences; only the first holds the prompt until the others fork."""
        family = Family(request, now, num_unfinished=request.sampling.n)
        for index in range(request.sampling.n):
            family.sequences.append(self._sequence(family, index))
        return family

    def _sequence(self, family: Family, index: int) -> Sequence:
        request = family.request
        sampling = request.sampling
        prompt = request.prompt_token_ids
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            max_tokens = self._max_model_len - len(prompt)
        return Sequence(
            family=family,
            index=index,
            seed=choice_seed(sampling.seed, index),
            max_tokens=max_tokens,
            output=SequenceOutput(
                self._model.tokenizer,
                request_id=request.request_id,
                index=index,
                sampling=sampling,
                eos_token_ids=self._model.eos_token_ids,
                max_tokens=max_tokens,
                is_whole=request.is_whole,
            ),
            token_ids=array("I", prompt if index == 0 else ()),
            view=RequestView(
                request_id=request.request_id,
                choice=index,
                tenant=request.tenant,
                priority=request.priority,
                arrival_time=family.arrival_time,
                ttft_target_seconds=request.ttft_target_seconds,
                tpot_target_seconds=request.tpot_target_seconds,
                num_prompt_tokens=len(prompt),
            ),
            sampling=SequenceSampling(sampling, prompt, self._model.eos_token_ids),
            status=Status.WAITING if index == 0 else Status.PENDING,
        )


def _check_textless(sampling: SamplingParams) -> None:
    asked = {
        "stop": bool(sampling.stop),
        "logprobs": sampling.logprobs is not None,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidRequest(
                f"{name} needs text, and this engine has no tokenizer; leave {name} out", param=name
            )
