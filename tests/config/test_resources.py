"""`auto` is this process's share: affinity and cgroup limits, not what the machine has."""

from __future__ import annotations

import os
import pathlib
from typing import Literal

import pytest

from headrace.config.resources import HostResources, host_resources, resolve_engine
from headrace.config.schema import EngineConfig
from headrace.errors import ConfigError

GIB = 1 << 30
HOST = HostResources(num_cpus=8, memory_available_bytes=12 * GIB, memory_limit_bytes=16 * GIB)


@pytest.fixture
def root(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A machine with 16 CPUs and 64 GiB, 32 of them available."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\nOdd:\n")
    return tmp_path


def write(root: pathlib.Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_cgroups_the_machine_counts(root: pathlib.Path) -> None:
    assert host_resources(root) == HostResources(16, 32 * GIB, 64 * GIB)


def test_affinity_limits_the_cpus(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7}, raising=False)
    assert host_resources(root).num_cpus == 2


def test_version_2_inside_a_container(root: pathlib.Path) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    write(root, "sys/fs/cgroup/cpu.max", "350000 100000\n")
    write(root, "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{3 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.stat", f"anon 1\ninactive_file {1 * GIB}\n")
    assert host_resources(root) == HostResources(3, 6 * GIB, 8 * GIB)


def test_version_2_a_limit_of_a_level_above_counts(root: pathlib.Path) -> None:
    write(root, "proc/self/cgroup", "0::/system.slice/app.service\n")
    write(root, "sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    write(root, "sys/fs/cgroup/system.slice/cpu.max", "200000 100000\n")
    write(root, "sys/fs/cgroup/system.slice/app.service/cpu.max", "max 100000\n")
    write(root, "sys/fs/cgroup/system.slice/app.service/memory.max", "max\n")
    write(root, "sys/fs/cgroup/system.slice/memory.max", f"{20 * GIB}\n")
    write(root, "sys/fs/cgroup/system.slice/memory.current", f"{1 * GIB}\n")
    assert host_resources(root) == HostResources(2, 19 * GIB, 20 * GIB)


def test_version_1(root: pathlib.Path) -> None:
    write(
        root,
        "proc/self/cgroup",
        "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n",
    )
    write(root, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000\n")
    write(root, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{4 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.stat", f"total_inactive_file {1 * GIB}\n")
    assert host_resources(root) == HostResources(1, 3 * GIB, 4 * GIB)


def test_version_1_without_limits(root: pathlib.Path) -> None:
    write(root, "proc/self/cgroup", "4:memory:/\n3:cpu:/\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert host_resources(root) == HostResources(16, 32 * GIB, 64 * GIB)


def test_a_full_cgroup_leaves_nothing_rather_than_less(root: pathlib.Path) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/cgroup.controllers", "")
    write(root, "sys/fs/cgroup/memory.max", f"{1 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{2 * GIB}\n")
    assert host_resources(root).memory_available_bytes == 0


def test_this_machine_can_be_measured() -> None:
    host = host_resources()
    assert host.num_cpus >= 1
    assert 0 < host.memory_available_bytes <= host.memory_limit_bytes


def test_auto_is_a_replicas_share() -> None:
    settings = resolve_engine(
        EngineConfig(), replicas=2, stored_dtype="bfloat16", weight_bytes=GIB, resources=HOST
    )
    assert (settings.dtype, settings.kv_dtype) == ("bfloat16", "bfloat16")
    assert settings.num_threads == 4
    assert settings.kv_memory_bytes == (6 * GIB - GIB) // 2


def test_more_replicas_than_cpus_get_one_thread_each() -> None:
    settings = resolve_engine(EngineConfig(), replicas=9, stored_dtype="float16", resources=HOST)
    assert settings.num_threads == 1


def test_what_is_given_is_kept() -> None:
    engine = EngineConfig(
        dtype="float32",
        kv_dtype="float16",
        num_threads=3,
        kv_memory=GIB,
        max_model_len=77,
        max_num_sequences=5,
        max_batched_tokens=99,
        max_queued_requests=0,
        block_size=32,
        prefix_caching=False,
        deterministic=True,
        activations="int8",
    )
    settings = resolve_engine(engine, replicas=2, stored_dtype="bfloat16", resources=HOST)
    assert settings.dtype == "float32"
    assert settings.kv_dtype == "float16"
    assert settings.num_threads == 3
    assert settings.kv_memory_bytes == GIB
    for name in (
        "max_model_len",
        "max_num_sequences",
        "max_batched_tokens",
        "max_queued_requests",
        "block_size",
        "prefix_caching",
        "deterministic",
        "activations",
    ):
        assert getattr(settings, name) == getattr(engine, name)


@pytest.mark.parametrize(("given", "may_choose"), [("auto", True), ("float32", False)])
def test_kv_dtype_follows_a_dtype_that_is_given(
    given: Literal["auto", "float32"], may_choose: bool
) -> None:
    engine = EngineConfig(dtype="float32", kv_dtype=given)
    settings = resolve_engine(engine, replicas=1, stored_dtype="bfloat16", resources=HOST)
    assert (settings.kv_dtype, settings.may_choose_kv_dtype) == ("float32", may_choose)


def test_max_model_len_auto_is_what_the_model_was_trained_for() -> None:
    engine = EngineConfig(max_model_len="auto")
    settings = resolve_engine(
        engine, replicas=1, stored_dtype="float16", trained_model_len=8192, resources=HOST
    )
    assert settings.max_model_len == 8192


def test_more_kv_memory_than_the_host_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="6GiB for each of 3 replicas is more than the 16GiB"):
        resolve_engine(
            EngineConfig(kv_memory=6 * GIB), replicas=3, stored_dtype="float16", resources=HOST
        )


def test_where_memory_is_short_the_pool_still_has_a_floor() -> None:
    host = HostResources(1, GIB, GIB)
    settings = resolve_engine(
        EngineConfig(), replicas=1, stored_dtype="float16", weight_bytes=2 * GIB, resources=host
    )
    assert settings.kv_memory_bytes == 16 << 20


def test_where_the_backend_has_memory_of_its_own_the_hosts_says_nothing() -> None:
    """Auto waits to be measured, more than the host has is no error here, and 0 is not auto."""
    for given, kept in (("auto", 0), (99 * GIB, 99 * GIB), (0, 1)):
        engine = EngineConfig(kv_memory=given)  # type: ignore[arg-type]
        settings = resolve_engine(
            engine, replicas=2, stored_dtype="float16", kv_on_host=False, resources=HOST
        )
        assert settings.kv_memory_bytes == kept
