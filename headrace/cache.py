"""The folder where fetched models, compiled kernels and tokenizers built from GGUF metadata are kept.

Files appear in it by an atomic rename, so a reader never meets half of one. Everything can be deleted
at any time and is made again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from headrace.errors import ConfigError


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return HEADRACE_CACHE, or the platform's cache folder for Headrace. It may not exist yet.

    ConfigError where this user has no home folder to put it in, as in a container run under a bare
    number.
    """
    try:
        return _cache_folder(environ)
    except RuntimeError:
        raise ConfigError(
            "there is no folder to keep models in: HOME is not set, and this user has no home. "
            "Set HEADRACE_CACHE to a folder that can be written"
        ) from None


def _cache_folder(environ: Mapping[str, str]) -> Path:
    chosen = environ.get("HEADRACE_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "headrace"
    if sys.platform == "win32":
        base = environ.get("LOCALAPPDATA")
        return (Path(base) if base else Path.home() / "AppData" / "Local") / "headrace" / "Cache"
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, whole or not at all, also beside other writers. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
