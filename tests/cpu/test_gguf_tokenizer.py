"""The tokenizers of GGUF files cut and merge as the tokenizers that they were made from."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

from moeserve.model.gguf.config import generation_config_of
from moeserve.model.gguf.header import GgufHeader, read_gguf
from moeserve.model.gguf.tokenizer import build_tokenizer, tokenizer_config_of
from moeserve.model.spec import ModelError

_LETTERS = list("abcdehlo ▁!é")


def pieces(seed: int = 0) -> tuple[list[str], list[float]]:
    """A vocabulary with scores in which every longer piece can be made of shorter ones."""
    draw = random.Random(seed)
    tokens = ["▁", *"abcdehlo!"]
    while len(tokens) < 90:
        token = draw.choice(tokens) + draw.choice(tokens)
        if token not in tokens and len(token) <= 6:
            tokens.append(token)
    return tokens, [-draw.random() * 10 for _ in tokens]


def merged_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """Merge the neighbours whose token has the best score, the leftmost of equals, until none is a token."""
    parts = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def metadata_of(tokens: list[str], scores: list[float]) -> dict[str, Any]:
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": first + tokens,
        "tokenizer.ggml.scores": [0.0] * len(first) + scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(tokens),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_sentencepiece_merges_by_score() -> None:
    draw = random.Random(1)
    for seed in range(5):
        tokens, scores = pieces(seed)
        tokenizer = build_tokenizer(metadata_of(tokens, scores))
        known = dict(zip(tokens, scores, strict=True))
        for _ in range(60):
            text = "".join(draw.choice("abcdehlo! ") for _ in range(draw.randrange(1, 30)))
            expected = merged_by_score("▁" + text.replace(" ", "▁"), known)
            assert tokenizer.encode(text, add_special_tokens=False).tokens == expected
            assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_characters_without_a_token_become_bytes_and_come_back() -> None:
    tokenizer = build_tokenizer(metadata_of(*pieces()))
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("é hello é").ids) == "é hello é"
    assert tokenizer.encode("a</s>b", add_special_tokens=False).ids[2] == 2


def byte_level(pre: str | None, **further: Any) -> Any:
    """A byte-level tokenizer without merges. pre: the file's name for how it cuts texts."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<s>", *letters],
        "tokenizer.ggml.token_type": [3] + [1] * len(letters),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
        **further,
    }
    return build_tokenizer(metadata)


@pytest.mark.parametrize(
    "text", ["It's 1234 o'clock\n\n  now", "x=3;\r\n\tif (a&&b)", "Ünïcode 東京 123", "  a  b हिन्दी "]
)
@pytest.mark.parametrize(("pre", "expression"), [("qwen2", QWEN2), ("qwen35", QWEN35)])
def test_qwens_texts_are_cut_as_by_its_own_tokenizer(pre: str, expression: str, text: str) -> None:
    own = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert byte_level(pre).pre_tokenizer.pre_tokenize_str(text) == own.pre_tokenize_str(text)


def test_decomposed_letters_are_composed_where_the_models_own_tokenizer_does_so() -> None:
    for pre, is_composed in (("qwen2", True), ("glm4", False)):
        apart, together = (byte_level(pre).encode(text, add_special_tokens=False).ids for text in ("e\u0301", "\xe9"))
        assert (apart == together) == is_composed


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("deepseek-llm", "don't  sum 42\n 東京で、Ünï+x ", "don|'|t| | sum| |4|2|\n| |東京で|、|Ü|n|ï|+|x| "),
        ("deepseek-coder", "a_b  =12", "a|_|b|  =|1|2"),
        ("kimi-k2", "HelloWorld 東京 12345/\nABc", "Hello|World| |東京| |123|45|/\n|ABc"),
        ("default", "it's 12345  x=<a>.b", "it|'|s| |123|45| | x|=<|a|>.|b"),
        ("minimax-m2", "HelloWorld 12345/\n's", "Hello|World| |123|45|/\n|'s"),
        ("lfm2", "it's 12345 now", "it|'s| |123|45| now"),
        ("tekken", "it's 12 HelloWorld", "it|'s| |1|2| Hello|World"),
        ("hunyuan", "it's 12 東京", "it|'s| |1|2| 東京"),
        ("afmoe", "in 1234567 and 東京 22", "in| |1|234|567| and| |東京| |22"),
    ],
)
def test_texts_are_cut_as_each_family_of_tokenizers_does(pre: str, text: str, words: str) -> None:
    spans = [span for _, span in byte_level(pre).pre_tokenizer.pre_tokenize_str(text)]
    assert [text[begin:end] for begin, end in spans] == words.split("|")


