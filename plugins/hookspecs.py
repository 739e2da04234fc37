"""Every hook, in the order it is called.

The headrace_register_* hooks run once, before any model is loaded, and return classes.
Configuration then picks one class per kind by its `name`. No hook runs per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pluggy

from headrace.interfaces import (
    AdmissionPolicy,
    Backend,
    EvictionPolicy,
    ModelArchitecture,
    QuantizationPolicy,
    RoutingPolicy,
    SchedulingPolicy,
)
from headrace.types import RequestSummary, ServerInfo

NAME = "headrace"
hookspec = pluggy.HookspecMarker(NAME)
hookimpl = pluggy.HookimplMarker(NAME)


@dataclass(frozen=True, slots=True)
class ClassReference:
    """A class by name and "module:Class", imported only when it is chosen."""

    name: str
    target: str


@hookspec
def headrace_register_backends() -> Sequence[type[Backend] | ClassReference]:  # type: ignore[empty-body]
    """Return backend classes: a device, its memory and its kernels."""


@hookspec
def headrace_register_models() -> Sequence[type[ModelArchitecture] | ClassReference]:  # type: ignore[empty-body]
    """Return model architectures, named as `model_type` in the checkpoint's config.json."""


@hookspec
def headrace_register_scheduling() -> Sequence[type[SchedulingPolicy] | ClassReference]:  # type: ignore[empty-body]
    """Return scheduling policies: who runs next, who is preempted."""


@hookspec
def headrace_register_admission() -> Sequence[type[AdmissionPolicy] | ClassReference]:  # type: ignore[empty-body]
    """Return admission policies: who may come in, who waits, who is refused."""


@hookspec
def headrace_register_routing() -> Sequence[type[RoutingPolicy] | ClassReference]:  # type: ignore[empty-body]
    """Return routing policies: which replica serves a request."""


@hookspec
def headrace_register_eviction() -> Sequence[type[EvictionPolicy] | ClassReference]:  # type: ignore[empty-body]
    """Return eviction policies: which reusable KV blocks go first."""


@hookspec
def headrace_register_quantization() -> Sequence[type[QuantizationPolicy] | ClassReference]:  # type: ignore[empty-body]
    """Return quantization policies: which weights are held in which scheme."""


@hookspec
def headrace_server_started(info: ServerInfo) -> None:
    """Observe readiness: every model is loaded and warmed up, /ready turns 200. Gateway process only."""


@hookspec
def headrace_request_finished(summary: RequestSummary) -> None:
    """Observe one finished request. Called outside the engine thread, in the gateway process only."""
