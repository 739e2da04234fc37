"""What is sent repeats from a seed, and follows the distributions asked for."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from headrace.errors import ConfigError
from headrace.load import Lengths, LoadPlan, arrivals, plan_requests


@pytest.mark.parametrize(
    "text",
    ["120", "uniform:50,200", "normal:120,30", "lognormal:220,1.1", "lognormal:220,1.1,4000"],
)
def test_a_length_is_written_as_it_is_read(text: str) -> None:
    assert str(Lengths.parse(text, "--prompt-tokens")) == text


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "1.5", "nan", "uniform:9", "uniform:9,3", "normal:1,-1", "lognormal:0,1", "zipf:3",
     "fixed:3", "uniform:1,2,3", "normal:1,2,0", "120,3", "normal:inf,1"],
)  # fmt: skip
def test_a_wrong_length_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--prompt-tokens.*lognormal:MEDIAN"):
        Lengths.parse(text, "--prompt-tokens")


def test_lengths_follow_their_distribution() -> None:
    rng = random.Random(1)

    def draws(text: str) -> list[int]:
        return [Lengths.parse(text, "x").draw(rng) for _ in range(4000)]

    assert set(draws("7")) == {7}
    assert set(draws("uniform:3,5")) == {3, 4, 5}
    normal = draws("normal:120,30")
    assert abs(statistics.fmean(normal) - 120) < 3 and abs(statistics.pstdev(normal) - 30) < 3
    assert min(normal) >= 1 and min(draws("normal:2,30")) == 1
    assert abs(statistics.median(draws("lognormal:220,1")) - 220) < 20
    assert max(draws("lognormal:220,2,500")) == 500


def test_the_same_seed_gives_the_same_requests_and_another_gives_others() -> None:
    plan = LoadPlan(
        url="", num_requests=5, prompt_tokens=Lengths("uniform", 5, 50), request_rate=3.0
    )
    again = LoadPlan(
        url="", num_requests=5, prompt_tokens=Lengths("uniform", 5, 50), request_rate=3.0
    )
    other = LoadPlan(url="", num_requests=5, prompt_tokens=Lengths("uniform", 5, 50), seed=1)
    assert plan_requests(plan) == plan_requests(again)
    assert [r.prompt for r in plan_requests(plan)] != [r.prompt for r in plan_requests(other)]
    assert len({r.prompt for r in plan_requests(plan)}) == 5


def test_a_share_of_the_requests_begins_alike() -> None:
    plan = LoadPlan(
        url="", num_requests=400, prompt_tokens=Lengths.fixed(30), shared_prefix_tokens=20,
        shared_prefix_share=0.25,
    )  # fmt: skip
    heads = [" ".join(str(r.prompt).split()[:20]) for r in plan_requests(plan)]
    assert all(len(str(r.prompt).split()) == 30 for r in plan_requests(plan))
    common = max(set(heads), key=heads.count)
    assert 70 < heads.count(common) < 130
    assert len(set(heads)) == 401 - heads.count(common)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_keep_the_rate_and_spread_as_gamma(burstiness: float) -> None:
    """A Gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k)."""
    times = arrivals(LoadPlan(url="", num_requests=6001, request_rate=20.0, burstiness=burstiness))
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert times[0] == 0 and times == sorted(times)
    assert times[-1] == pytest.approx(6000 / 20.0)
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_infinite_burstiness_is_even_and_a_closed_loop_is_due_at_once() -> None:
    even = arrivals(LoadPlan(url="", num_requests=5, request_rate=2.0, burstiness=math.inf))
    assert even == pytest.approx([0, 0.5, 1, 1.5, 2])
    assert arrivals(LoadPlan(url="", num_requests=3)) == [0, 0, 0]
    assert arrivals(LoadPlan(url="", num_requests=1, request_rate=2.0)) == [0]