def test_gemmas_texts_are_merged_as_a_whole_with_bytes_for_characters_without_a_token() -> None:
    letters = [*"abcd▁\n", "ab", "▁a", "▁ab"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "<turn|>"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [6] * 256 + [1] * len(letters) + [3],
        "tokenizer.ggml.merges": ["a b", "▁ ab", "▁ a"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = build_tokenizer(metadata)
    text = "ab ab a\ncab é<turn|>"
    assert tokenizer.encode(text).tokens == [
        "<bos>",
        *["ab", "▁ab", "▁a", "\n", "c", "ab", "▁"],
        "<0xC3>",
        "<0xA9>",
        "<turn|>",
    ]
    assert tokenizer.decode(tokenizer.encode(text).ids) == "ab ab a\ncab é"
    assert generation_config_of(GgufHeader(metadata, {}, ())) == {"eos_token_id": [1, tokens.index("<turn|>")]}


def test_files_that_name_no_way_of_cutting_texts_have_that_of_their_architecture() -> None:
    text = "it's 1234"
    for architecture, pre in (("qwen2moe", "qwen2"), ("olmoe", "default")):
        unnamed = byte_level(None, **{"general.architecture": architecture})
        assert unnamed.pre_tokenizer.pre_tokenize_str(text) == byte_level(pre).pre_tokenizer.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "fields", "has_bos"),
    [
        ("deepseek-llm", {"tokenizer.ggml.add_bos_token": True}, True),
        ("qwen2", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_texts_begin_with_the_bos_token_where_the_file_or_its_family_says_so(
    pre: str, fields: dict[str, Any], has_bos: bool
) -> None:
    tokens = byte_level(pre, **fields).encode("hi").tokens
    assert tokens == ["<s>"] * has_bos + ["h", "i"]
    spm = build_tokenizer(metadata_of(*pieces()) | fields)
    assert (spm.encode("a").ids[0] == 1) == fields.get("tokenizer.ggml.add_bos_token", True)


def test_texts_end_with_the_eos_token_where_the_file_says_so() -> None:
    fields = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 1}
    assert byte_level("qwen2", **fields).encode("hi").tokens == ["h", "i", "!"]
    assert byte_level("llama-bpe", **fields).encode("hi").tokens == ["<s>", "h", "i", "!"]
    spm = build_tokenizer(metadata_of(*pieces()) | {"tokenizer.ggml.add_eos_token": True})
    plain = spm.encode("a", add_special_tokens=False).ids
    assert spm.encode("a").ids == [1, *plain, 2]


def test_sentencepieces_usual_tokens_are_those_of_a_file_that_names_none() -> None:
    named = metadata_of(*pieces())
    unnamed = {name: value for name, value in named.items() if not name.endswith("_token_id")}
    assert build_tokenizer(unnamed).encode("a").ids == build_tokenizer(named).encode("a").ids
    assert tokenizer_config_of(unnamed)["eos_token"] == "</s>"
    assert generation_config_of(GgufHeader(unnamed, {}, ())) == {"eos_token_id": [2]}


def test_the_text_of_the_unknown_token_is_that_token() -> None:
    assert build_tokenizer(metadata_of(*pieces())).encode("a<unk>b", add_special_tokens=False).ids.count(0) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("escape_whitespaces", False),
        ("normalizer.lowercase", True),
        ("precompiled_charsmap", [1, 2]),
        ("remove_extra_whitespaces", True),
        ("suppress_tokens", [7]),
    ],
)
def test_a_field_that_changes_tokens_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(ModelError, match=f" {name},"):
        build_tokenizer(metadata_of(*pieces()) | {f"tokenizer.ggml.{name}": value})


@pytest.mark.parametrize(
    ("eos", "tokens", "ends"),
    [
        (1, ["<|endoftext|>", "<|im_end|>", "<|im_start|>"], [1, 0]),
        (2, ["<|endoftext|>", "<|end|>", "<|return|>", "<|call|>"], [2, 0, 3]),
        (0, ["</s>", "<|end|>"], [0, 1]),
    ],
)
def test_answers_end_with_all_tokens_that_end_them_in_published_models(
    eos: int, tokens: list[str], ends: list[int]
) -> None:
    fields = {"tokens": [*tokens, "<|end|>"], "token_type": [3] * len(tokens) + [1], "eos_token_id": eos}
    header = GgufHeader({f"tokenizer.ggml.{name}": value for name, value in fields.items()}, {}, ())
    assert generation_config_of(header) == {"eos_token_id": ends}


def test_the_demos_own_file_gives_the_demos_tokens() -> None:
    from moeserve.model.demo import locate_gguf
    from moeserve.model.demo_build import GgufSource
    from moeserve.model.demo_build import build_tokenizer as build_demos

    path = locate_gguf()
    own, demos = build_tokenizer(read_gguf(path).metadata), build_demos(GgufSource(path).vocabulary)
    for text in ("Hello, world! 12345", "<|im_start|>user\nWhat's up?<|im_end|>", "def f(x):\n    return x**2 # é東"):
        assert own.encode(text).ids == demos.encode(text).ids
        assert own.decode(own.encode(text).ids) == demos.decode(own.encode(text).ids)
    assert "im_start" in tokenizer_config_of(read_gguf(path).metadata)["chat_template"]


def test_fields_that_do_not_fit_get_one_sentence() -> None:
    good = metadata_of(*pieces())
    for change in (
        {"tokenizer.ggml.scores": [0.0]},
        {"tokenizer.ggml.token_type": [1]},
        {"tokenizer.ggml.tokens": None},
    ):
        with pytest.raises(ModelError, match="GGUF file"):
            build_tokenizer({**good, **change})
