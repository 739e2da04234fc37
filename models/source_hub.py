"""Models on the Hugging Face hub, through huggingface-hub and its own cache.

What was fetched once is used without asking the hub again. The first question runs in a thread of its
own: the library's timeouts count per network operation, and only a wall clock bounds a silent hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cache import write_atomically
from headrace.errors import ModelError
from headrace.models.source_progress import watch_folder

ANSWER_SECONDS = 5.0
_DEFAULT_ENDPOINT = "https://huggingface.co"
_CHECKPOINT_FILE = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json"
    r"|special_tokens_map\.json|chat_template\.(jinja|json)"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)
_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


class HubSilent(ModelError):
    """The hub cannot be reached or does not answer: another source may be tried."""


@dataclass(frozen=True, slots=True)
class HubSource:
    """`org/name`, at a revision, whole or one file of it."""

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.repository}{at}" + (f":{self.file}" if self.file else "")


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Where the hub is and where its files go; from the environment variables of huggingface-hub."""

    records: Path
    """Folder that remembers what was fetched."""
    endpoint: str = _DEFAULT_ENDPOINT
    token: str | None = None
    cache: Path | None = None
    offline: bool = False

    @classmethod
    def from_environ(
        cls, records: Path, environ: Mapping[str, str] = os.environ, offline: bool | None = None
    ) -> HubAccess:
        home = environ.get("HF_HOME")
        cache = environ.get("HF_HUB_CACHE") or (str(Path(home) / "hub") if home else None)
        asked = environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        return cls(
            records=records,
            endpoint=(environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/"),
            token=environ.get("HF_TOKEN") or None,
            cache=Path(cache).expanduser() if cache else None,
            offline=asked if offline is None else offline,
        )


def parse_hub_source(text: str) -> HubSource:
    """Read what follows `hf:` — org/name[@revision][:file]."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([^:]+))?(?::(.+))?", text)
    if match is None:
        raise ModelError(
            f"hf:{text}: must be hf:org/name, hf:org/name@revision or hf:org/name:file"
        )
    return HubSource(match[1], match[2], match[3])


def cached_hub(source: HubSource, access: HubAccess) -> Path | None:
    """Return where an earlier fetch put this source, if all of it is still there."""
    try:
        record = json.loads(_record_path(source, access).read_text(encoding="utf-8"))
        folder = Path(record["folder"])
        if all((folder / name).is_file() for name in record["files"]):
            return _result(folder, record["files"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def fetch_hub(source: HubSource, access: HubAccess, report: Callable[[float], None]) -> Path:
    """Return the checkpoint folder or GGUF file. Raises HubSilent where only the way to it is broken."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    cached = cached_hub(source, access)
    if cached is not None:
        report(1.0)
        return cached
    try:
        files = _choose_files(source, _ask(source, access))
    except HubSilent:
        local = _try_local_cache(source, access)
        if local is None:
            raise
        report(1.0)
        return local
    names = [file.rfilename for file in files]
    disable_progress_bars()
    blobs = _repository_cache(source, access) / "blobs"
    try:
        with watch_folder(blobs, sum(file.size or 0 for file in files), report):
            folder = Path(
                snapshot_download(
                    source.repository,
                    revision=source.revision,
                    cache_dir=access.cache,
                    endpoint=access.endpoint,
                    token=access.token,
                    allow_patterns=names,
                )
            )
    except LocalEntryNotFoundError as error:
        raise HubSilent(f"{source}: {access.endpoint} stopped answering ({error})") from error
    except Exception as error:
        raise _explain(source, access, error) from error
    _check_digests(source, folder, files)
    record = json.dumps({"folder": str(folder), "files": names}).encode()
    write_atomically(_record_path(source, access), record)
    report(1.0)
    return _result(folder, names)


def _ask(source: HubSource, access: HubAccess) -> Sequence[Any]:
    """Return the repository's files. The hub has ANSWER_SECONDS."""
    if access.offline:
        raise HubSilent(
            f"{source}: not in the hub's cache, and the hub is not asked (HF_HUB_OFFLINE)"
        )
    from huggingface_hub import HfApi

    api = HfApi(endpoint=access.endpoint, token=access.token)
    answers: queue.SimpleQueue[tuple[Sequence[Any] | None, Exception | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            info = api.model_info(
                source.repository,
                revision=source.revision,
                timeout=2 * ANSWER_SECONDS,  # ends the thread; the queue below sets the time
                files_metadata=True,
            )
            answers.put((info.siblings or [], None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=ask, name="ask-hub", daemon=True).start()
    try:
        siblings, error = answers.get(timeout=ANSWER_SECONDS)
    except queue.Empty:
        raise HubSilent(
            f"{source}: {access.endpoint} gave no answer within {ANSWER_SECONDS:g} s"
        ) from None
    if error is not None:
        raise _explain(source, access, error) from error
    return siblings or []


def _explain(source: HubSource, access: HubAccess, error: Exception) -> ModelError:
    from huggingface_hub import errors

    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{source}: the repository is gated. Accept its terms at {access.endpoint}/"
            f"{source.repository} and set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"{source}: the repository has no revision '{source.revision or 'main'}'")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"{source}: no such repository at {access.endpoint}, or it is private (set HF_TOKEN)"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None and status < 500 and status not in (408, 429):
        return ModelError(f"{source}: {access.endpoint} refused with HTTP {status}: {first_line}")
    return HubSilent(f"{source}: {access.endpoint} cannot be reached ({first_line})")


def _choose_files(source: HubSource, siblings: Sequence[Any]) -> list[Any]:
    by_name = {sibling.rfilename: sibling for sibling in siblings}
    models = sorted(name for name in by_name if name.endswith(".gguf"))
    if source.file is not None:
        if source.file not in by_name:
            raise ModelError(
                f"{source}: the repository has no such file; its GGUF files are "
                f"{', '.join(models) or 'none'}"
            )
        split = _SPLIT.fullmatch(source.file)
        if split is None:
            return [by_name[source.file]]
        count = split[2]
        parts = [f"{split[1]}-{number:05d}-of-{count}.gguf" for number in range(1, int(count) + 1)]
        missing = [name for name in parts if name not in by_name]
        if missing:
            raise ModelError(f"{source}: the repository lacks the parts {', '.join(missing)}")
        return [by_name[name] for name in parts]
    if any(name.endswith(".safetensors") and "/" not in name for name in by_name):
        return [file for name, file in by_name.items() if _CHECKPOINT_FILE.fullmatch(name)]
    if len(models) == 1:
        return [by_name[models[0]]]
    raise ModelError(
        f"{source}: the repository holds no safetensors checkpoint; name one of its GGUF files "
        f"({', '.join(models) or 'none'}) as hf:{source.repository}:FILE"
    )


def _check_digests(source: HubSource, folder: Path, files: Sequence[Any]) -> None:
    """Compare each large file with the SHA-256 the hub states for it."""
    for file in files:
        expected = getattr(file.lfs, "sha256", None)
        if expected is None:
            continue
        with (folder / file.rfilename).open("rb") as opened:
            actual = hashlib.file_digest(opened, "sha256").hexdigest()
        if actual != expected:
            raise ModelError(
                f"{source}: {file.rfilename} has the SHA-256 {actual}, the hub states {expected}. "
                f"Delete {folder / file.rfilename} and fetch it again"
            )


def _try_local_cache(source: HubSource, access: HubAccess) -> Path | None:
    """Return what any program has put into the hub's cache, or None. Asks nobody."""
    repository = _repository_cache(source, access)
    revision = source.revision or "main"
    try:
        commit = (repository / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    folder = repository / "snapshots" / commit
    if source.file is not None:
        return folder / source.file if (folder / source.file).is_file() else None
    if (folder / "config.json").is_file():
        return folder
    models = sorted(folder.glob("*.gguf"))
    return models[0] if len(models) == 1 else None


def _repository_cache(source: HubSource, access: HubAccess) -> Path:
    from huggingface_hub import constants

    root = access.cache or Path(constants.HF_HUB_CACHE)
    return root / f"models--{source.repository.replace('/', '--')}"


def _record_path(source: HubSource, access: HubAccess) -> Path:
    key = f"{access.endpoint} {access.cache} {source}"
    return access.records / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _result(folder: Path, names: Sequence[str]) -> Path:
    if "config.json" in names:
        return folder
    return folder / sorted(names)[0]
