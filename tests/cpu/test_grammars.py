"""Answers with a grammar match it, whatever else a request asks and whatever happens to it."""

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from benchmarks.token_engine import Completion, TokenEngine
from moeserve.config import ServeConfig
from moeserve.frontend.constraints import constraint_of
from moeserve.frontend.dialects.internal import OutputFormat
from moeserve.model import grammars
from moeserve.model.grammars import Grammars
from moeserve.model.sampler import adjusted_logits
from moeserve.model.token_masks import TokenMasks, begin_masks
from moeserve.plan import GRAMMAR_FAILED, Chunk, ChunkExtras, FinishReason, SamplingParams
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_model import EOS, VOCAB_SIZE, write_model_dir

SCHEMAS: dict[str, Any] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}, "l": {"$ref": "#/$defs/leaf"}},
                "required": ["v"],
                "additionalProperties": False,
            },
            "leaf": {"anyOf": [{"type": "null"}, {"type": "integer", "multipleOf": 7, "maximum": 700, "minimum": 0}]},
        },
        "type": "array",
        "items": {"$ref": "#/$defs/node"},
        "minItems": 1,
        "maxItems": 3,
    },
    "union": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "x"}}, "required": ["k"], "additionalProperties": False},
            {"type": "string", "pattern": "^[0-9]{2}-[a-f]{2}$"},
        ]
    },
    "date": {"type": "string", "format": "date"},
}
PROMPT = [1, 2, 3]
WILD = SamplingParams(max_tokens=600, temperature=1.5, stop_token_ids=(EOS,))


def grammar_of(kind: Any, value: Any = None) -> str:
    return constraint_of(OutputFormat(kind, value)).grammar


def schema_grammar(name: str) -> str:
    return grammar_of("json_schema", SCHEMAS[name])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[TokenEngine]:
    llm = TokenEngine(checkpoint, ServeConfig(kv_cache_memory=64 << 20, max_model_len=2048))
    yield llm
    llm.close()


def text_of(completion: Completion) -> str:
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids[-1] == EOS
    return bytes(completion.token_ids[:-1]).decode()


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_validates(llm: TokenEngine, name: str) -> None:
    wild = [replace(WILD, seed=seed, grammar=schema_grammar(name)) for seed in range(12)]
    for completion in llm.generate([PROMPT] * len(wild), wild):
        answer = json.loads(text_of(completion))
        jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker()).validate(answer)


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", "[a-c]{2,5}/x", "[a-c]{2,5}/x"),
        ("choice", ["yes", "no", 'say "no"'], 'yes|no|say "no"'),
        ("grammar", 'start: "<" n ("," n)* ">"\nn: /[0-9]{1,2}/', r"<\d{1,2}(,\d{1,2})*>"),
    ],
)
def test_patterns_choices_and_grammars_hold(llm: TokenEngine, kind: Any, value: Any, pattern: str) -> None:
    wild = [replace(WILD, seed=seed, grammar=grammar_of(kind, value)) for seed in range(8)]
    for completion in llm.generate([PROMPT] * len(wild), wild):
        assert re.fullmatch(pattern, text_of(completion))


def test_what_else_a_request_asks_does_not_break_its_grammar(llm: TokenEngine) -> None:
    grammar = schema_grammar("person")
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 2.0},
        {"logit_bias": dict.fromkeys(range(97, 123), 90.0)},
        {"top_k": 1},
        {"top_p": 0.1, "min_p": 0.5},
        {"logprobs": 3},
        {"min_tokens": 500},
    ]
    for completion in llm.generate([PROMPT] * len(asked), [replace(WILD, grammar=grammar, **more) for more in asked]):
        jsonschema.validate(json.loads(text_of(completion)), SCHEMAS["person"])


def test_log_probabilities_are_those_of_the_model_for_every_token(llm: TokenEngine) -> None:
    (completion,) = llm.generate([PROMPT], replace(WILD, grammar=grammar_of("choice", ["yes"]), logprobs=2))
    assert text_of(completion) == "yes"
    assert len(completion.logprobs) == 4
    assert all(-20 < entry.logprob < 0 and len(entry.top) == 2 for entry in completion.logprobs)


