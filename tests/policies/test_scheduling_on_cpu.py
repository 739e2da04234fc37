"""The orderings seen in virtual time, on the real CPU engine with two tenants and one slot."""

from __future__ import annotations

import queue
import statistics
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.build import BuiltEngine, build_engine
from headrace.config import load_config, replica_config
from headrace.testing.tiny_models import write_tiny_checkpoint
from headrace.types import (
    CommitPolicy,
    GenerationRequest,
    PolicyChoice,
    PreparePolicy,
    SamplingParams,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuiltEngine]:
    source = write_tiny_checkpoint(tmp_path_factory.mktemp("cpu") / "tiny")
    flags: dict[str, Any] = {
        "models.0.source": str(source),
        "models.0.engine.max_num_sequences": 1,
        "models.0.engine.kv_memory": "8MiB",
        "models.0.engine.max_model_len": 128,
        "models.0.engine.num_threads": 1,
        "plugins.discover": False,
    }
    config = load_config(None, flags=flags, environ={}).config
    engine = build_engine(replica_config(config, 0))
    yield engine
    engine.engine.close()


def use(built: BuiltEngine, name: str, options: dict[str, Any]) -> None:
    """Swap a policy in as a running server does."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    built.switch.handle(PreparePolicy(1, "scheduling", PolicyChoice(name, options)), answers.put)
    assert answers.get(timeout=60).error == ""
    built.switch.handle(CommitPolicy(1), answers.put)
    assert answers.get(timeout=60).states[0].name == name


def places(built: BuiltEngine, requests: list[GenerationRequest]) -> dict[str, int]:
    """Return which request was answered as the how-manieth."""
    for request in requests:
        built.engine.submit(request)
    order: list[str] = []
    while built.engine.has_work():
        for event in built.engine.step():
            if event.finish_reason is not None:
                assert event.error is None
                order.append(event.request_id)
    return {name: place for place, name in enumerate(order)}


def request(name: str, length: int = 8, **facts: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        model="m",
        prompt_token_ids=[5 + (len(name) + i) % 40 for i in range(length)],
        sampling=SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0),
        **facts,
    )


def two_tenants() -> list[GenerationRequest]:
    heavy = [request(f"heavy-{number}", tenant="heavy") for number in range(20)]
    return heavy + [request(f"light-{number}", tenant="light") for number in range(4)]


def mean_place(found: dict[str, int], prefix: str) -> float:
    return statistics.fmean(p for name, p in found.items() if name.startswith(prefix))


@pytest.mark.parametrize("policy", ["fair_share", "deficit_prefix"])
def test_the_tenant_that_sends_less_is_not_held_up(built: BuiltEngine, policy: str) -> None:
    use(built, "fcfs", {})
    assert mean_place(places(built, two_tenants()), "light") > 18
    use(built, policy, {} if policy == "fair_share" else {"quantum": 16})
    assert mean_place(places(built, two_tenants()), "light") < 10


def test_short_prompts_and_urgent_requests_go_first(built: BuiltEngine) -> None:
    lengths = [request(f"long-{n}", 60, tenant="long") for n in range(4)]
    lengths += [request(f"short-{n}", 4, tenant="short") for n in range(4)]
    use(built, "fcfs", {})
    assert mean_place(places(built, lengths), "short") > 5
    use(built, "shortest_first", {})
    assert mean_place(places(built, lengths), "short") < 2
    priorities = [request(f"low-{n}", priority=2, tenant="low") for n in range(4)]
    priorities += [request(f"high-{n}", priority=-1, tenant="high") for n in range(4)]
    assert mean_place(places(built, priorities), "low") < 3
    use(built, "priority", {})
    assert mean_place(places(built, priorities), "high") < 2


def test_what_will_be_late_anyway_steps_aside(built: BuiltEngine) -> None:
    late = [request(f"late-{n}", 60, ttft_target_seconds=1e-9, tenant="late") for n in range(4)]
    in_time = [
        request(f"in-time-{n}", 60, ttft_target_seconds=60.0, tenant="in-time") for n in range(4)
    ]
    use(built, "fcfs", {})
    assert mean_place(places(built, late + in_time), "in-time") > 5
    use(built, "slo", {})
    assert mean_place(places(built, late + in_time), "in-time") < 2


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("priority", {"max_wait": "1ms"}),
        ("shortest_first", {"patience": "1ms"}),
        ("slo", {"patience": "1ms"}),
    ],
)
def test_who_has_waited_for_the_bound_is_passed_by_nobody(
    built: BuiltEngine, policy: str, options: dict[str, Any]
) -> None:
    """The one who waits brings what each policy puts last; the other tenant all that goes first."""
    use(built, policy, options)
    patient = request("patient", 60, tenant="patient", priority=2, ttft_target_seconds=1e-9)
    built.engine.submit(patient)
    waited = threading.Event()
    waited.wait(0.005)
    others = [
        request(f"other-{n}", 4, tenant="other", priority=-1000, ttft_target_seconds=60.0)
        for n in range(4)
    ]
    assert places(built, others)["patient"] == 0


def test_the_learnt_step_time_is_exported(built: BuiltEngine) -> None:
    places(built, two_tenants())
    stats = built.engine.stats()
    assert sum(stats.step_time_coefficients) > 0
    assert 0 <= stats.step_time_error < 2
    assert stats.policy_calls_total > 0
    assert stats.policy_failures_total == 0
