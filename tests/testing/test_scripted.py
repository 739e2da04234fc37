"""A script's tokens come out of real operations, draw and detokenizer, in their order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from headrace.errors import ModelError
from headrace.interfaces import LoadedModel
from headrace.testing import open_scripted, write_script
from headrace.testing.model_driver import ModelDriver
from headrace.testing.numpy_ops import NumpyOps
from headrace.testing.script_file import Piece
from headrace.testing.tokenizers import tiny_tokenizer_json
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer


def tokenizer_of(model: LoadedModel) -> Tokenizer:
    text = model.text
    return Tokenizer(
        text.tokenizer_json, special_tokens=text.special_tokens, add_bos_token=text.add_bos_token
    )


def spoken(model: LoadedModel, prompt: str, num_tokens: int) -> list[bytes]:
    """Return the bytes of the next tokens."""
    tokenizer = tokenizer_of(model)
    driver = ModelDriver(NumpyOps(np.float32), model)
    (drawn,) = driver.greedy([tokenizer.encode_rendered(prompt)], num_tokens)
    return [tokenizer.token_bytes(token_id) for token_id in drawn]


def test_the_outputs_are_said_in_order_and_end_with_eos(tmp_path: Path) -> None:
    path = write_script(tmp_path / "s.json", ["Hel", "lo", "Hel", "lo", " 世界"])
    model = open_scripted(path, "s")
    expected = [b"Hel", b"lo", b"Hel", b"lo", " 世界".encode(), b"<|im_end|>", b"Hel"]
    for prompt in ("x", "lo", "<|im_start|>assistant\n"):
        assert spoken(model, prompt, 7) == expected
    assert tokenizer_of(model).token_text(model.text.eos_token_ids[0]) == "<|im_end|>"


def test_a_piece_may_be_half_a_character_a_token_id_or_a_special_token(tmp_path: Path) -> None:
    emoji = "🫠".encode()
    pieces: list[Piece] = [emoji[:2], emoji[2:], 65, 65, "<|endoftext|>", "tail"]
    model = open_scripted(write_script(tmp_path / "s.json", pieces), "s")
    assert spoken(model, "x", 6) == [emoji[:2], emoji[2:], b"A", b"A", b"<|endoftext|>", b"tail"]


def test_without_eos_the_outputs_start_again(tmp_path: Path) -> None:
    model = open_scripted(write_script(tmp_path / "s.json", ["a", "b"], eos=False), "s")
    assert spoken(model, "x", 5) == [b"a", b"b", b"a", b"b", b"a"]


def test_no_outputs_are_eos_at_once(tmp_path: Path) -> None:
    model = open_scripted(write_script(tmp_path / "s.json", []), "s")
    assert spoken(model, "x", 1) == [b"<|im_end|>"]


def test_other_outputs_by_the_last_token_of_the_prompt(tmp_path: Path) -> None:
    path = write_script(tmp_path / "s.json", ["no"], when={"A": ["yes", "!"], "B": []})
    model = open_scripted(path, "s")
    assert spoken(model, "AB A", 3) == [b"yes", b"!", b"<|im_end|>"]
    assert spoken(model, "B", 1) == [b"<|im_end|>"]
    assert spoken(model, "Ax", 1) == [b"no"]


@pytest.mark.parametrize("fail_after", [0, 1, 3])
def test_logits_become_nan_when_asked(tmp_path: Path, fail_after: int) -> None:
    path = write_script(tmp_path / "s.json", ["a", "b", "c"], fail_after=fail_after)
    model = open_scripted(path, "s")
    tokenizer = tokenizer_of(model)
    driver = ModelDriver(NumpyOps(np.float32), model)
    ids = tokenizer.encode("x")
    for _ in range(fail_after):
        row = driver.logits(ids, [1] * len(ids))[-1]
        assert not np.isnan(row).any()
        ids.append(int(row.argmax()))
    assert np.isnan(driver.logits(ids, [1] * len(ids))[-1]).all()


def test_the_wanted_logit_overwhelms_all_others_in_a_long_script(tmp_path: Path) -> None:
    model = open_scripted(write_script(tmp_path / "s.json", ["z"] * 900, eos=False), "s")
    first = tokenizer_of(model).vocab_size - 900
    logits = ModelDriver(NumpyOps(np.float32), model).logits(range(first, first + 900))
    ordered = np.sort(logits, axis=-1)
    assert (ordered[:, -1] - ordered[:, -2]).min() > 100
    assert logits.argmax(-1)[:-1].tolist() == list(range(first + 1, first + 900))


def test_the_tokenizers_package_reads_the_same_text(tmp_path: Path) -> None:
    model = open_scripted(write_script(tmp_path / "s.json", ["ab", "ab", " é"]), "s")
    ids = list(range(261, 264))
    theirs = tokenizers.Tokenizer.from_str(model.text.tokenizer_json)
    assert theirs.decode(ids) == tokenizer_of(model).decode(ids) == "abab é"


def test_prompts_never_hold_a_token_of_the_script(tmp_path: Path) -> None:
    model = open_scripted(write_script(tmp_path / "s.json", ["Hello", "H"]), "s")
    assert tokenizer_of(model).encode("Hello HH") == list(b"Hello HH")


def test_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer_json(), encoding="utf-8")
    base = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
    hello = base.token_to_id("Hello")
    assert hello is not None
    path = write_script(tmp_path / "s.json", [hello, "Hello"], tokenizer="tokenizer.json")
    model = open_scripted(path, "s")
    assert spoken(model, " the", 3) == [b"Hello", b"Hello", b"<|im_end|>"]
    assert tokenizer_of(model).encode("Hello the") == base.encode("Hello the").ids


def test_its_chat_template_works_and_may_be_absent(tmp_path: Path) -> None:
    model = open_scripted(write_script(tmp_path / "s.json", ["x"]), "s")
    assert model.text.chat_template is not None
    template = ChatTemplate(model.text.chat_template, model.text.special_tokens)
    rendered = template.render([{"role": "user", "content": "hi"}])
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    silent = open_scripted(write_script(tmp_path / "t.json", ["x"], chat_template=None), "t")
    assert silent.text.chat_template is None


def test_another_script_has_another_revision(tmp_path: Path) -> None:
    one = open_scripted(write_script(tmp_path / "1.json", ["x"]), "s")
    two = open_scripted(write_script(tmp_path / "2.json", ["y"]), "s")
    assert one.revision != two.revision


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"outputs": ["x"], "eoss": True}, "unknown field `eoss`"),
        ({"outputs": [{"bytes": "zz"}]}, "is no piece"),
        ({"outputs": [{"byte": "00"}]}, "is no piece"),
        ({"outputs": [261]}, "outside the tokenizer's 261 tokens"),
        ({"outputs": ["<|pad|>", "x", "<|pad|>", "y"]}, "a special token can occur once"),
        ({"outputs": ["x"], "fail_after": 2}, "between 0 and 1"),
        ({"outputs": [], "eos": False}, "nothing to say"),
        ({"outputs": ["x"], "special_tokens": {"eos_token": "</s>"}}, "eos_token is not in"),
    ],
)
def test_a_wrong_script_is_named(tmp_path: Path, table: dict[str, object], message: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        open_scripted(path, "s")


def test_a_missing_or_broken_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        open_scripted(tmp_path / "absent.json", "s")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="is not JSON"):
        open_scripted(tmp_path / "broken.json", "s")
