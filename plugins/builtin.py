"""The plugin that registers what Headrace itself brings.

It names classes by string from one table per folder: nothing is imported until it is chosen.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from headrace.plugins.hookspecs import ClassReference, hookimpl

_TESTING_MODELS = {"scripted": "headrace.testing.scripted:ScriptedArchitecture"}


@hookimpl
def headrace_register_backends() -> list[ClassReference]:
    return _references("headrace.backends")


@hookimpl
def headrace_register_models() -> list[ClassReference]:
    return _references("headrace.models") + _as_references(_TESTING_MODELS)


@hookimpl
def headrace_register_scheduling() -> list[ClassReference]:
    return _references("headrace.policies.scheduling")


@hookimpl
def headrace_register_admission() -> list[ClassReference]:
    return _references("headrace.policies.admission")


@hookimpl
def headrace_register_routing() -> list[ClassReference]:
    return _references("headrace.policies.routing")


@hookimpl
def headrace_register_eviction() -> list[ClassReference]:
    return _references("headrace.policies.eviction")


@hookimpl
def headrace_register_quantization() -> list[ClassReference]:
    return _references("headrace.policies.quantization")


def _references(package: str) -> list[ClassReference]:
    table: Mapping[str, str] = importlib.import_module(package).BUILTIN
    return _as_references(table)


def _as_references(table: Mapping[str, str]) -> list[ClassReference]:
    return [ClassReference(name, target) for name, target in table.items()]
