"""What `auto` means on this host: CPUs, memory and number formats for one replica.

The share is what the process may really use: CPU affinity and cgroup limits (version 1 and 2, at
every level above), not what the machine has. In a container the two differ, and believing the
machine means throttled threads or death by the OOM killer.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.config.schema import EngineConfig
from headrace.errors import ConfigError
from headrace.types import EngineSettings
from headrace.types.units import format_size

_NO_LIMIT = 1 << 60
_MIN_KV_MEMORY = 16 << 20


@dataclass(frozen=True, slots=True)
class HostResources:
    """What this process may use. `memory_limit_bytes` is the most it could ever have."""

    num_cpus: int
    memory_available_bytes: int
    memory_limit_bytes: int


def host_resources(root: pathlib.Path = pathlib.Path("/")) -> HostResources:
    """Measure. `root` is where /proc and /sys are."""
    cpus = float(_affinity())
    total, available = _machine_memory(root)
    limit = total
    for folder in _cgroup_folders(root, "cpu"):
        cpus = min(cpus, _cpu_quota(folder))
    for folder in _cgroup_folders(root, "memory"):
        level_limit, level_used = _memory_use(folder)
        if level_limit < _NO_LIMIT:
            limit = min(limit, level_limit)
            available = min(available, max(0, level_limit - level_used))
    return HostResources(max(1, int(cpus)), available, limit)


def resolve_engine(
    engine: EngineConfig,
    *,
    replicas: int,
    stored_dtype: str,
    weight_bytes: int = 0,
    trained_model_len: int | None = None,
    kv_on_host: bool = True,
    resources: HostResources | None = None,
) -> EngineSettings:
    """Return the settings of one replica with every `auto` resolved.

    `replicas` are all that share this host. `weight_bytes` is what the model still has to load: it is
    taken off the memory before the KV pool gets its half. ConfigError where a given `kv_memory` is
    more than the host could ever give. Where the backend keeps keys and values in memory of its own
    (not `kv_on_host`), nothing is known of it before the weights are there: `auto` stays 0 bytes.
    """
    host = resources or host_resources()
    dtype = stored_dtype if engine.dtype == "auto" else engine.dtype
    if not kv_on_host:
        kv_memory = 0 if engine.kv_memory == "auto" else max(1, engine.kv_memory)
    elif engine.kv_memory == "auto":
        kv_memory = max(
            _MIN_KV_MEMORY, (host.memory_available_bytes // replicas - weight_bytes) // 2
        )
    else:
        kv_memory = engine.kv_memory
        _check_kv_memory(kv_memory, replicas, host)
    threads = engine.num_threads
    max_model_len = engine.max_model_len
    return EngineSettings(
        dtype=dtype,
        kv_dtype=dtype if engine.kv_dtype == "auto" else engine.kv_dtype,
        may_choose_kv_dtype=engine.kv_dtype == "auto",
        num_threads=max(1, host.num_cpus // replicas) if threads == "auto" else threads,
        kv_memory_bytes=kv_memory,
        max_model_len=(trained_model_len or 4096) if max_model_len == "auto" else max_model_len,
        max_num_sequences=engine.max_num_sequences,
        max_batched_tokens=engine.max_batched_tokens,
        max_queued_requests=engine.max_queued_requests,
        block_size=engine.block_size,
        prefix_caching=engine.prefix_caching,
        deterministic=engine.deterministic,
        activations=engine.activations,
    )


def _check_kv_memory(kv_memory: int, replicas: int, host: HostResources) -> None:
    if kv_memory * replicas > host.memory_limit_bytes:
        raise ConfigError(
            f"engine.kv_memory: {format_size(kv_memory)} for each of {replicas} replicas is more than "
            f"the {format_size(host.memory_limit_bytes)} of this host; give less, or write auto"
        )


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _machine_memory(root: pathlib.Path) -> tuple[int, int]:
    """Return (total, available) bytes of the machine."""
    fields = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if value.strip():
            fields[name] = int(value.split()[0]) * 1024
    if "MemTotal" in fields:
        return fields["MemTotal"], fields.get("MemAvailable", fields["MemTotal"] // 2)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages, pages // 2


def _cgroup_folders(root: pathlib.Path, controller: str) -> Iterator[pathlib.Path]:
    """Yield this process's cgroup folder for a controller and every one above it.

    Inside a container /proc/self/cgroup may name the host's path, which is not mounted here; the
    levels that exist are used, and the mount's root always is one.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names == "":
            base = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
        elif controller in names.split(","):
            base = mount / controller if (mount / controller).exists() else mount / names
        else:
            continue
        folder = base / path.lstrip("/")
        while folder != base and base in folder.parents:
            if folder.is_dir():
                yield folder
            folder = folder.parent
        yield base


def _cpu_quota(folder: pathlib.Path) -> float:
    """Return how many CPUs a cgroup may use."""
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota = _read(folder / "cpu.cfs_quota_us").strip()
        period = _read(folder / "cpu.cfs_period_us").strip()
    if quota in ("", "max", "-1") or not period:
        return float(_NO_LIMIT)
    return int(quota) / int(period)


def _memory_use(folder: pathlib.Path) -> tuple[int, int]:
    """Return (limit, bytes in use that cannot be reclaimed) of a cgroup."""
    limit = _read(folder / "memory.max").strip()
    used = _read(folder / "memory.current").strip()
    if not limit:
        limit = _read(folder / "memory.limit_in_bytes").strip()
        used = _read(folder / "memory.usage_in_bytes").strip()
    if limit in ("", "max"):
        return _NO_LIMIT, 0
    reclaimable = 0
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            reclaimable = max(reclaimable, int(value))
    return int(limit), max(0, int(used or 0) - reclaimable)


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
