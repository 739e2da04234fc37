from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.testing import tiny_special_tokens, tiny_tokenizer_json
from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import Tokenizer

TINY = Tokenizer(tiny_tokenizer_json(), special_tokens=tiny_special_tokens(), add_bos_token=False)
MIXED_TEXT = st.text(st.sampled_from("ab \n'éß你好日本😀🫠👩‍🚀"), max_size=30)


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.append(token_id) for token_id in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 349), max_size=40))
def test_joined_deltas_equal_one_shot_decode_for_any_ids(ids: list[int]) -> None:
    assert "".join(deltas(TINY, ids)) == TINY.decode(ids, continuation=True)


@given(text=MIXED_TEXT)
def test_only_the_bytes_of_an_incomplete_character_are_held(text: str) -> None:
    detokenizer = Detokenizer(TINY)
    sent, fed = "", b""
    for byte in text.encode():
        fed += bytes([byte])
        sent += detokenizer.append(byte)
        assert sent == fed.decode("utf-8", "ignore")
    assert detokenizer.flush() == ""
    assert sent == text


def test_random_ids_of_every_kind_of_tokenizer_join_to_the_one_shot_text(
    tokenizer: Tokenizer,
) -> None:
    """T04: nothing is sent twice or taken back, whatever bytes come."""

    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    def check(ids: list[int]) -> None:
        assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids, continuation=True)

    check()


def test_encoded_text_comes_back_as_sent(tokenizer: Tokenizer) -> None:
    @given(MIXED_TEXT)
    def check(text: str) -> None:
        parts = deltas(tokenizer, tokenizer.encode(text))
        assert "\ufffd" not in "".join(parts)
        assert parts[-1] == ""
        assert "".join(parts) in (text, " " + text)  # SentencePiece may prefix a space

    check()


def test_emoji_between_ascii_is_held_alone() -> None:
    data = "ob 🫠 ke".encode()
    assert deltas(TINY, list(data)) == ["o", "b", " ", "", "", "", "🫠", " ", "k", "e", ""]


def test_spaces_of_single_tokens_are_kept(tokenizer: Tokenizer) -> None:
    """T03: a token decoded alone loses its leading space in SentencePiece decoders."""
    ids = tokenizer.encode("the capital of", add_bos=False)
    start = len(tokenizer.encode("the", add_bos=False))
    assert "".join(deltas(tokenizer, ids[start:])) == " capital of"


def test_bytes_that_cannot_become_text_are_replaced_as_soon_as_that_is_certain() -> None:
    assert deltas(TINY, [0xF0, 0x9F, ord("a"), 0xFF]) == ["", "", "\ufffda", "\ufffd", ""]
    assert deltas(TINY, [ord("a"), 0xE4, 0xBD]) == ["a", "", "", "\ufffd"]


def test_special_tokens_are_left_out_or_spelled() -> None:
    ids = [ord("a"), TINY.token_to_id("<|im_end|>") or 0, ord("b")]
    assert deltas(TINY, ids) == ["a", "", "b", ""]
    spelling = Detokenizer(TINY, skip_special=False)
    assert [spelling.append(token_id) for token_id in ids] == ["a", "<|im_end|>", "b"]


def test_flush_forgets_what_was_held() -> None:
    detokenizer = Detokenizer(TINY)
    detokenizer.append(0xF0)
    assert (detokenizer.flush(), detokenizer.flush(), detokenizer.append(ord("a"))) == (
        "\ufffd",
        "",
        "a",
    )


def test_each_token_is_looked_up_once_however_long_the_output() -> None:
    """T06: the work per token does not grow with the output, and whole tokens come from a table."""

    class Counting(Tokenizer):
        lookups = 0

        def token_bytes(self, token_id: int) -> bytes:
            self.lookups += 1
            return super().token_bytes(token_id)

        def decode(self, *args: object, **options: object) -> str:
            raise AssertionError("decoding a window again would make long outputs slow")

    tokenizer = Counting(
        tiny_tokenizer_json(), special_tokens=tiny_special_tokens(), add_bos_token=False
    )
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.append(byte) for byte in ("你好 " * 1000).encode())
    assert (tokenizer.lookups, text) == (6001, "你好 " * 1000)


@given(st.lists(st.integers(0, 360), max_size=40), st.booleans())
def test_the_shared_table_changes_no_text(ids: list[int], skip_special: bool) -> None:
    """T04: what other choices decoded before, half characters included, shows in no other text."""
    fresh = Tokenizer(
        tiny_tokenizer_json(), special_tokens=tiny_special_tokens(), add_bos_token=False
    )
    for tokenizer in (fresh, TINY):
        detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        text = "".join(map(detokenizer.append, ids)) + detokenizer.flush()
        assert text == tokenizer.decode(ids, skip_special, continuation=True)


@pytest.mark.real_model
@pytest.mark.parametrize("fixture", ["smollm2_gguf", "gemma3_gguf"])
def test_real_tokenizers(fixture: str, request: pytest.FixtureRequest) -> None:
    from headrace.testing.model_driver import open_checkpoint

    assets = open_checkpoint(request.getfixturevalue(fixture)).text
    tokenizer = Tokenizer(
        assets.tokenizer_json,
        special_tokens=assets.special_tokens,
        add_bos_token=assets.add_bos_token,
    )

    @given(MIXED_TEXT)
    def texts_come_back(text: str) -> None:
        ids = tokenizer.encode(text, add_bos=False)
        parts = deltas(tokenizer, ids)
        assert "".join(parts) == tokenizer.decode(ids) == text
        assert all("\ufffd" not in part for part in parts)

    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    def any_ids_join(ids: list[int]) -> None:
        assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids, continuation=True)

    texts_come_back()
    any_ids_join()
