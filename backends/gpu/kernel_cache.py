"""Machine code kept on disk, under a name that says everything it depends on.

An entry begins with a digest of what follows: a file that was cut would otherwise be handed to the driver. A
damaged entry is made again, like one that is absent; a folder to keep it in need not be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from headrace.cache import write_atomically
from headrace.errors import ConfigError

_DIGEST_BYTES = 32


def entry_name(stem: str, facts: object, sources: Iterable[Path]) -> str:
    """Return a file name for code that is made of `sources` and specialised by `facts` (by its repr)."""
    digest = hashlib.sha256(repr(facts).encode())
    for file in sources:
        text = file.read_bytes()
        digest.update(f"{file.name} {len(text)} ".encode() + text)
    return f"{stem}-{digest.hexdigest()[:24]}.bin"


def kept_code(folder: Callable[[], Path], name: str, build: Callable[[], bytes]) -> bytes:
    """Return the entry `name` of a folder, built and put there if it is absent or damaged.

    `folder` may raise ConfigError: then nothing is kept. What `build` raises goes through.
    """
    log = structlog.get_logger(__name__)
    try:
        stored = (folder() / name).read_bytes()
    except (ConfigError, OSError):
        stored = b""
    digest, code = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if stored and hashlib.sha256(code).digest() == digest:
        return code
    log.info("compiling a kernel, once", entry=name, damaged=bool(stored))
    code = build()
    try:
        write_atomically(folder() / name, hashlib.sha256(code).digest() + code)
    except (ConfigError, OSError):
        log.warning("the compiled kernel is not kept", entry=name)
    return code
