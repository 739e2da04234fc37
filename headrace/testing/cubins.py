"""Facts of compiled GPU kernels that need no GPU: registers, stack, and what the machine code does.

Read by cuobjdump from a cubin; the package that brings it is in the extra `kernels`.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What one kernel's machine code says. Counts are of instructions, not of executions."""

    registers: int
    stack_bytes: int
    local_bytes: int
    wide_loads: int
    """LDG of 128 bits."""
    wide_copies: int
    """LDGSTS (global to shared, asynchronous) of 128 bits."""
    loads_in_flight: int
    """The longest run of wide loads before anything reads what one of them brings."""
    groups_in_flight: int
    """How many groups of asynchronous copies the longest wait leaves under way."""
    local_accesses: int
    """LDL and STL: spills, or arrays that were not kept in registers."""
    tensor_products: int
    """HMMA."""


def missing_disassembler() -> str:
    """Return what this machine lacks for reading cubins; "" where nothing."""
    if _tool("cuobjdump") is None or _tool("nvdisasm") is None:
        return "no cuobjdump and nvdisasm: install the extra 'kernels'"
    return ""


def read_facts(cubin: bytes) -> dict[str, KernelFacts]:
    """Return the facts of every kernel in a cubin, by name."""
    usage = _cuobjdump(cubin, "--dump-resource-usage")
    facts = {}
    for part in re.split(r"\n\s*Function : ", _cuobjdump(cubin, "-sass"))[1:]:
        name = part.split("\n", 1)[0].strip()
        code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", part)
        resources = re.search(rf"Function {re.escape(name)}:\s*(.*)", usage)
        assert resources is not None, f"cuobjdump says nothing of {name}"
        facts[name] = _facts(code, dict(re.findall(r"([A-Z]+):(\d+)", resources.group(1))))
    return facts


def _facts(code: list[str], resources: dict[str, str]) -> KernelFacts:
    def count(pattern: str) -> int:
        return sum(bool(re.search(pattern, instruction)) for instruction in code)

    return KernelFacts(
        registers=int(resources["REG"]),
        stack_bytes=int(resources["STACK"]),
        local_bytes=int(resources["LOCAL"]),
        wide_loads=count(r"\bLDG\.[.\w]*128"),
        wide_copies=count(r"\bLDGSTS\.[.\w]*128"),
        loads_in_flight=_loads_in_flight(code),
        groups_in_flight=max(
            (int(n, 16) for i in code for n in re.findall(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)", i)),
            default=0,
        ),
        local_accesses=count(r"\b(LDL|STL)\b"),
        tensor_products=count(r"\bHMMA\b"),
    )


def _loads_in_flight(code: list[str]) -> int:
    longest = current = 0
    targets: set[int] = set()
    for instruction in code:
        load = re.search(r"\bLDG\.[.\w]*128[.\w]*\s+R(\d+)", instruction)
        if load:
            current += 1
            longest = max(longest, current)
            first = int(load.group(1))
            targets |= set(range(first, first + 4))
            continue
        sources = instruction.split(",", 1)[1] if "," in instruction else ""
        read = {int(register) for register in re.findall(r"\bR(\d+)", sources)}
        if targets & read:
            current = 0
            targets = set()
    return longest


def _tool(name: str) -> Path | None:
    spec = find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    places = [Path(root) / "cu13" / "bin" / name for root in roots]
    return next((place for place in places if place.exists()), None)


def _cuobjdump(cubin: bytes, option: str) -> str:
    tool = _tool("cuobjdump")
    assert tool is not None, missing_disassembler()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        environment = {**os.environ, "PATH": f"{tool.parent}:{os.environ.get('PATH', '')}"}
        done = subprocess.run(
            [tool, option, file.name], capture_output=True, text=True, check=True, env=environment
        )
    return done.stdout
