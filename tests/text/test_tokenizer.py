from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest, ModelError
from headrace.testing import tiny_special_tokens, tiny_tokenizer_json
from headrace.text.token_bytes import byte_rule
from headrace.text.tokenizer import Tokenizer

TEXT = "The capital of France is Paris.\n\n\tdef f(): return 'é 你好 😀🫠'  \n"


def tiny(*, add_bos_token: bool = True) -> Tokenizer:
    return Tokenizer(
        tiny_tokenizer_json(), special_tokens=tiny_special_tokens(), add_bos_token=add_bos_token
    )


def test_text_survives_the_round_trip(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize("text", ["", " ", "  two", "\n", " the"])
def test_spaces_at_the_ends_survive_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_raw_text_gets_bos_as_the_model_says() -> None:
    bos = tiny().bos_token_id
    assert tiny().encode("hi") == [bos, ord("h"), ord("i")]
    assert tiny(add_bos_token=False).encode("hi") == [ord("h"), ord("i")]
    assert tiny().encode("hi", add_bos=False) == [ord("h"), ord("i")]
    assert tiny(add_bos_token=False).encode("hi", add_bos=True) == [bos, ord("h"), ord("i")]


def test_pasted_bos_is_not_doubled() -> None:
    assert tiny().encode("<|begin|>hi") == tiny().encode("hi")


def test_two_pasted_bos_stay_two() -> None:
    bos = tiny().bos_token_id
    assert tiny().encode("<|begin|><|begin|>hi")[:3] == [bos, bos, ord("h")]


def test_empty_text_is_bos_alone() -> None:
    assert tiny().encode("") == [tiny().bos_token_id]
    assert tiny(add_bos_token=False).encode("") == []


def test_rendered_chat_gets_no_token_of_its_own() -> None:
    tokenizer = tiny()
    rendered = "<|begin|><|im_start|>user\nhi<|im_end|>\n"
    ids = tokenizer.encode_rendered(rendered)
    assert ids.count(tokenizer.bos_token_id or 0) == 1
    assert tokenizer.decode(ids, skip_special=False) == rendered
    assert tokenizer.bos_token_id not in tokenizer.encode_rendered("hi")


def test_batch_equals_one_at_a_time(tokenizer: Tokenizer) -> None:
    texts = [TEXT, "", "hi", tokenizer.special_tokens["bos_token"] + "hi"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_truncation_in_the_file_is_not_applied(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("abc" * 50)) >= 50


def test_decode_leaves_special_tokens_out_unless_asked() -> None:
    tokenizer = tiny()
    ids = tokenizer.encode_rendered("<|im_start|>user\nhi<|im_end|>")
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.decode(ids, False) == "<|im_start|>user\nhi<|im_end|>"


def test_a_continuation_keeps_its_leading_space(tokenizer: Tokenizer) -> None:
    """T03: the space in front of a completion is part of it."""
    ids = tokenizer.encode("the capital", add_bos=False)
    tail = ids[len(tokenizer.encode("the", add_bos=False)) :]
    assert tokenizer.decode(tail, continuation=True) == " capital"


def test_bytes_of_every_token_join_to_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_bos=False)
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode()
    assert joined.removeprefix(" ") == TEXT


def test_a_token_that_is_no_text_shows_as_replacement() -> None:
    tokenizer = tiny()
    assert tokenizer.token_bytes(0xF0) == b"\xf0"
    assert tokenizer.token_text(0xF0) == "\ufffd"
    assert tokenizer.token_text(tokenizer.token_to_id("<|im_end|>") or 0) == "<|im_end|>"


@pytest.mark.parametrize("token_id", [-1, 350, 2**31, 2**40])
def test_an_id_without_a_token_has_no_text(token_id: int) -> None:
    assert tiny().token_bytes(token_id) == b""
    assert tiny().decode([ord("a"), token_id, ord("b")]) == "ab"


@given(st.lists(st.integers(0, 349), max_size=30), st.booleans())
def test_decode_equals_the_tokenizers_package(ids: list[int], skip_special: bool) -> None:
    theirs = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
    assert tiny().decode(ids, skip_special) == theirs.decode(ids, skip_special_tokens=skip_special)


def test_half_a_surrogate_pair_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    for call in (tokenizer.encode, tokenizer.encode_rendered):
        with pytest.raises(InvalidRequest, match=r"U\+D83D\) at character 2"):
            call("ab\ud83d")
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode_batch(["fine", "\udc00"])


def test_what_is_no_tokenizer_is_a_model_error() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer("{}", special_tokens={}, add_bos_token=False)


def test_bos_wanted_but_unnamed_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="names no bos_token"):
        Tokenizer(tiny_tokenizer_json(), special_tokens={}, add_bos_token=True)
    with pytest.raises(ModelError, match=r"bos_token '<s>' is not in"):
        Tokenizer(tiny_tokenizer_json(), special_tokens={"bos_token": "<s>"}, add_bos_token=False)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (None, "no decoder"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "'WordPiece' is not supported"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}, "only a plain string"),
    ],
)
def test_an_unknown_decoder_is_named(decoder: dict[str, object] | None, message: str) -> None:
    data = json.loads(tiny_tokenizer_json())
    data["decoder"] = decoder
    with pytest.raises(ModelError, match=message):
        Tokenizer(json.dumps(data), special_tokens={}, add_bos_token=False)


def test_metaspace_takes_its_leading_space_back() -> None:
    rule = byte_rule({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"})
    assert (rule.bytes_of("▁a▁b", False), rule.strip_prefix) == (b" a b", " ")
    assert byte_rule({"type": "Metaspace", "prepend_scheme": "never"}).strip_prefix == ""


def test_gemma_gets_exactly_one_bos(gemma3_gguf: Path) -> None:
    from headrace.testing.model_driver import open_checkpoint

    assets = open_checkpoint(gemma3_gguf).text
    tokenizer = Tokenizer(
        assets.tokenizer_json,
        special_tokens=assets.special_tokens,
        add_bos_token=assets.add_bos_token,
    )
    raw = tokenizer.encode(TEXT)
    chat = tokenizer.encode_rendered("<bos><start_of_turn>user\nhi<end_of_turn>\n")
    bos = tokenizer.bos_token_id
    assert bos is not None
    for ids in (raw, chat, tokenizer.encode("<bos>" + TEXT)):
        assert (ids[0], ids.count(bos)) == (bos, 1)
    assert tokenizer.encode("<bos>" + TEXT) == raw
    assert tokenizer.token_text(chat[1]) == "<start_of_turn>"
