"""How much memory this process can still get: the machine's, or less where a cgroup says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 1 << 60


def available_memory(root: Path = Path("/")) -> int:
    """Return bytes. `root` is where /proc and /sys are."""
    available = _machine(root)
    for limit, used in _cgroup_levels(root):
        if limit < _NO_LIMIT:
            available = min(available, max(0, limit - used))
    return available


def _machine(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_levels(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, use without reclaimable file pages) of this process's cgroup and all above it."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names not in ("", "memory"):
            continue
        base, files = mount, ("memory.max", "memory.current", "inactive_file")
        if names == "memory":
            base = mount / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        folder = base / path.lstrip("/")
        while True:
            limit, used = _number(folder / files[0]), _number(folder / files[1])
            if limit is not None and used is not None:
                yield limit, used - _reclaimable(folder, files[2])
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def _reclaimable(folder: Path, field: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == field:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
