"""Loads made from a seed: the shapes of published traces, without the traces.

Each returns as many requests as asked for, at a mean rate. What is shared is said with block ids, so
that a written trace replays elsewhere. Lengths are log-normal where the originals are heavy-tailed; the
docs say which published figures each follows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.errors import ConfigError, did_you_mean
from headrace.simulator.trace import HASH_BLOCK_TOKENS, Trace, TraceRequest, in_order

_SESSION_TURNS = 12


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of load, and the rate it comes at unless another is asked for."""

    make: Callable[[random.Random, int, float], list[TraceRequest]]
    requests_per_second: float
    about: str


def generate(name: str, *, num_requests: int, seed: int, rate: float | None = None) -> Trace:
    """Return a trace of a named workload. ConfigError where there is none of that name."""
    workload = WORKLOADS.get(name)
    if workload is None:
        raise ConfigError(
            f"--workload {name!r} is not known. {did_you_mean(name, WORKLOADS)}; there are "
            f"{', '.join(WORKLOADS)}"
        )
    rng = random.Random(f"{name} {seed}")
    requests = workload.make(rng, num_requests, rate or workload.requests_per_second)
    trace = in_order(name, requests)
    return Trace(name, trace.requests[:num_requests])


def _length(rng: random.Random, median: float, sigma: float, most: int, least: int = 1) -> int:
    return max(least, min(most, round(rng.lognormvariate(math.log(median), sigma))))


def _times(rng: random.Random, count: int, rate: float, shape: float = 1.0) -> list[float]:
    """Return arrivals with Gamma gaps: shape 1 is Poisson, less is burstier."""
    now, times = 0.0, []
    for _ in range(count):
        now += rng.gammavariate(shape, 1 / (shape * rate))
        times.append(now)
    return times


