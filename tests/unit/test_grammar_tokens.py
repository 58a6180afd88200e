"""Text that a grammar forces is written as text, whatever special tokens and normalisations the tokenizer knows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from moeserve.frontend.dialects.formats import Constraint, constraint_of, of_calls
from moeserve.frontend.dialects.internal import OutputFormat, StructuralTags, Tag, Tool
from moeserve.frontend.errors import ApiError
from moeserve.frontend.parsers.call_grammars import call_grammar
from moeserve.frontend.text import byte_alphabet
from moeserve.grammars.compiler import compile_grammar
from moeserve.grammars.tokens import load_tokens

ENDS = "<|im_end|>"
SPECIALS = (ENDS, "<|im_start|>", "<b>", "[TOOL_CALLS]")
# Added tokens that are not special: the vocabularies of Qwen3 have the first two.
PLAIN = ("<think>", "<tool_call>", "foo")
ADDED = (*SPECIALS, *PLAIN)
MERGES = [("<", "b"), ("<b", ">"), ("i", "m"), ("e", "n"), ("en", "d"), ("f", "o"), ("fo", "o")]


def add_tokens(tokenizer: Tokenizer) -> Tokenizer:
    # `lstrip` would take the space before a token along.
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False, lstrip=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False, lstrip=True) for text in PLAIN])
    return tokenizer


def byte_level() -> Tokenizer:
    """Return a tokenizer as Qwen's: special tokens behind the vocabulary, and a normalizer that changes characters."""
    vocab = {**byte_alphabet(), **{left + right: 256 + number for number, (left, right) in enumerate(MERGES)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    return add_tokens(tokenizer)


def in_vocabulary() -> Tokenizer:
    """Return a tokenizer as SmolLM's and Gemma's: special tokens are in the vocabulary, one is made by merges."""
    tokens = [*ADDED[:-1], *byte_alphabet(), *dict.fromkeys(left + right for left, right in MERGES)]
    vocab = {text: number for number, text in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token=ADDED[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return add_tokens(tokenizer)


def byte_fallback() -> Tokenizer:
    """Return a tokenizer as Mixtral's, of SentencePiece."""
    letters = '\u2581abcdefghijklmnopqrstuvwxyz<>|/_[]{}":,AEILOSTC'
    tokens = [*ADDED[:-1], *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokens += [left + right for left, right in MERGES]
    vocab = {text: number for number, text in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES, byte_fallback=True, unk_token=ADDED[1]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return add_tokens(tokenizer)


class Model:
    """A model that likes special tokens best, and then the longest ones of the text that it wants to write."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        tokenizer.save(str(folder / "tokenizer.json"))
        self.ids = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self.eos = self.ids[ENDS]
        self.tokens = load_tokens(folder / "tokenizer.json", [self.eos])
        self.special_ids = {self.ids[text] for text in ADDED if text != "foo"}

    def write(self, constraint: Constraint, wanted: str) -> list[int]:
        """Return the tokens of an answer without EOS."""
        matcher = compile_grammar(self.tokens, constraint.grammar)
        written, left = list[int](), wanted.encode()
        while (allowed := self._allowed(matcher)) != [self.eos]:
            special = self.special_ids.intersection(allowed)
            fitting = [token for token in allowed if left.startswith(self.tokens.decode_bytes([token]))]
            token = min(special) if special else max(fitting, key=lambda one: len(self.tokens.decode_bytes([one])))
            left = left if special else left[len(self.tokens.decode_bytes([token])) :]
            assert matcher.consume_token(token)
            written.append(token)
        return written

    def _allowed(self, matcher: LLMatcher) -> list[int]:
        forced = matcher.compute_ff_tokens()
        allowed = [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]
        assert not matcher.is_error(), matcher.get_error()
        assert not forced or forced[0] in allowed
        return allowed

    def text(self, constraint: Constraint, wanted: str) -> str:
        """Return an answer whose tokens are all text."""
        written = self.write(constraint, wanted)
        assert self.special_ids.isdisjoint(written)
        return str(bytes(self.tokens.decode_bytes(written)).decode())


@pytest.fixture(scope="module", params=[byte_level, in_vocabulary, byte_fallback])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param(), tmp_path_factory.mktemp("model"))


def of_json(schema: Any) -> Constraint:
    return constraint_of(OutputFormat("json_schema", schema))


def in_object(schema: Any, **more: Any) -> Constraint:
    return of_json({"type": "object", "properties": {"k": schema}, "required": ["k"], **more})


def forced_call(schema: Any) -> Constraint:
    tool = Tool("f", parameters={"type": "object", "properties": {"k": schema}, "required": ["k"]})
    return of_calls(call_grammar("hermes", [tool], forced=True, parallel=False, ids={}), None)


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(character):04x}" for character in text)


def as_key(text: str) -> Constraint:
    return of_json({"type": "object", "properties": {text: {"const": 1}}, "required": [text]})


def split_over_lexemes(text: str) -> Constraint:
    return constraint_of(OutputFormat("grammar", "start: " + " ".join(json.dumps(character) for character in text)))


def in_tag(text: str) -> Constraint:
    tag = Tag(f"{text}(", f"{text}(", {"const": text}, f"){text}")
    return constraint_of(OutputFormat("structural_tag", StructuralTags((tag,), True, True)))


FORMS: dict[str, tuple[Callable[[str], Constraint], str]] = {
    "const": (lambda text: of_json({"const": text}), '"{}"'),
    "const in an object": (lambda text: in_object({"const": {"a": [text]}}), '{{"k":{{"a":["{}"]}}}}'),
    "enum": (lambda text: in_object({"enum": [f"a{text}b{text}"]}), '{{"k":"a{0}b{0}"}}'),
    "definition": (
        lambda text: in_object({"$ref": "#/$defs/d"}, **{"$defs": {"d": {"const": text}}}),
        '{{"k":"{}"}}',
    ),
    "key": (as_key, '{{"{}":1}}'),
    "required key": (
        lambda text: of_json({"type": "object", "required": [text], "additionalProperties": {"const": 1}}),
        '{{"{}":1}}',
    ),
    "pattern": (lambda text: in_object({"type": "string", "pattern": f"^{re.escape(text)}$"}), '{{"k":"{}"}}'),
    "escapes in a pattern": (lambda text: of_json({"type": "string", "pattern": f"^{escaped(text)}$"}), '"{}"'),
    "two words": (
        lambda text: of_json({"allOf": [{"enum": [text, "z"]}, {"type": "string", "minLength": 2}]}),
        '"{}"',
    ),
    "choice": (lambda text: constraint_of(OutputFormat("choice", [f"a{text} {text}"])), "a{0} {0}"),
    "choices": (lambda text: constraint_of(OutputFormat("choice", [f"{text}1", f"{text}2"])), "{}1"),
    "regex": (lambda text: constraint_of(OutputFormat("regex", f"a {re.escape(text)}b")), "a {}b"),
    "class of characters": (
        lambda text: constraint_of(OutputFormat("regex", "".join(f"[{re.escape(one)}]" for one in text))),
        "{}",
    ),
    "Lark": (lambda text: constraint_of(OutputFormat("grammar", f"start: {json.dumps(text)}")), "{}"),
    "Lark, by character": (split_over_lexemes, "{}"),
    "tag": (in_tag, '{0}("{0}"){0}'),
    "forced call": (
        lambda text: forced_call({"const": text}),
        '<tool_call>\n{{"name": "f", "arguments": {{"k": "{}"}}}}\n</tool_call>',
    ),
}


@pytest.mark.parametrize("text", ADDED)
@pytest.mark.parametrize("form", FORMS)
def test_an_added_token_in_a_constant_is_written_as_text(model: Model, form: str, text: str) -> None:
    constraint, expected = FORMS[form]
    assert model.text(constraint(text), expected.format(text)) == expected.format(text)


@pytest.mark.parametrize("text", ["cafe\u0301", "\u212b", " two  spaces ", "\u4f60\u597d \U0001f600", "a" * 300])
def test_forced_text_keeps_its_characters(model: Model, text: str) -> None:
    assert model.text(constraint_of(OutputFormat("choice", [text])), text) == text


def test_text_that_is_forced_token_by_token_is_what_the_tokenizer_makes_of_it(model: Model) -> None:
    matcher = compile_grammar(model.tokens, constraint_of(OutputFormat("choice", ["im<|im_end|>end "])).grammar)
    forced = matcher.compute_ff_tokens()
    assert [model.tokens.decode_bytes([token]) for token in forced][:5] == [b"im", b"<", b"|", b"im", b"_"]


def test_a_grammar_names_tokens_of_the_model_by_their_text_and_by_their_number(model: Model) -> None:
    number = model.ids["<|im_start|>"]
    lark = f'start: "<|im_start|>" <|im_start|> /<think>/ <[{number}]> # <none>'
    written = model.write(constraint_of(OutputFormat("grammar", lark), model.ids), "<|im_start|><think>")
    assert [token for token in written if token in model.special_ids] == [number, number]
    with pytest.raises(ApiError) as refused:
        constraint_of(OutputFormat("grammar", "start: <none>", "guided_grammar"), model.ids)
    assert (refused.value.param, "<none>" in refused.value.message) == ("guided_grammar", True)
