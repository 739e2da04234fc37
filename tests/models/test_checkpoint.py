"""Opening a model: heads, end-of-turn tokens, templates, sampling defaults, revision."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from headrace.errors import ModelError
from headrace.interfaces import LoadedModel
from headrace.models.checkpoint import open_model
from headrace.models.config import ModelConfig
from headrace.testing.gguf_files import RawTensor, tiny_metadata, write_gguf, write_tiny_gguf
from headrace.testing.tiny_models import BOS, EOS, TURN_END, tiny_config, write_tiny_checkpoint


class Recorded:
    """An architecture that only keeps its config."""

    name = "recorded"

    def __init__(self, config: ModelConfig) -> None:
        self.config = config


REGISTRY: Mapping[str, Any] = dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "gemma3_text"), Recorded
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


def _open(path: Path, **arguments: Any) -> LoadedModel:
    return open_model(path, name="tiny", registry_models=REGISTRY, **arguments)


def _config(model: LoadedModel) -> ModelConfig:
    config = model.architecture.config  # type: ignore[attr-defined]
    assert isinstance(config, ModelConfig)
    return config


def _edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    table = json.loads(path.read_text()) if path.exists() else {}
    table.update(changes)
    path.write_text(json.dumps({k: v for k, v in table.items() if v is not ...}))


@pytest.mark.parametrize("model_type", sorted(REGISTRY))
def test_both_forms_of_a_model_open_alike(tmp_path: Path, model_type: str) -> None:
    hf = _open(write_tiny_checkpoint(tmp_path / "hf", model_type))
    gguf = _open(write_tiny_gguf(tmp_path / "m.gguf", model_type))
    assert set(hf.tensors.names()) == set(gguf.tensors.names())
    assert hf.text.eos_token_ids == gguf.text.eos_token_ids == (3, 1)
    assert hf.text.special_tokens["eos_token"] == gguf.text.special_tokens["eos_token"] == TURN_END
    assert hf.stored_dtype == gguf.stored_dtype == "float32"
    name = "model.layers.1.self_attn.k_proj.weight"
    np.testing.assert_array_equal(hf.tensors.read(name).data, gguf.tensors.read(name).data)


# --- the output head (Q05) ------------------------------------------------------


def _untied(tmp_path: Path, **changes: Any) -> Path:
    folder = write_tiny_checkpoint(tmp_path / "hf", config={"tie_word_embeddings": False})
    _edit(folder, "config.json", **changes)
    return folder


def test_tied_and_absent_loads(tmp_path: Path) -> None:
    model = _open(write_tiny_checkpoint(tmp_path / "hf"))
    assert _config(model).tie_word_embeddings
    assert not model.tensors.has("lm_head.weight")


def test_tied_but_a_different_head_is_stored_uses_it_and_says_so(tmp_path: Path) -> None:
    """Q05: both there; documented choice."""
    folder = _untied(tmp_path, tie_word_embeddings=True)
    with capture_logs() as logs:
        model = _open(folder)
    assert not _config(model).tie_word_embeddings
    assert [entry["event"] for entry in logs] == ["head_not_tied"]


def test_tied_and_a_copy_is_stored_is_held_once(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = write_tiny_checkpoint(tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    assert _config(_open(folder)).tie_word_embeddings


def test_untied_and_absent_is_refused(tmp_path: Path) -> None:
    """Q05: a random head would be served otherwise."""
    folder = write_tiny_checkpoint(tmp_path / "hf")
    _edit(folder, "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"no lm_head\.weight"):
        _open(folder)


def test_gguf_is_tied_exactly_when_it_stores_no_head(tmp_path: Path) -> None:
    assert _config(_open(write_tiny_gguf(tmp_path / "a.gguf"))).tie_word_embeddings
    untied = write_tiny_gguf(tmp_path / "b.gguf", config={"tie_word_embeddings": False})
    assert not _config(_open(untied)).tie_word_embeddings


# --- end-of-turn tokens (T08) ---------------------------------------------------


def test_every_end_that_any_file_names_is_taken(tmp_path: Path) -> None:
    """T08: the union of what generation_config, config and tokenizer say."""
    folder = write_tiny_checkpoint(tmp_path / "hf")
    _edit(folder, "generation_config.json", eos_token_id=[70, 80])
    _edit(folder, "config.json", eos_token_id=90)
    assert _open(folder).text.eos_token_ids == (70, 80, 90, 3, 1)


def test_the_tokenizers_own_end_is_taken_when_config_has_the_wrong_one(tmp_path: Path) -> None:
    """T08: the wrong one alone would run on into a next turn."""
    folder = write_tiny_checkpoint(tmp_path / "hf")
    (folder / "generation_config.json").unlink()
    _edit(folder, "config.json", eos_token_id=200)
    _edit(folder, "tokenizer_config.json", eos_token={"content": "the", "special": True})
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert set(_open(folder).text.eos_token_ids) == {200, vocab["the"], 3, 1}


def test_gguf_takes_eos_eot_and_eom(tmp_path: Path) -> None:
    """T08: whichever of the three keys the file has."""
    keys = {"eos": 10, "eot": 20, "eom": 30}
    metadata = {f"tokenizer.ggml.{key}_token_id": value for key, value in keys.items()}
    model = _open(write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata))
    assert model.text.eos_token_ids[:3] == (10, 20, 30)
    assert set(model.text.eos_token_ids) == {10, 20, 30, 1, 3}


def test_gemma_ends_its_turn_though_the_file_names_only_eos(gemma3_gguf: Path) -> None:
    assert _open(gemma3_gguf).text.eos_token_ids == (1, 106)


# --- templates and special tokens (T11) -----------------------------------------


def test_no_template_is_a_warning_not_a_silent_default(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "hf", chat_template=None)
    with capture_logs() as logs:
        model = _open(folder)
    assert model.text.chat_template is None
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [
        ("no_chat_template", "warning")
    ]


def test_template_sources_in_order(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "hf", chat_template="from config")
    assert _open(folder).text.chat_template == "from config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    _edit(folder, "tokenizer_config.json", chat_template=named)
    assert _open(folder).text.chat_template == "plain"
    _edit(folder, "tokenizer_config.json", chat_template=...)
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert _open(folder).text.chat_template == "from json"
    (folder / "chat_template.jinja").write_text("from jinja")
    assert _open(folder).text.chat_template == "from jinja"


def test_template_of_a_gguf_file(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": "{{ messages }}"}
    assert _open(write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)).text.chat_template == (
        "{{ messages }}"
    )


def test_special_tokens_given_as_objects_or_in_their_own_file(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "hf")
    _edit(
        folder, "tokenizer_config.json", bos_token={"content": BOS, "lstrip": False}, eos_token=...
    )
    _edit(folder, "special_tokens_map.json", eos_token={"content": EOS}, bos_token="ignored")
    tokens = _open(folder).text.special_tokens
    assert tokens == {"bos_token": BOS, "eos_token": EOS}


@pytest.mark.parametrize(
    ("stated", "template", "expected"),
    [(True, False, True), (False, True, False), (..., True, True), (..., False, False)],
)
def test_bos_as_stated_else_as_the_post_processor_does(
    tmp_path: Path, stated: Any, template: bool, expected: bool
) -> None:
    folder = write_tiny_checkpoint(tmp_path / "hf")
    _edit(folder, "tokenizer_config.json", add_bos_token=stated)
    if template:
        single = [{"SpecialToken": {"id": BOS}}, {"Sequence": {"id": "A", "type_id": 0}}]
        inner = {"type": "TemplateProcessing", "single": single}
        post = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, inner]}
        _edit(folder, "tokenizer.json", post_processor=post)
    assert _open(folder).text.add_bos_token is expected


def test_another_tokenizer_can_be_given_for_a_gguf_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.model": "bert"})
    with pytest.raises(ModelError, match="'bert'.*Give a tokenizer.json"):
        _open(path)
    folder = write_tiny_checkpoint(tmp_path / "hf")
    model = _open(path, tokenizer_path=folder / "tokenizer.json")
    assert model.text.tokenizer_json == (folder / "tokenizer.json").read_text()


# --- sampling defaults ----------------------------------------------------------


def test_sampling_defaults_of_generation_config(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "hf")
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": 64, "min_p": None, "max_length": 20}
    _edit(folder, "generation_config.json", do_sample=True, **values)
    assert _open(folder).default_sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 64}
    _edit(folder, "generation_config.json", do_sample=False)
    assert _open(folder).default_sampling == {}


def test_sampling_defaults_of_gguf(tmp_path: Path) -> None:
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    model = _open(write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata))
    assert model.default_sampling == {"temperature": 0.5, "top_k": 20}


# --- identity -------------------------------------------------------------------


def test_revision_is_of_the_contents(tmp_path: Path) -> None:
    first = write_tiny_checkpoint(tmp_path / "a")
    copy = tmp_path / "b"
    shutil.copytree(first, copy)
    other = write_tiny_checkpoint(tmp_path / "c", seed=1)
    assert _open(first).revision == _open(copy).revision
    assert _open(first).revision != _open(other).revision
    _edit(copy, "config.json", rope_theta=20_000.0)
    assert _open(first).revision != _open(copy).revision


def test_revision_sees_one_changed_tensor(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "hf")
    before = _open(folder).revision
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4:] = b"\x00\x00\x80\x3f"
    path.write_bytes(bytes(data))
    assert _open(folder).revision != before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stored_dtype(tmp_path: Path, dtype: str) -> None:
    assert _open(write_tiny_checkpoint(tmp_path / "hf", dtype=dtype)).stored_dtype == dtype


def test_quantized_files_compute_in_bfloat16(smollm2_gguf: Path) -> None:
    model = _open(smollm2_gguf)
    assert model.stored_dtype == "bfloat16"
    assert model.tensors.scheme("model.layers.0.mlp.up_proj.weight") == ("q4_1", (1536, 576))


# --- what is named --------------------------------------------------------------


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "hf")
    _edit(folder, "config.json", model_type="lama")
    with pytest.raises(ModelError, match="'lama'. Did you mean 'llama'"):
        _open(folder)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", "<!DOCTYPE html>", "cannot be read as JSON"),
        ("config.json", "[1]", "must hold a JSON object, holds list"),
        ("generation_config.json", "{", "cannot be read as JSON"),
        ("tokenizer.json", "{}", "it has no model"),
        ("tokenizer.json", "\x00", "cannot be read as JSON"),
    ],
)
def test_damaged_json_files_are_named(tmp_path: Path, name: str, content: str, says: str) -> None:
    folder = write_tiny_checkpoint(tmp_path / "hf")
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=says):
        _open(folder)


def test_a_missing_tokenizer_names_the_remedy(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "hf")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json; save the tokenizer"):
        _open(folder)


def test_folders_of_gguf_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        _open(tmp_path / "absent")
    folder = tmp_path / "models"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"neither config\.json nor a GGUF"):
        _open(folder)
    write_tiny_gguf(folder / "a.gguf")
    assert _config(_open(folder)).model_type == "llama"
    write_tiny_gguf(folder / "b.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files; name one of a\.gguf, b\.gguf"):
        _open(folder)


def test_only_optional_metadata_missing_is_fine(tmp_path: Path) -> None:
    """Q15: names, special tokens and limits may be left out."""
    path = write_tiny_gguf(
        tmp_path / "m.gguf",
        metadata={
            "tokenizer.ggml.bos_token_id": None,
            "tokenizer.ggml.eos_token_id": None,
            "tokenizer.ggml.add_bos_token": None,
            "llama.context_length": None,
            "llama.rope.freq_base": None,
        },
    )
    model = _open(path)
    assert model.text.eos_token_ids == (1, 3)
    assert model.text.special_tokens == {}


def test_unsupported_type_is_refused_before_the_tokenizer_is_built(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight": RawTensor(21, (4, 256), b"")}
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata("llama", tiny_config("llama")), tensors)
    with pytest.raises(ModelError, match="IQ3_S"):
        _open(path)
    assert not (tmp_path / "cache").exists()


def test_the_shared_factory_writes_each_checkpoint_once(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    assert tiny_checkpoint("qwen3") == tiny_checkpoint("qwen3")
    assert tiny_checkpoint("qwen3") != tiny_checkpoint("qwen3", seed=1)
    assert _config(_open(tiny_checkpoint("qwen3"))).qk_norm
