"""Text to token ids: which text may become control tokens, and what bytes a token stands for."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace

from moeserve.frontend.text import CUT_MARKS, IncrementalDetokenizer, TextTokenizer
from tests.support.tiny_model import BOS, END, SPECIALS, byte_tokenizer

MARK = CUT_MARKS[0]
TOKENIZER = TextTokenizer(byte_tokenizer())
TEXT = st.text(st.characters(codec="utf-8", exclude_characters=CUT_MARKS), max_size=40)


def sentencepiece_tokenizer() -> TextTokenizer:
    """A vocabulary that writes spaces as U+2581 and falls back to bytes."""
    vocab = {"<unk>": 0, "\u2581a": 1, "\u2581b": 2, "a": 3, "b": 4, "\u2581": 5}
    vocab |= {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    model = BPE(vocab=vocab, merges=[("\u2581", "a"), ("\u2581", "b")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = Sequence([Replace("\u2581", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return TextTokenizer(tokenizer)


@given(TEXT)
def test_decoding_gives_the_text_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_raw_prompt_may_hold_control_tokens() -> None:
    assert TOKENIZER.encode("<|bos|>a<|end|>") == [BOS, ord("a"), END]


@given(st.lists(st.one_of(TEXT, st.sampled_from(SPECIALS)), max_size=6))
def test_protected_text_forms_no_control_token_and_keeps_its_bytes(pieces: list[str]) -> None:
    said = "".join(pieces)
    token_ids = TOKENIZER.encode_rendered(f"<|bos|>{TOKENIZER.protect(said, MARK)}<|end|>", MARK)
    assert token_ids == [BOS, *said.encode(), END]


def test_unprotected_text_of_a_template_is_tokenised_in_one_go() -> None:
    assert TOKENIZER.encode_rendered("<|bos|>hi", MARK) == TOKENIZER.encode("<|bos|>hi")


@pytest.mark.parametrize("mark", CUT_MARKS[:3])
def test_a_cut_mark_leaves_no_trace_in_the_tokens(mark: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode_rendered(TOKENIZER.protect("x<|end|>y", mark), mark)) == "x<|end|>y"


def test_a_byte_level_token_is_its_byte() -> None:
    assert [TOKENIZER.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert TOKENIZER.token_bytes(END) == b"<|end|>"


def test_an_id_without_a_token_has_no_bytes() -> None:
    assert TOKENIZER.token_bytes(100_000) == b""


def test_a_sentencepiece_token_has_its_space_and_a_fallback_token_its_byte() -> None:
    tokenizer = sentencepiece_tokenizer()
    assert tokenizer.token_bytes(1) == b" a"
    assert tokenizer.token_bytes(6 + 0xE4) == b"\xe4"


def test_the_space_before_the_first_generated_word_is_kept_where_a_prompt_precedes() -> None:
    tokenizer = sentencepiece_tokenizer()
    assert IncrementalDetokenizer(tokenizer).push(1) == "a"
    assert IncrementalDetokenizer(tokenizer, prompt=[2]).push(1) == " a"


def test_truncation_and_padding_of_a_tokenizer_file_do_not_count(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer.from_file(tmp_path / "tokenizer.json").encode("123456") == list(b"123456")
