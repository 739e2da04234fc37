"""Simulations: the same bytes each time and step by step, in the order of time, with real policies."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from headrace.config import Choice, load_config
from headrace.load.report import ServiceLevel
from headrace.plugins.manager import create_plugin_manager
from headrace.plugins.registry import Registries
from headrace.simulator.figures import figures
from headrace.simulator.hardware import analytic
from headrace.simulator.measured import MeasuredStepTime
from headrace.simulator.outcomes import Outcomes
from headrace.simulator.simulation import Setup, engine_settings, simulate
from headrace.simulator.trace import Trace, TraceRequest, in_order
from headrace.simulator.workloads import WORKLOADS, generate
from headrace.step_time import StepTimeFormula

LEVEL = ServiceLevel(ttft=1.0, tpot=0.1)


def make_setup(
    *,
    replicas: int = 1,
    num_blocks: int | None = None,
    policies: dict[str, Choice] | None = None,
    **engine: Any,
) -> Setup:
    flags = {f"models.0.engine.{name}": value for name, value in engine.items()}
    loaded = load_config(None, flags=flags, environ={})
    hardware = analytic("h200", "llama-3.1-8b")
    settings, most = engine_settings(loaded.config, hardware, loaded.origins)
    registries = Registries.from_manager(create_plugin_manager(discover=False))
    return Setup(
        loaded.config,
        hardware,
        settings,
        num_blocks or most,
        registries,
        replicas=replicas,
        choices=policies or {},
    )


def report(outcomes: Outcomes) -> str:
    return json.dumps(figures(outcomes, "run", LEVEL))


@pytest.mark.parametrize(
    ("name", "policy"), [*((name, "fcfs") for name in WORKLOADS), ("burst", "slo")]
)
def test_runs_of_equal_steps_give_the_bytes_of_single_steps(name: str, policy: str) -> None:
    setup = make_setup(policies={"scheduling": Choice(policy)})
    trace = generate(name, num_requests=24, seed=3).faster(4).with_targets(1.0, 0.05)
    whole = report(simulate(setup, trace))
    assert whole == report(simulate(replace(setup, is_step_by_step=True), trace))


@pytest.mark.parametrize("length", [64, 65, 66, 128, 129])
def test_a_first_token_is_news_at_its_time_however_a_prompt_is_cut(length: int) -> None:
    """A prompt with one token left to compute is planned like a decode, and draws the first token."""
    setup = make_setup(max_num_sequences=4, max_batched_tokens=64)
    trace = Trace("one", [TraceRequest(0.0, length, 95), TraceRequest(0.001, length, 95)])
    whole = simulate(setup, trace)
    single = simulate(replace(setup, is_step_by_step=True), trace)
    assert list(whole.first_token_at) == list(single.first_token_at)
    assert list(whole.end_at) == list(single.end_at)
    assert whole.first_token_at[0] < whole.end_at[0] / 4


def beside(setup: Setup) -> Setup:
    """The same on a device that computes up to two decodes beside the engine's own work, 10 ms each."""
    samples = [
        {"prefill_tokens": 0, "sequences": n, "kv_rows": n * rows, "seconds": 0.02, "beside_seconds": 0.01}
        for n in (1, 2)
        for rows in (16, 4096)
    ]  # fmt: skip
    samples += [
        {"prefill_tokens": size, "sequences": 1, "kv_rows": size, "seconds": size / 1000}
        for size in (16, 512)
    ]
    formula = StepTimeFormula(0.02, 0.001, 0.001, 0.0)
    step_time = MeasuredStepTime(samples, formula, StepTimeFormula())
    return replace(setup, hardware=replace(setup.hardware, step_time=step_time, engine=None))


def test_who_comes_while_small_decodes_run_waits_for_the_one_launched_ahead() -> None:
    setup = beside(make_setup(max_num_sequences=8))
    trace = Trace("two", [TraceRequest(0.0, 100, 50), TraceRequest(0.253, 100, 5)])
    outcomes = simulate(setup, trace)
    assert outcomes.first_token_at[0] == pytest.approx(0.1)
    # a decode runs from 0.25 to 0.26, the next one was launched behind it; then comes the prompt
    assert outcomes.first_token_at[1] == pytest.approx(0.27 + 0.1, abs=0.003)
    alone = replace(setup, hardware=replace(setup.hardware, step_time=StepTimeFormula(0.01)))
    assert simulate(alone, trace).first_token_at[1] < 0.28


@pytest.mark.parametrize("seed", range(3))
def test_steps_launched_ahead_are_the_same_in_runs_and_one_by_one(seed: int) -> None:
    setup = beside(make_setup(max_num_sequences=8, replicas=2))
    trace = generate("sharegpt-like", num_requests=40, seed=seed, rate=1.5)
    whole = simulate(setup, trace)
    single = simulate(replace(setup, is_step_by_step=True), trace)
    assert report(whole) == report(single)
    assert whole.steps_total == single.steps_total