def test_eos_waits_for_the_end_of_the_grammar_and_min_tokens_for_no_longer(llm: TokenEngine) -> None:
    eager = {"temperature": 0.0, "logit_bias": {EOS: 100.0}}
    short, long, forced = llm.generate(
        [PROMPT] * 3,
        [
            replace(WILD, grammar=grammar_of("regex", "a{3,20}"), **eager),
            replace(WILD, grammar=grammar_of("regex", "a{3,20}"), min_tokens=10, **eager),
            replace(WILD, grammar=grammar_of("regex", "a{3,20}"), min_tokens=50, **eager),
        ],
    )
    assert (text_of(short), text_of(long), text_of(forced)) == ("a" * 3, "a" * 10, "a" * 20)


def test_an_answer_that_is_cut_says_so(llm: TokenEngine) -> None:
    (cut,) = llm.generate([PROMPT], replace(WILD, grammar=schema_grammar("person"), max_tokens=5))
    assert cut.finish_reason is FinishReason.LENGTH
    assert bytes(cut.token_ids).startswith(b"{")


def mixed() -> list[SamplingParams]:
    names = [*SCHEMAS, None, "person"]
    return [
        replace(WILD, seed=seed, max_tokens=60, grammar=None if name is None else schema_grammar(name))
        for seed, name in enumerate(names)
    ]


def test_tokens_depend_neither_on_the_batch_nor_on_preemptions(checkpoint: Path, llm: TokenEngine) -> None:
    alone = [llm.generate([PROMPT], sampling)[0].token_ids for sampling in mixed()]
    together = llm.generate([PROMPT] * len(alone), mixed())
    assert [completion.token_ids for completion in together] == alone
    few_blocks = ServeConfig(kv_cache_memory=24 << 10, block_size=4, max_model_len=70, enable_prefix_caching=False)
    preempted = TokenEngine(checkpoint, few_blocks)
    crowded = preempted.generate([PROMPT] * len(alone), mixed())
    assert preempted.scheduler.counters.preemptions > 0
    assert [completion.token_ids for completion in crowded] == alone
    preempted.close()


