"""The parts of a gateway, made from the configuration: replicas of every kind, routing, admission."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from headrace.clock import SystemClock
from headrace.config import Config, ReplicaEntry, replica_config
from headrace.engine.client import EngineClient, ProcessEngine, ThreadEngine
from headrace.errors import ConfigError
from headrace.gateway.admission import AdmissionGate
from headrace.gateway.breaker import CircuitBreaker
from headrace.gateway.ledger import Ledger
from headrace.gateway.limit_store import LimitStore, MemoryLimitStore
from headrace.gateway.policy_desk import PolicyDesk
from headrace.gateway.redis_store import RedisLimitStore, RedisSettings
from headrace.gateway.replica import Replica
from headrace.gateway.router import ModelGroup, Router
from headrace.plugins.registry import Registries
from headrace.plugins.script import is_script, script_path
from headrace.policies.admission.unlimited import Unlimited
from headrace.policies.routing.round_robin import RoundRobin
from headrace.policy_guard import AdmissionGuard
from headrace.types import PolicyChoice


def make_replica(config: Config, model_index: int, entry: ReplicaEntry, name: str) -> Replica:
    """Return a replica that is not started. ConfigError where the key it needs is not there."""
    model = config.models[model_index].name
    if entry.kind == "http":
        from headrace.gateway.upstream import Upstream  # an HTTP client costs 12 MB

        breaker = CircuitBreaker()
        key = api_key_of(entry, os.environ)
        client = Upstream(name, model, entry, breaker, clock=SystemClock(), api_key=key)
        return Replica(name, model, client, entry, breaker)
    data = replica_config(config, model_index)
    engine: EngineClient
    if entry.kind == "in_process":
        engine = ThreadEngine(name, lambda report: _build_here(data, report))
    else:
        engine = ProcessEngine(name, data, hang_seconds=entry.hang_timeout)
    return Replica(name, model, engine, entry)


def api_key_of(entry: ReplicaEntry, environ: Mapping[str, str]) -> str:
    """Return the key that an http replica is asked with; "" where it needs none."""
    if not entry.api_key_env:
        return ""
    key = environ.get(entry.api_key_env, "")
    if not key:
        raise ConfigError(
            f"replicas: the environment variable {entry.api_key_env} (api_key_env of {entry.url}) is "
            "not set; put that server's key in it"
        )
    return key


def _build_here(data: Mapping[str, Any], report: Callable[[str, float], None]) -> Any:
    from headrace.build import build_engine

    return build_engine(data, report=report)


def build_router(config: Config, registries: Registries) -> Router:
    """Return the router over the models, each without replicas: the fleet adds them."""
    choice = config.routing
    policy = registries.create("routing", choice.use, choice.options, pathlib.Path(config.base_dir))
    groups = [ModelGroup(model.name, ()) for model in config.models]
    return Router(groups, policy=policy, fallback=RoundRobin())


def build_admission(config: Config, registries: Registries, ledger: Ledger) -> AdmissionGate:
    """Return the gate with the policies that the configuration chooses, in its order.

    KV blocks are reserved in `ledger`, the router's.
    """
    base_dir = pathlib.Path(config.base_dir)
    policies = [
        registries.create("admission", choice.use, choice.options, base_dir)
        for choice in config.admission
    ]
    return AdmissionGate(
        [AdmissionGuard(each, Unlimited()) for each in policies if not isinstance(each, Unlimited)],
        ledger=ledger,
        store=build_limit_store(config, os.environ),
    )


def build_policy_desk(
    config: Config, registries: Registries, router: Router, admission: AdmissionGate
) -> PolicyDesk:
    """Return the desk at which the policies of a running server are swapped."""
    base_dir = pathlib.Path(config.base_dir)
    router.guard.choice = PolicyChoice(config.routing.use, config.routing.options)

    def create(kind: str, choice: PolicyChoice) -> Any:
        return registries.create(kind, choice.use, choice.options, base_dir)

    return PolicyDesk(router, admission, create, lambda policy: AdmissionGuard(policy, Unlimited()))


def script_paths(config: Config) -> Callable[[str], str | None]:
    """Return what says which file a policy is from, or that it is from none."""
    base_dir = pathlib.Path(config.base_dir)
    return lambda use: str(script_path(use, base_dir)) if is_script(use) else None


def build_limit_store(config: Config, environ: Mapping[str, str]) -> LimitStore:
    """Return where limits are counted. ConfigError where Redis is chosen and cannot be used."""
    limits = config.limits
    if limits.store == "memory":
        return MemoryLimitStore()
    url = limits.url
    if limits.url_env:
        url = environ.get(limits.url_env, "")
        if not url:
            raise ConfigError(
                f"limits.url_env: the environment variable {limits.url_env} is not set; put the URL "
                "in it, such as redis://localhost:6379/0"
            )
    try:
        return RedisLimitStore(
            RedisSettings(url, limits.on_failure == "open", limits.timeout, limits.key_prefix),
            SystemClock().now,
        )
    except ImportError as error:
        raise ConfigError(
            "limits.store: redis needs the package redis; install it with: pip install 'headrace[redis]'"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"limits.url: this is no URL of a Redis ({error}); such are redis://host:6379/0, "
            "rediss://host:6379/0 and unix:///path/to/socket"
        ) from error