ADMISSION = {
    "unlimited": Choice("unlimited"),
    "kv_footprint": Choice("kv_footprint"),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("admission", ADMISSION)
def test_replicas_beside_each_other_keep_the_order_of_time(seed: int, admission: str) -> None:
    """Whatever waits, is preempted or let in late: three replicas with pools that are too small."""
    rng = random.Random(seed)
    routing = rng.choice(["prefix_hash", "least_loaded", "round_robin", "cost"])
    scheduling = rng.choice(["fcfs", "priority", "fair_share", "deficit_prefix"])
    setup = make_setup(
        replicas=3,
        num_blocks=160,
        max_num_sequences=6,
        policies={
            "routing": Choice(routing),
            "scheduling": Choice(scheduling),
            "admission": ADMISSION[admission],
        },
    )
    trace = generate("multi-round", num_requests=60, seed=seed, rate=60)
    whole = simulate(setup, trace)
    assert whole.policy_failures == []
    assert report(whole) == report(simulate(replace(setup, is_step_by_step=True), trace))
    served = figures(whole, "run", LEVEL)
    assert served["served"] + sum(served["refused"].values()) == 60


@pytest.mark.parametrize("routing", ["random", "power_of_two"])
def test_the_same_seed_gives_the_same_bytes_also_where_a_policy_draws_lots(routing: str) -> None:
    trace = generate("burst", num_requests=50, seed=1)
    setup = make_setup(replicas=3, policies={"routing": Choice(routing)})
    assert report(simulate(setup, trace)) == report(simulate(setup, trace))


def test_a_request_takes_what_the_formula_says() -> None:
    setup = make_setup()
    seconds = setup.hardware.step_time.seconds
    outcomes = simulate(setup, Trace("one", [TraceRequest(0.0, 100, 3)]))
    first = seconds(100, 1, 100)
    assert outcomes.first_token_at[0] == pytest.approx(first)
    assert outcomes.end_at[0] == pytest.approx(first + seconds(0, 1, 101) + seconds(0, 1, 102))


def test_prompts_that_begin_alike_are_found_in_the_cache_and_others_are_not() -> None:
    requests = [
        TraceRequest(0.0, 1100, 2, (1, 2, 3)),
        TraceRequest(5.0, 1100, 2, (1, 2, 4)),
        TraceRequest(10.0, 1100, 2, (7, 2, 3)),
        TraceRequest(15.0, 1100, 2),
        TraceRequest(20.0, 1100, 2),
    ]
    outcomes = simulate(make_setup(), Trace("prefixes", requests))
    assert list(outcomes.cached_tokens) == [0, 1024, 0, 0, 0]


def test_what_can_never_be_served_is_refused_and_harms_nobody() -> None:
    requests = [TraceRequest(0.0, 200_000, 2), TraceRequest(0.0, 10, 2)]
    outcomes = simulate(make_setup(), Trace("long", requests))
    assert outcomes.refusals == {0: "context_length_exceeded"}
    assert outcomes.end_at[1] > 0


def test_a_full_queue_refuses() -> None:
    setup = make_setup(max_queued_requests=2, max_num_sequences=1)
    requests = [TraceRequest(0.001 * number, 100, 50) for number in range(6)]
    outcomes = simulate(setup, Trace("queue", requests))
    assert len(outcomes.refusals) == 3


def test_a_policy_that_fails_is_replaced_as_in_a_server_and_named() -> None:
    class Broken:
        name = "broken"

        def rank_waiting(self, waiting: Any, view: Any) -> Any:
            raise ValueError("no idea")

        def choose_victim(self, running: Any, view: Any) -> Any:
            return running[0]

        def prefill_budget(self, view: Any) -> int:
            return int(view.token_budget)

    setup = make_setup()
    setup.registries.of("scheduling").add(Broken, "test")
    chosen = replace(setup, choices={"scheduling": Choice("broken")})
    outcomes = simulate(chosen, generate("burst", num_requests=20, seed=0))
    assert not any(end != end for end in outcomes.end_at)
    [failure] = outcomes.policy_failures
    assert "'broken' failed 3 of" in failure and "no idea" in failure


def test_a_thousand_replicas() -> None:
    setup = make_setup(replicas=1000)
    trace = generate("sharegpt-like", num_requests=60, seed=0)
    outcomes = simulate(setup, trace)
    assert not any(end != end for end in outcomes.end_at)


def test_one_more_replica_serves_an_overload_sooner() -> None:
    trace = generate("burst", num_requests=200, seed=1, rate=60)
    ttfts = [
        figures(simulate(make_setup(replicas=count), trace), "run", LEVEL)["latency_seconds"][
            "ttft"
        ]
        for count in (1, 2)
    ]
    assert ttfts[1]["p90"] < 0.7 * ttfts[0]["p90"]


def test_the_jain_index_says_who_got_how_much() -> None:
    even = [TraceRequest(0.0, 64, 2000, tenant=name) for name in "ab"]
    [setup] = [make_setup()]
    figure = figures(simulate(setup, in_order("even", even)), "run", LEVEL)
    assert figure["jain_index"] == pytest.approx(1.0, abs=0.02)
    uneven = [TraceRequest(0.0, 64, 2000, tenant="a") for _ in range(3)] + even[1:]
    figure = figures(simulate(setup, in_order("uneven", uneven)), "run", LEVEL)
    assert figure["jain_index"] == pytest.approx(16 / 20, abs=0.03)