class _BlockIds:
    """Hands out ids for the blocks of prompts that grow."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, num_tokens: int) -> tuple[int, ...]:
        """Return new ids for so many tokens."""
        count = -(-num_tokens // HASH_BLOCK_TOKENS)
        first = self._next
        self._next += count
        return tuple(range(first, first + count))

    def grown(self, ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """Return the ids of a prompt that was continued to so many tokens.

        The last block keeps its id while it fills up: what was there is still its beginning.
        """
        missing = -(-num_tokens // HASH_BLOCK_TOKENS) - len(ids)
        return ids + self.take(missing * HASH_BLOCK_TOKENS) if missing > 0 else ids


def sharegpt_like(rng: random.Random, count: int, rate: float) -> list[TraceRequest]:
    """Chats: about 220 tokens in, 190 out, heavy tails, ten tenants."""
    return [
        TraceRequest(
            at,
            _length(rng, 120, 1.1, 4096, 4),
            _length(rng, 130, 0.9, 1024, 4),
            tenant=f"tenant-{rng.randrange(10)}",
        )
        for at in _times(rng, count, rate)
    ]


def azure_code_like(rng: random.Random, count: int, rate: float) -> list[TraceRequest]:
    """Code completion: long prompts, a dozen tokens out."""
    return [
        TraceRequest(at, _length(rng, 1500, 0.9, 7500, 16), _length(rng, 13, 0.9, 512))
        for at in _times(rng, count, rate)
    ]


def burst(rng: random.Random, count: int, rate: float) -> list[TraceRequest]:
    """Bursts (gaps with a coefficient of variation of 4): chats, long documents of one tenant, urgent ones."""
    requests = []
    for at in _times(rng, count, rate, shape=1 / 16):
        kind = rng.random()
        if kind < 0.2:
            prompt, output = _length(rng, 3000, 0.5, 8000), _length(rng, 300, 0.6, 1500)
            requests.append(TraceRequest(at, prompt, output, tenant="documents"))
            continue
        is_urgent = kind > 0.9
        prompt, output = _length(rng, 200, 0.9, 2000), _length(rng, 120, 0.8, 800)
        requests.append(
            TraceRequest(
                at,
                prompt,
                output,
                tenant="urgent" if is_urgent else f"chat-{rng.randrange(4)}",
                priority=-1 if is_urgent else 0,
            )
        )
    return requests


def agent_loop(rng: random.Random, count: int, rate: float) -> list[TraceRequest]:
    """Coding agents: a context that grows by tool results, most of it cached."""
    ids = _BlockIds()
    shared = [ids.take(8 * HASH_BLOCK_TOKENS) for _ in range(8)]
    requests: list[TraceRequest] = []
    sessions = 0
    begin = 0.0
    while len(requests) < count:
        begin += rng.expovariate(rate / _SESSION_TURNS)
        sessions += 1
        at, known = begin, shared[rng.randrange(8)]
        context = len(known) * HASH_BLOCK_TOKENS + _length(rng, 1500, 0.8, 8000)
        turns = 1 + int(rng.expovariate(1 / _SESSION_TURNS))
        for _ in range(turns):
            output = _length(rng, 252, 1.1, 4096)
            known = ids.grown(known, context)
            requests.append(
                TraceRequest(
                    at,
                    context,
                    output,
                    known,
                    tenant=f"team-{sessions % 6}",
                    session=f"session-{sessions}",
                )
            )
            context += output + _length(rng, 857, 1.42, 6000)
            if context > 20000:
                break
            at += 0.012 * output + _length(rng, 1500, 1.0, 60000) / 1000
    return requests


def shared_prefix(rng: random.Random, count: int, rate: float) -> list[TraceRequest]:
    """150 customers with a prompt of 6,144 tokens each, 1,200 tokens of question behind it."""
    ids = _BlockIds()
    size = 12 * HASH_BLOCK_TOKENS
    prefixes = [ids.take(size) for _ in range(150)]
    requests = []
    for at in _times(rng, count, rate):
        customer = rng.randrange(150)
        question = _length(rng, 1200, 0.2, 3000, 32)
        known = ids.grown(prefixes[customer], size + question)
        output = _length(rng, 200, 0.6, 1000)
        requests.append(
            TraceRequest(at, size + question, output, known, tenant=f"customer-{customer}")
        )
    return requests


def multi_round(rng: random.Random, count: int, rate: float) -> list[TraceRequest]:
    """Conversations of about six rounds, each prompt the last one with its answer and a new question."""
    ids = _BlockIds()
    system = ids.take(2 * HASH_BLOCK_TOKENS)
    requests: list[TraceRequest] = []
    begin, users = 0.0, 0
    while len(requests) < count:
        begin += rng.expovariate(rate / 6)
        users += 1
        at, known = begin, system
        context = len(system) * HASH_BLOCK_TOKENS
        for _ in range(1 + int(rng.expovariate(1 / 5))):
            context += _length(rng, 100, 0.9, 2000)
            if context > 16000:
                break
            output = _length(rng, 150, 0.8, 1000)
            known = ids.grown(known, context)
            session = f"user-{users}"
            requests.append(
                TraceRequest(
                    at, context, output, known, tenant=f"group-{users % 4}", session=session
                )
            )
            context += output
            at += 0.02 * output + _length(rng, 20000, 0.8, 300000) / 1000
    return requests


WORKLOADS: Mapping[str, Workload] = {
    "sharegpt-like": Workload(sharegpt_like, 20.0, "chats, heavy-tailed lengths"),
    "azure-code-like": Workload(azure_code_like, 12.0, "code completion: long in, short out"),
    "burst": Workload(burst, 12.0, "bursts of chats, documents and urgent requests"),
    "agent-loop": Workload(agent_loop, 3.0, "coding agents: growing contexts, mostly cached"),
    "shared-prefix": Workload(shared_prefix, 10.0, "150 customers, a long prompt each"),
    "multi-round": Workload(multi_round, 10.0, "conversations that grow by their answers"),
}
