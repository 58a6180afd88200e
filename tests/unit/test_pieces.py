"""Token ids of remembered pieces equal the whole text's, whatever the tokenizer does around a cut."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, Unigram, WordPiece

from moeserve.frontend import text as text_module
from moeserve.frontend.text import CUT_MARKS, PieceMemory, TextTokenizer

MARK = CUT_MARKS[0]
CORPUS = [
    "the quick brown fox  jumps over the lazy dog\n",
    "def f(x):\n    return x + 1\n",
    "ééà 北京 12345 end start user",
] * 4
TURN, END = "<|turn|>", "<|end|>"
# Tokens that are longer than another, overlap one, take spaces beside them, or are searched in normalised text.
HARD = (
    AddedToken("<|turn|>x", normalized=False, special=True),
    AddedToken("|><|", normalized=False, special=True),
    AddedToken("<left>", normalized=False, special=True, lstrip=True),
    AddedToken("<right>", normalized=False, special=True, rstrip=True),
    AddedToken("Fox", normalized=True),
    AddedToken("    ", normalized=False),
)
FAMILIES = ("byte-level", "byte-level with a space", "metaspace first", "metaspace always", "prepend", "word pieces")


@cache
def tokenizer(family: str, *, hard: bool) -> TextTokenizer:
    """Return a small tokenizer of a family, trained on a few words."""
    match family:
        case "byte-level" | "byte-level with a space":
            made, trainer = Tokenizer(BPE()), trainers.BpeTrainer(vocab_size=400, show_progress=False)
            made.normalizer = normalizers.NFC()
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=family.endswith("space"))
        case "metaspace first" | "metaspace always":
            made = Tokenizer(Unigram())
            trainer = trainers.UnigramTrainer(
                vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
            )
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=family.rpartition(" ")[2])
        case "prepend":
            made, trainer = (
                Tokenizer(BPE(unk_token="<unk>")),
                trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False),
            )
            made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
            made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\u2581[^\u2581]*"), "isolated")
        case _:
            made = Tokenizer(WordPiece(unk_token="<unk>"))
            trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["<unk>"], show_progress=False)
            made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (TURN, END, "[INST]")])
    if hard:
        made.add_tokens(list(HARD))
    return TextTokenizer(made)


WORDS = (TURN, END, "[INST]", *(token.content for token in HARD), "the ", " quick", "fox", "Fox", "  ", " ", "\n")
TEXTS = st.lists(st.sampled_from((*WORDS, "<|", "|>", "turn", "x", "<", "é", "e\u0301", "北", "1", MARK)), max_size=40)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=60)
@given(conversations=st.lists(TEXTS, min_size=1, max_size=4))
def test_remembered_pieces_have_the_tokens_of_the_whole_text(
    family: str, hard: bool, conversations: list[list[str]]
) -> None:
    text_tokenizer = tokenizer(family, hard=hard)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(text_module, "_LEAST_CHARS", 3)
        memory = PieceMemory(text_tokenizer, text_tokenizer.borders, 20_000)
        text = ""
        for words in conversations:
            # A conversation goes on, as an agent's does.
            text += "".join(words)
            expected = text_tokenizer.encode_rendered(text, MARK)
            assert memory.encode(text, MARK, b"").tolist() == expected
            assert memory.encode(text, MARK, b"").tolist() == expected


def test_a_border_is_a_token_that_is_found_wherever_it_stands() -> None:
    assert tokenizer("byte-level", hard=False).borders == (END, TURN, "[INST]")
    # With the hard ones: another token is longer than `<|turn|>`, one overlaps both, one takes the space before it.
    assert tokenizer("byte-level", hard=True).borders == ("<right>", "[INST]")


def test_what_was_tokenised_before_is_not_tokenised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text_tokenizer = tokenizer("byte-level", hard=False)
    tokenised: list[str] = []
    encode = TextTokenizer.encode

    def noting(self: TextTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenised.append(text)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextTokenizer, "encode", noting)
    memory = PieceMemory(text_tokenizer, text_tokenizer.borders, 2**20)
    turns = [f"{TURN}{number} {'the quick fox ' * 30}" for number in range(20)]
    memory.encode("".join(turns[:19]), MARK, b"a")
    tokenised.clear()
    memory.encode("".join(turns), MARK, b"a")
    assert "".join(tokenised) == "".join(turns[18:]), "the last piece of before and the new ones"
    tokenised.clear()
    memory.encode("".join(turns), MARK, b"b")
    assert "".join(tokenised) == "".join(turns), "another key's text is not compared"


def test_memory_is_bounded_in_bytes_and_the_oldest_pieces_go_first() -> None:
    text_tokenizer = tokenizer("byte-level", hard=False)
    memory = PieceMemory(text_tokenizer, text_tokenizer.borders, 20_000)
    for number in range(50):
        memory.encode(f"{TURN}{number} {'a' * 300}" + f"{TURN}{'b' * 300}{TURN}", MARK, b"")
        assert 0 < memory.num_bytes <= 20_000