def test_matchers_that_are_lost_are_made_again(llm: TokenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [completion.token_ids for completion in llm.generate([PROMPT] * len(mixed()), mixed())]
    real = Grammars._masks

    def forgetful(self: Grammars, constrained: Any) -> TokenMasks:
        self._held.clear()
        return real(self, constrained)

    monkeypatch.setattr(Grammars, "_masks", forgetful)
    assert [completion.token_ids for completion in llm.generate([PROMPT] * len(mixed()), mixed())] == kept


def test_a_grammar_that_cannot_be_enforced_ends_its_request_alone(llm: TokenEngine) -> None:
    with pytest.raises(RuntimeError, match=GRAMMAR_FAILED):
        llm.generate([PROMPT], replace(WILD, grammar="start: nothing"))
    ambiguous = 'start: e\ne: e e | e e e | /[a-z]/ | ""'
    with pytest.raises(RuntimeError, match="Current row has"):
        llm.generate([PROMPT], replace(WILD, grammar=ambiguous, min_tokens=300))
    assert text_of(llm.generate([PROMPT], replace(WILD, grammar=grammar_of("choice", ["yes"])))[0]) == "yes"


@pytest.fixture
def source(tmp_path: Path) -> Grammars:
    return Grammars(write_model_dir(tmp_path) / "tokenizer.json", VOCAB_SIZE + 70, [EOS])


def chunk(request_id: str, grammar: str | None, output: bytes = b"", banned: tuple[int, ...] = ()) -> Chunk:
    sampling = SamplingParams(8, grammar=grammar)
    extras = ChunkExtras(output=array("i", list(output)), banned_token_ids=banned)
    return Chunk(request_id, array("i", [1]), 0, array("i", [0]), sampling, extras)


def masks_of(source: Grammars, *chunks: Chunk) -> TokenMasks:
    begun = begin_masks(source, chunks)
    assert begun is not None
    return begun.result()


def allowed(masks: TokenMasks, place: int = 0) -> list[int]:
    bits = np.unpackbits(masks.allowed[place].numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def test_a_step_without_grammars_waits_for_nothing(source: Grammars) -> None:
    assert begin_masks(source, [chunk("a", None), Chunk("b", array("i", [1]), 0, array("i", [0]), None)]) is None


def test_rows_without_a_grammar_keep_their_bits_and_tokens_without_text_are_forbidden(source: Grammars) -> None:
    chunks = [chunk("free", None), chunk("bound", 'start: "ab"')]
    masks = masks_of(source, *chunks)
    assert list(masks.rows) == [1]
    logits = torch.randn(2, VOCAB_SIZE + 70)
    found = adjusted_logits(logits, chunks, masks)
    assert torch.equal(found[0], logits[0])
    assert torch.isfinite(found[1]).nonzero().flatten().tolist() == [ord("a")]
    assert found[1, ord("a")] == logits[1, ord("a")]


def test_bans_give_way_where_they_leave_nothing(source: Grammars) -> None:
    first, last = chunk("a", 'start: "a"+', b"a", (EOS,)), chunk("b", 'start: "a"', b"a", (EOS,))
    masks = masks_of(source, first, last)
    assert (allowed(masks, 0), allowed(masks, 1)) == ([ord("a")], [EOS])


def test_a_request_that_went_another_way_gets_the_mask_of_its_output(source: Grammars) -> None:
    grammar = 'start: "ab" "c" | "xyz"'
    assert allowed(masks_of(source, chunk("a", grammar, b"ab"))) == [ord("c")]
    assert allowed(masks_of(source, chunk("a", grammar, b"xy"))) == [ord("z")]
    assert allowed(masks_of(source, chunk("a", grammar, b""))) == [ord("a"), ord("x")]
    assert allowed(masks_of(source, chunk("a", 'start: "q"', b""))) == [ord("q")]
    assert "satisfy" in masks_of(source, chunk("a", grammar, b"q")).errors[0]


def test_requests_that_share_a_grammar_do_not_use_its_limit_up_for_each_other(tmp_path: Path) -> None:
    source = Grammars(write_model_dir(tmp_path) / "tokenizer.json", VOCAB_SIZE, [EOS])
    grammar = grammar_of("regex", "(a|b)*a(a|b){14}")
    draw = np.random.default_rng(0)
    while not source._held or all(held.shared for held in source._held.values()):
        output = bytes(draw.choice(list(b"ab"), 3000).tolist())
        assert not masks_of(source, chunk(f"r{draw.integers(1 << 30)}", grammar, output)).errors


def test_a_rank_without_grammars_fails_the_request_and_not_the_step() -> None:
    begun = begin_masks(None, [chunk("a", None), chunk("b", "start: x")])
    assert begun is not None
    masks = begun.result()
    assert masks.errors[1].startswith(GRAMMAR_FAILED)
    logits = torch.randn(2, VOCAB_SIZE)
    assert torch.equal(adjusted_logits(logits, [chunk("a", None), chunk("b", "start: x")], masks), logits)


def test_a_model_without_a_tokenizer_fails_such_requests_alone(tmp_path: Path) -> None:
    masks = masks_of(Grammars(tmp_path / "tokenizer.json", VOCAB_SIZE, [EOS]), chunk("a", 'start: "x"'))
    assert "tokenizer.json" in masks.errors[0]


def test_few_matchers_are_kept(source: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_KEPT_MATCHERS", 2)
    for name in "abcdef":
        masks_of(source, chunk(name, 'start: "x"'))
    assert len(source._held) == 2
    many = [chunk(name, 'start: "x"') for name in "abcdef"]
    masks_of(source, *many)
    assert len(source._held) == 6
