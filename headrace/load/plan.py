"""What a load is made of: how many requests, how long, when they are sent. All of it repeats from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from headrace.errors import ConfigError

WORDS = (
    "river stone engine valley copper lantern meadow signal harbor winter paper bridge silver motor "
    "garden thunder window market forest candle ocean letter summer wheel"
).split()

Kind = Literal["fixed", "uniform", "normal", "lognormal"]
Endpoint = Literal["completions", "chat"]
_SHAPES: dict[str, tuple[Kind, str]] = {
    "uniform": ("uniform", "uniform:LOW,HIGH"),
    "normal": ("normal", "normal:MEAN,DEVIATION[,MOST]"),
    "lognormal": ("lognormal", "lognormal:MEDIAN,SIGMA[,MOST]"),
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts. Every draw is at least 1 and at most `most`."""

    kind: Kind = "fixed"
    first: float = 1.0
    """fixed: the count; uniform: the lowest; normal: the mean; lognormal: the median."""
    second: float = 0.0
    """uniform: the highest; normal: the standard deviation; lognormal: that of the logarithm."""
    most: int | None = None

    @classmethod
    def fixed(cls, count: int) -> Self:
        return cls("fixed", count)

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Return what `text` says: 120, uniform:50,200, normal:120,30 or lognormal:220,1.1,4000.

        Raises ConfigError, which names `option`, where it says nothing of the kind.
        """
        name, _, rest = text.partition(":")
        kind, shape = _SHAPES.get(name, ("fixed", "a number"))
        try:
            numbers = [float(part) for part in (rest or name).split(",")]
        except ValueError:
            numbers = []
        counts = {"fixed": (1,), "uniform": (2,)}.get(kind, (2, 3))
        is_right = (
            len(numbers) in counts
            and all(math.isfinite(number) for number in numbers)
            and numbers[0] >= (0 if kind == "normal" else 1)
            and (kind != "uniform" or numbers[1] >= numbers[0])
            and (len(numbers) < 2 or numbers[1] >= 0)
            and (len(numbers) < 3 or numbers[2] >= 1)
            and (kind != "fixed" or (not rest and numbers[0].is_integer()))
        )
        if not is_right:
            shapes = ", ".join(shape for _, shape in _SHAPES.values())
            raise ConfigError(
                f"{option} {text!r} is no length in tokens ({shape} was expected here). Give a whole "
                f"number from 1, or one of {shapes}"
            )
        most = int(numbers[2]) if len(numbers) == 3 else None
        return cls(kind, numbers[0], numbers[1] if len(numbers) > 1 else 0.0, most)

    def draw(self, rng: random.Random) -> int:
        """Return one count."""
        match self.kind:
            case "fixed":
                value = self.first
            case "uniform":
                value = rng.randint(int(self.first), int(self.second))
            case "normal":
                value = rng.gauss(self.first, self.second)
            case "lognormal":
                value = rng.lognormvariate(math.log(self.first), self.second)
        count = max(1, round(value))
        return count if self.most is None else min(count, self.most)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return str(int(self.first))
        numbers = [self.first, self.second, *([self.most] if self.most is not None else [])]
        return f"{self.kind}:" + ",".join(f"{number:g}" for number in numbers)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to send, where to and when.

    Closed loop: `concurrency` requests are in flight until all are done. Open loop, with a
    `request_rate`: requests are sent at times drawn beforehand, whatever became of those before.
    """

    url: str
    """With or without a trailing /v1."""
    model: str | None = None
    endpoint: Endpoint = "completions"
    concurrency: int = 1
    """Closed loop only."""
    request_rate: float | None = None
    """Requests per second of an open loop; None: a closed loop."""
    burstiness: float = 1.0
    """Shape of the Gamma distribution of the gaps: 1 is Poisson, less is burstier, inf is even."""
    max_concurrency: int | None = None
    """Open loop: at most so many in flight; what waits for that is part of its latency."""
    num_requests: int = 16
    prompt_tokens: Lengths = field(default_factory=lambda: Lengths.fixed(120))
    output_tokens: Lengths = field(default_factory=lambda: Lengths.fixed(96))
    shared_prefix_tokens: int = 0
    """Leading prompt tokens that requests of the shared share have in common."""
    shared_prefix_share: float = 1.0
    """Share of the requests, 0 to 1, that begin with the shared prefix."""
    prompt_ids: Sequence[Sequence[int]] = ()
    """Prompts as token ids, taken in turn instead of words: exact lengths on servers that take them."""
    seed: int = 0
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: what it asks for and when it is due, in seconds from the start (closed loop: 0)."""

    prompt: str | Sequence[int]
    output_tokens: int
    due_seconds: float = 0.0


def plan_requests(plan: LoadPlan) -> list[PlannedRequest]:
    """Return the plan's requests in the order in which they are sent.

    Prompts are common words, one token each in most vocabularies, unless the plan has token ids. The
    draws of prompts, of lengths and of arrivals are independent: changing one leaves the others.
    """
    words, lengths = random.Random(f"{plan.seed} words"), random.Random(f"{plan.seed} lengths")
    shared = [words.choice(WORDS) for _ in range(plan.shared_prefix_tokens)]
    requests = []
    for index, due in enumerate(arrivals(plan)):
        size, output = plan.prompt_tokens.draw(lengths), plan.output_tokens.draw(lengths)
        is_shared = lengths.random() < plan.shared_prefix_share
        prompt: str | Sequence[int]
        if plan.prompt_ids:
            prompt = plan.prompt_ids[index % len(plan.prompt_ids)]
        else:
            head = shared[:size] if is_shared else []
            prompt = " ".join([*head, *(words.choice(WORDS) for _ in range(size - len(head)))])
        requests.append(PlannedRequest(prompt, output, due))
    return requests


def arrivals(plan: LoadPlan) -> list[float]:
    """Return when each request is due, in seconds from the start, the first at 0.

    Gaps are Gamma distributed with mean 1 / rate and shape `burstiness`, then scaled so that the last
    of n requests is due at (n - 1) / rate: runs of different seeds offer the same load.
    """
    if plan.request_rate is None:
        return [0.0] * plan.num_requests
    rng = random.Random(f"{plan.seed} arrivals")
    times = [0.0]
    for _ in range(plan.num_requests - 1):
        is_even = math.isinf(plan.burstiness)
        gap = 1.0 if is_even else rng.gammavariate(plan.burstiness, 1.0 / plan.burstiness)
        times.append(times[-1] + gap)
    span = (plan.num_requests - 1) / plan.request_rate
    return [time * span / times[-1] if times[-1] > 0 else 0.0 for time in times]
