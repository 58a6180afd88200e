"""Text to token ids and back, streamed text and stop strings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, DecodeStream, Fuse, Replace, Sequence, Strip
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace

from moeserve.frontend import text as text_module
from moeserve.frontend.text import CUT_MARKS, IncrementalDetokenizer, StopMatcher, TextTokenizer
from tests.support.tiny_model import BOS, END, SPECIALS, byte_tokenizer

MARK = CUT_MARKS[0]
TOKENIZER = TextTokenizer(byte_tokenizer())
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)
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


def detokenize(token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(TOKENIZER, prompt or ())
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


def cut_at_first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The plain definition: the stop string that ends first counts, of those ending together the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.text(max_size=30))
def test_pieces_join_to_the_whole_text(text: str) -> None:
    assert "".join(detokenize(list(text.encode()))) == text


@given(st.lists(st.one_of(st.integers(0, 255), st.sampled_from([BOS, END])), max_size=24))
def test_pieces_of_any_tokens_join_to_what_decoding_gives(token_ids: list[int]) -> None:
    assert "".join(detokenize(token_ids)) == TOKENIZER.decode(token_ids)


@given(st.text(min_size=1, max_size=12), st.integers(0, 12))
def test_a_prompt_before_does_not_change_byte_level_text(text: str, cut: int) -> None:
    data = text.encode()
    assert "".join(detokenize(list(b"ok"), list(data))) == "ok"
    if not TOKENIZER.decode(list(data[:cut])).endswith("\ufffd"):
        assert "".join(detokenize(list(data[cut:]), list(data[:cut]))) == data[cut:].decode("utf-8", "replace")


class Counted(TextTokenizer):
    """Counts the most tokens that one stream was given in a row without any text, and the most decoded at once."""

    most_steps = most_decoded = steps = 0

    def stream(self, context: Iterable[int], *, skip_special_tokens: bool = True) -> DecodeStream:
        self.steps = 0
        return super().stream(list(context), skip_special_tokens=skip_special_tokens)

    def step(self, stream: DecodeStream, token_id: int) -> str | None:
        text = super().step(stream, token_id)
        self.steps = 0 if text else self.steps + 1
        self.most_steps = max(self.most_steps, self.steps)
        return text

    def decode(self, token_ids: Collection[int], *, skip_special_tokens: bool = True) -> str:
        self.most_decoded = max(self.most_decoded, len(token_ids))
        return super().decode(list(token_ids), skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    "run",
    [[END], [0x80], [0xE2], [0xF0, 0x9F, 0x98], [0xC3, BOS], [299], [0xE2, 299]],
    ids=["special", "continuation", "lead", "three of four", "lead and special", "no token", "lead and no token"],
)
def test_tokens_without_a_whole_character_take_linear_time(run: list[int]) -> None:
    tokenizer = Counted(byte_tokenizer())
    token_ids = [*run * 1000, *"é!".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])
    assert tokenizer.most_steps <= 64
    assert tokenizer.most_decoded <= 128
    assert text == TOKENIZER.decode(token_ids)


@given(st.lists(st.one_of(st.binary(max_size=80), st.text(max_size=6).map(str.encode)), max_size=8))
def test_long_runs_of_broken_bytes_join_to_what_decoding_gives(parts: list[bytes]) -> None:
    token_ids = list(b"".join(parts))
    assert "".join(detokenize(token_ids)) == TOKENIZER.decode(token_ids)


def test_a_space_after_many_broken_bytes_of_a_sentencepiece_vocabulary_is_kept() -> None:
    tokenizer = sentencepiece_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    token_ids = [3, *[6 + 0x80] * 70, 1, 2]
    text = "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])
    assert text == tokenizer.decode(token_ids) == "a" + "\ufffd" * 70 + " a b"


def test_a_character_appears_with_its_last_token() -> None:
    assert detokenize(list("é!".encode())) == ["", "é", "!", ""]


def test_an_unfinished_character_shows_at_the_end() -> None:
    assert detokenize(list("aé".encode()[:-1])) == ["a", "", "\ufffd"]


@given(st.text("ab", max_size=24), STOPS, st.integers(1, 5))
def test_stop_strings_are_found_whatever_the_pieces_are(text: str, stops: list[str], size: int) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(text[start : start + size]) for start in range(0, len(text), size))
    expected, stop = cut_at_first_stop(text, stops)
    assert matcher.matched == stop
    if stop is None:
        shown += matcher.flush()
    assert shown == expected


@given(st.text("ab", max_size=24), STOPS)
def test_what_is_shown_early_is_never_part_of_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    final, _ = cut_at_first_stop(text, stops)
    for char in text:
        shown += matcher.push(char)
        assert final.startswith(shown)


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["Hello S", "TO", "P more"], ["Hello ", "", ""]),
        (["ST", "ST", "OP"], ["", "ST", ""]),
        (["S", "x"], ["", "Sx"]),
    ],
)
def test_the_beginning_of_a_stop_string_is_held_back(pieces: list[str], shown: list[str]) -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(piece) for piece in pieces] == shown


def test_nothing_is_held_back_without_stop_strings() -> None:
    assert StopMatcher([]).push("anything") == "anything"


def test_every_special_token_that_a_text_spells_out_is_cut() -> None:
    random = Random(1)
    pieces = ["<|end|>", "<|e", "nd|>", "<|user|>", "<", "|", "a", "<|bos|", ">"]
    texts = ["".join(random.choice(pieces) for _ in range(30)) for _ in range(50)]
    pattern = re.compile("|".join(map(re.escape, SPECIALS)))
    whole = [pattern.sub(lambda match: match[0][0] + "#" + match[0][1:], text) for text in texts]
    assert [TOKENIZER.protect(text, "#") for text in texts] == whole
    assert [TOKENIZER.spells_special(text) for text in texts] == ["#" in text for text in whole]


def test_every_one_of_very_many_tokens_is_cut() -> None:
    assert TOKENIZER.protect("<|end|>x" * 9000 + "<", "#") == "<#|end|>x" * 9000 + "<"


def test_the_tokens_of_a_long_text_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_COUNTED_AT_ONCE", 4)
    assert [TOKENIZER.has_more("a" * 10, most) for most in (9, 10, 11)] == [True, False, False]
