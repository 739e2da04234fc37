"""Whether a policy keeps its contract: the checks that the built-ins are tested with, for every author.

Each check takes a function that builds a fresh policy (the class itself where it needs no options)
and raises AssertionError with what went wrong.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

from headrace.interfaces import (
    AdmissionPolicy,
    EvictionPolicy,
    QuantizationPolicy,
    RoutingPolicy,
    SchedulingPolicy,
)
from headrace.plugins.contract import check_class
from headrace.policy_answers import (
    Nonsense,
    checked_budget,
    checked_count,
    checked_key,
    checked_order,
    checked_replica_id,
    checked_time,
    checked_verdict,
    checked_victim,
)
from headrace.policy_watchdog import PolicyTimeout
from headrace.types import (
    AdmissionView,
    BlockView,
    Queue,
    Reject,
    ReplicaView,
    RequestView,
    RoutingRequest,
    SchedulerView,
    StepFacts,
    TenantService,
    TicketView,
)

_SIZES = (0, 1, 2, 3, 17, 200)
_MOST_LOST = 0.25
"""Root of the mean square error that a scheme may cost; 4 bits and a scale per 32 cost 0.08."""
_TENSORS = (
    ("model.embed_tokens.weight", (256, 64), "bf16"),
    ("model.layers.0.self_attn.q_proj.weight", (64, 64), "f32"),
    ("model.layers.0.mlp.down_proj.weight", (64, 192), "q4_1"),
    ("model.layers.11.mlp.gate_proj.weight", (192, 64), "f16"),
    ("lm_head.weight", (256, 64), "f32"),
)


def check_scheduling_policy(make: Callable[[], SchedulingPolicy], *, seed: int = 0) -> None:
    """Orders are permutations, victims are members, budgets are in range, views are left alone
    (they are frozen: a change raises)."""
    policy, twin = make(), make()
    check_class("scheduling policy", SchedulingPolicy, type(policy), "checked")
    rng = random.Random(seed)
    for size in _SIZES:
        views = [_request_view(rng, index) for index in range(size)]
        state = _scheduler_view(rng)
        with _judging(policy, "rank_waiting"):
            order = checked_order(policy.rank_waiting(list(views), state), views)
            again = list(twin.rank_waiting(list(views), state))
            _require([id(v) for v in order] == [id(v) for v in again], "gave two different orders")
        if views:
            with _judging(policy, "choose_victim"):
                checked_victim(policy.choose_victim(list(views), state), views)
        with _judging(policy, "prefill_budget"):
            checked_budget(policy.prefill_budget(state), state)
        for name, check in (("next_decision_at", checked_time), ("num_to_start", checked_count)):
            if hasattr(policy, name):
                with _judging(policy, name):
                    check(getattr(policy, name)(state))
        with _judging(policy, "observe"):
            if hasattr(policy, "observe"):
                tokens = {view.request_id: 1 for view in views}
                policy.observe(StepFacts(state.now, 0.01, tokens, ()))


def check_eviction_policy(make: Callable[[], EvictionPolicy], *, seed: int = 0) -> None:
    """Keys are numbers or tuples of them, asked again later or never, and the same for the same block."""
    policy, twin = make(), make()
    check_class("eviction policy", EvictionPolicy, type(policy), "checked")
    rng = random.Random(seed)
    for step in range(200):
        now = 100.0 + step
        block = BlockView(
            block_id=rng.randrange(256),
            tenant=f"tenant-{rng.randint(0, 2)}",
            priority=rng.randint(-2, 2),
            depth=rng.randint(0, 40),
            hits=rng.choice([0, 0, 1, 50]),
            last_used=now - rng.choice([0.0, 1.0, 90.0]),
            pinned_until=rng.choice([0.0, now - 1, now + 60]),
            tenant_share=rng.random(),
        )
        before = copy.deepcopy(block)
        with _judging(policy, "key"):
            key = checked_key(policy.key(block, now), now)
            _require(key == checked_key(twin.key(block, now), now), "gave two different keys")
            _require(block == before, "changed the block it was shown")


def check_routing_policy(make: Callable[[], RoutingPolicy], *, seed: int = 0) -> None:
    """Every answer is the id of a replica offered, whatever joins or leaves between two requests."""
    policy = make()
    check_class("routing policy", RoutingPolicy, type(policy), "checked")
    rng = random.Random(seed)
    for step in range(200):
        offered = rng.sample([_replica_view(rng, index) for index in range(8)], rng.randint(1, 8))
        before = list(offered)
        request = RoutingRequest(
            model=f"model-{rng.randint(0, 1)}",
            tenant=f"tenant-{rng.randint(0, 2)}",
            session=f"session-{rng.randint(0, 5)}",
            num_prompt_tokens=rng.randint(1, 4096),
            prefix_hashes=tuple(rng.randbytes(32) for _ in range(rng.randint(0, 3))),
        )
        with _judging(policy, "choose"):
            checked_replica_id(policy.choose(request, offered, float(step)), offered)
            _require(offered == before, "changed the list of replicas it was shown")


def check_admission_policy(make: Callable[[], AdmissionPolicy], *, seed: int = 0) -> None:
    """Every verdict is an Admit, Queue or Reject whose fields make sense, at both stages."""
    policy = make()
    check_class("admission policy", AdmissionPolicy, type(policy), "checked")
    rng = random.Random(seed)
    for step in range(200):
        now = step * 0.1
        tenant, size = f"tenant-{rng.randint(0, 2)}", rng.randint(0, 1 << 20)
        tickets = (
            TicketView("arrival", tenant, size),
            TicketView("parsed", tenant, size, "model", rng.randint(1, 4096), 256, 1, "replica-0"),
        )
        load = AdmissionView((_replica_view(rng, 0),), rng.randint(0, 500), rng.randint(0, 10**6))
        for ticket in tickets:
            with _judging(policy, "admit"):
                verdict = checked_verdict(policy.admit(ticket, load, now), now)
                if isinstance(verdict, Queue):
                    _require(bool(verdict.lane), "queued in a lane without a name")
                if isinstance(verdict, Reject):
                    _require(bool(verdict.reason), "rejected without a reason")


def check_quantization_policy(make: Callable[[], QuantizationPolicy], *, seed: int = 0) -> None:
    """Schemes are names or None and always the same; parts are named arrays that say their axes.

    Those of a scheme that backends hold are assembled, and must come back as about the same weight.
    """
    import numpy as np

    from headrace.backends.quantized import SCHEMES, assemble
    from headrace.models.dequantize import to_float32

    policy, twin = make(), make()
    check_class("quantization policy", QuantizationPolicy, type(policy), "checked")
    generator = np.random.default_rng(seed)
    for name, shape, stored_as in _TENSORS:
        with _judging(policy, "scheme_for"):
            scheme = policy.scheme_for(name, shape, stored_as)
            is_name = scheme is None or (isinstance(scheme, str) and bool(scheme))
            _require(is_name, f"gave {scheme!r} for {name}")
            same = scheme == twin.scheme_for(name, shape, stored_as)
            _require(same, f"gave two schemes for {name}")
        if scheme is None or scheme == stored_as:
            continue
        with _judging(policy, "quantize"):
            weight = generator.standard_normal(shape).astype(np.float32)
            parts = policy.quantize(weight.copy(), scheme, None)
            given = weight.copy()
            again = policy.quantize(given, scheme, None)
            _require(np.array_equal(given, weight), f"changed the weight {name} it was given")
            _require(bool(parts), f"made no parts of {name}")
            for part_name, part in parts.items():
                for attribute in ("array", "out_axis", "in_axis"):
                    _require(hasattr(part, attribute), f"part {part_name!r} has no `{attribute}`")
                same = np.array_equal(part.array, again[part_name].array)
                _require(same, f"gave two versions of part {part_name!r} of {name}")
            if scheme in SCHEMES:
                rows = assemble(policy, weight, scheme, name)
                error = to_float32(scheme, rows, shape) - weight
                share = float(np.sqrt((error**2).sum() / (weight**2).sum()))
                _require(share < _MOST_LOST, f"lost {share:.0%} of normal numbers in {scheme}")


@contextlib.contextmanager
def _judging(policy: Any, method: str) -> Iterator[None]:
    """Say which policy and which method broke the contract."""
    where = f"policy '{policy.name}': {method}"
    try:
        yield
    except Nonsense as error:
        raise AssertionError(f"{where}: {error}") from None
    except AssertionError as error:
        raise AssertionError(f"{where} {error}") from None
    except (KeyboardInterrupt, PolicyTimeout):
        raise
    except BaseException as error:
        raise AssertionError(f"{where} raised {type(error).__name__}: {error}") from error


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _request_view(rng: random.Random, index: int) -> RequestView:
    output_tokens = rng.choice([0, 0, 1, 50])
    prompt_tokens = rng.randint(1, 4096)
    arrival_time = float(rng.randint(0, 20))
    return RequestView(
        request_id=f"request-{index}",
        choice=rng.randint(0, 1),
        tenant=f"tenant-{rng.randint(0, 2)}",
        priority=rng.randint(-2, 2),
        arrival_time=arrival_time,
        ttft_target_seconds=rng.choice([None, 0.5]),
        tpot_target_seconds=rng.choice([None, 0.05]),
        num_prompt_tokens=prompt_tokens,
        num_cached_tokens=rng.randint(0, prompt_tokens - 1),
        num_computed_tokens=rng.randint(0, prompt_tokens),
        num_output_tokens=output_tokens,
        first_token_time=arrival_time + 1 if output_tokens else None,
        last_token_time=arrival_time + 2 if output_tokens else None,
        num_blocks=rng.randint(0, 256),
        num_preemptions=rng.choice([0, 0, 1, 3]),
    )


def _scheduler_view(rng: random.Random) -> SchedulerView:
    return SchedulerView(
        now=30.0,
        token_budget=rng.choice([1, 16, 512]),
        decoding=rng.randint(0, 16),
        prefilling=rng.randint(0, 4),
        num_free_blocks=rng.randint(0, 256),
        num_blocks=256,
        tenants={"tenant-0": TenantService(1000, 100, 29.0)},
        step_seconds=lambda prefill, sequences, rows: (
            1e-3 + 1e-5 * (prefill + sequences) + 1e-9 * rows
        ),
    )


def _replica_view(rng: random.Random, index: int) -> ReplicaView:
    return ReplicaView(
        id=f"replica-{index}",
        num_requests=rng.randint(0, 64),
        num_tokens=rng.randint(0, 65536),
        num_blocks=4096,
        reserved_blocks=rng.randint(0, 4096),
        matched_tokens=rng.choice([0, 0, 512]),
    )
