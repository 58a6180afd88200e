"""Tokens to text piece by piece: the incremental detokenizer and the search for stop strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.frontend.text import IncrementalDetokenizer, StopMatcher, TextTokenizer
from tests.support.tiny_model import BOS, END, byte_tokenizer

TOKENIZER = TextTokenizer(byte_tokenizer())
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


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
