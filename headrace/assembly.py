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
from headrace.gateway.replica import Replica
from headrace.gateway.router import ModelGroup, Router
from headrace.gateway.upstream import Upstream
from headrace.plugins.registry import Registries
from headrace.policies.admission.unlimited import Unlimited
from headrace.policies.routing.round_robin import RoundRobin
from headrace.policy_guard import AdmissionGuard


def make_replica(config: Config, model_index: int, entry: ReplicaEntry, name: str) -> Replica:
    """Return a replica that is not started. ConfigError where the key it needs is not there."""
    model = config.models[model_index].name
    if entry.kind == "http":
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


def build_admission(config: Config, registries: Registries) -> AdmissionGate:
    """Return the gate with the policies that the configuration chooses, in its order."""
    base_dir = pathlib.Path(config.base_dir)
    policies = [
        registries.create("admission", choice.use, choice.options, base_dir)
        for choice in config.admission
    ]
    return AdmissionGate([AdmissionGuard(policy, Unlimited()) for policy in policies])
