"""Answers with a grammar match it, whatever else a request asks and whatever happens to it."""

import json
import re
import threading
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from benchmarks.token_engine import Completion, TokenEngine
from moeserve.config import ServeConfig
from moeserve.frontend.dialects.formats import ascii_classes, constraint_of
from moeserve.frontend.dialects.internal import OutputFormat, StructuralTags, Tag
from moeserve.grammars import masks as grammar_masks
from moeserve.grammars import threads as grammar_threads
from moeserve.grammars.compiler import compile_grammar
from moeserve.grammars.made_masks import MadeMask
from moeserve.grammars.masks import GrammarMasks
from moeserve.grammars.tokens import load_tokens
from moeserve.model.sampler import adjusted_logits, masks_of
from moeserve.plan import GRAMMAR_FAILED, Asked, Chunk, ChunkExtras, FinishReason, Request, SamplingParams, Terms
from moeserve.thoughts import Marker, ThoughtBudget, ThoughtForm
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


def test_a_grammar_that_cannot_be_enforced_ends_its_request_alone(llm: TokenEngine) -> None:
    with pytest.raises(RuntimeError, match=GRAMMAR_FAILED):
        llm.generate([PROMPT], replace(WILD, grammar="start: nothing"))
    ambiguous = 'start: e\ne: e e | e e e | /[a-z]/ | ""'
    with pytest.raises(RuntimeError, match="Current row has"):
        llm.generate([PROMPT], replace(WILD, grammar=ambiguous, min_tokens=300))
    assert text_of(llm.generate([PROMPT], replace(WILD, grammar=grammar_of("choice", ["yes"])))[0]) == "yes"


TAGS = StructuralTags(
    (
        Tag("<f=", "<f=a>", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, "</f>"),
        Tag("<f=", "<f=b>", {"type": "boolean"}, "</f>"),
    )
)
MANY, ONE = '<f=a>{"n": 1}</f>', "<f=b>true</f>"


@pytest.mark.parametrize(
    ("kind", "value", "accepted", "refused"),
    [
        ("regex", r"\d{4}-\d{2}-\d{2}", ["2026-11-23"], ["\U0001fbf8026-11-23", "202-11-23"]),
        ("regex", r"\w+\s[^\W]", ["ab_1 c"], ["\u00e9 c", "a\u00a0b", "a -"]),
        ("grammar", "start: N /[\\w\\/]+/\nN: /\\d/", ["1a/"], ["\u0661a", "1\u00e9"]),
        ("grammar", 'root ::= "\\\\d" [0-9]', ["\\d7"], ["17"]),
        ("structural_tag", TAGS, ["", "hello", f"a {MANY} b {ONE}{MANY}"], ["<f=c>", '<f=a>{"n": true}</f>']),
        ("structural_tag", replace(TAGS, at_least_one=True), [ONE, f"a {ONE} b"], ["", "hello"]),
        ("structural_tag", replace(TAGS, stop_after_first=True), ["hello", f"a {ONE}"], [f"a {ONE} b"]),
        ("structural_tag", replace(TAGS, at_least_one=True, stop_after_first=True), [ONE], ["a", f"{ONE}{ONE}"]),
    ],
)
def test_a_form_accepts_texts_of_its_kind_and_no_others(
    tmp_path: Path, kind: Any, value: Any, accepted: list[str], refused: list[str]
) -> None:
    tokens = load_tokens(write_model_dir(tmp_path) / "tokenizer.json", [EOS])
    constraint = constraint_of(OutputFormat(kind, value))
    grammar = constraint.grammar
    if constraint.bnf is not None:
        grammar = constraint.with_lark(ascii_classes(any_to_lark(constraint.bnf)))

    def accepts(text: str) -> bool:
        matcher = compile_grammar(tokens, grammar)
        return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()

    assert [text for text in accepted if not accepts(text)] == []
    assert [text for text in refused if accepts(text)] == []


@pytest.fixture
def source(tmp_path: Path) -> Iterator[GrammarMasks]:
    source = GrammarMasks(write_model_dir(tmp_path) / "tokenizer.json", VOCAB_SIZE + 70, [EOS], num_cores=4)
    yield source
    source.close()


def request_of(
    name: str, grammar: str, output: bytes = b"", budget: ThoughtBudget | None = None, **sampling: Any
) -> Request:
    own = SamplingParams(10_000, grammar=grammar, stop_token_ids=(EOS,), **sampling)
    return Request(name, array("i", PROMPT), own, asked=Asked(thought=budget), earlier_output=array("i", list(output)))


def made_of(source: GrammarMasks, *requests: Request, drafts: bytes = b"") -> dict[str, MadeMask]:
    """The next masks of requests, by their names, when all are made. drafts: of each request."""
    source.update(requests, lambda _: array("i", list(drafts)))
    made: dict[str, MadeMask] = {}
    while source.is_awaited:
        source.wait(1.0)
        made |= {one.request.request_id: one for one in source.take()}
    return made


def allowed(made: MadeMask) -> list[int]:
    assert made.error is None
    bits = np.unpackbits(np.frombuffer(made.mask, np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def go_on(request: Request, text: bytes) -> Request:
    request.token_ids.extend(text)
    return request


def end(source: GrammarMasks, *requests: Request) -> None:
    for request in requests:
        request.finished = True
    source.update(requests)


def chunk(mask: bytes | None) -> Chunk:
    return Chunk("a", array("i", [1]), 0, array("i", [0]), SamplingParams(8), ChunkExtras(mask=mask))


def test_a_step_without_grammars_has_no_masks() -> None:
    assert masks_of([chunk(None), Chunk("b", array("i", [1]), 0, array("i", [0]), SamplingParams(8))]) is None


def test_rows_without_a_grammar_keep_their_bits_and_tokens_without_text_are_forbidden(source: GrammarMasks) -> None:
    made = made_of(source, request_of("a", 'start: "ab"'))["a"]
    logits = torch.randn(2, VOCAB_SIZE + 70)
    found = adjusted_logits(logits, [chunk(None), chunk(made.mask)])
    assert torch.equal(found[0], logits[0])
    assert torch.isfinite(found[1]).nonzero().flatten().tolist() == [ord("a")]
    assert found[1, ord("a")] == logits[1, ord("a")]


def test_bans_give_way_where_they_leave_nothing(source: GrammarMasks) -> None:
    first = request_of("a", 'start: "a"+', b"a", min_tokens=3)
    last = request_of("b", 'start: "a"', b"a", min_tokens=3)
    made = made_of(source, first, last)
    assert (allowed(made["a"]), allowed(made["b"])) == ([ord("a")], [EOS])
    assert allowed(made_of(source, go_on(first, b"aa"))["a"]) == [ord("a"), EOS]


def test_masks_follow_the_output_and_failures_end_their_request_alone(source: GrammarMasks) -> None:
    grammar = 'start: "ab" "c" | "xyz"'
    one, two, wrong = request_of("1", grammar), request_of("2", grammar, b"xy"), request_of("3", grammar, b"q")
    made = made_of(source, one, two, wrong)
    assert (allowed(made["1"]), allowed(made["2"])) == ([ord("a"), ord("x")], [ord("z")])
    assert made["3"].error is not None
    assert "satisfy" in made["3"].error
    assert allowed(made_of(source, go_on(one, b"ab"))["1"]) == [ord("c")]


def test_tokens_that_a_grammar_forces_follow_the_drafts_that_it_allows(tmp_path: Path) -> None:
    tokenizer = write_model_dir(tmp_path) / "tokenizer.json"
    for most, drafts, expected, num_forced in [
        (0, b"", b"", 0),
        (0, b"xyzq", b"xyz", 0),
        (4, b"", b"", 0),
        (4, b"a", b"abc", 2),
        (2, b"a", b"ab", 1),
        (4, b"xq", b"xyz", 2),
        (9, b"q", b"", 0),
    ]:
        source = GrammarMasks(tokenizer, VOCAB_SIZE, [EOS], num_cores=2, most_drafts=most)
        request = request_of("1", 'start: "ab" "c" ("d" | "e") | "xyz" ("1" | "2")')
        made = made_of(source, request, drafts=drafts)["1"]
        assert (bytes(made.draft_tokens.tolist()), made.num_forced) == (expected, num_forced)
        after = [allowed(MadeMask(request, mask)) for mask in made.draft_masks]
        # Each mask allows the draft behind it.
        assert all(draft in mask for draft, mask in zip(made.draft_tokens[1:], after, strict=False))
        assert len(after) == len(made.draft_tokens)
        source.close()


def test_forced_text_that_spells_a_special_token_is_drafted_as_text(tmp_path: Path) -> None:
    text = "<|end|><|user|>b"
    source = GrammarMasks(write_model_dir(tmp_path) / "tokenizer.json", VOCAB_SIZE, [EOS], num_cores=2, most_drafts=40)
    made = made_of(source, request_of("1", grammar_of("choice", [f"a{text}"]), b"a"))["1"]
    assert bytes(made.draft_tokens.tolist()) == text.encode()
    assert (made.num_forced, allowed(made)) == (len(text), [ord("<")])
    source.close()


@pytest.mark.parametrize(
    ("output", "expected", "counts"),
    [
        (b"a", b"", (0, 0)),
        (b"a ", b"b c", (1, 2)),
        (b"a\n", b"b\nc", (1, 2)),
        (b"a b\n", b"c", (1, 0)),
        (b"ab", b"", (0, 0)),
        # Free text is not guessed.
        (b"a b c3 ", b"", (0, 0)),
    ],
)
def test_open_spaces_are_guessed_as_the_answer_has_had_them(
    tmp_path: Path, output: bytes, expected: bytes, counts: tuple[int, int]
) -> None:
    tokenizer = write_model_dir(tmp_path) / "tokenizer.json"
    source = GrammarMasks(tokenizer, VOCAB_SIZE, [EOS], num_cores=2, most_drafts=4)
    grammar = 'start: "a" WS? "b" WS? "c" ("1" | "2" | "3" /(?s:.*)/)\nWS: /[ \\n]/'
    made = made_of(source, request_of("1", grammar, output))["1"]
    assert (bytes(made.draft_tokens.tolist()), (made.num_forced, made.num_laid)) == (expected, counts)
    assert len(made.draft_masks) == len(expected)
    source.close()


def test_the_forced_end_of_a_thought_may_cut_a_character(source: GrammarMasks) -> None:
    grammar, euro = 'start: before "yes"\nbefore[suffix="!"]: /(?s:.*)/', "\U0001f642".encode()
    form = ThoughtForm(Marker(1), (Marker(1),))
    for cut in (1, 2, 3):
        # As it comes token by token, and as another engine gets it.
        one = request_of("one", grammar, budget=ThoughtBudget(form, 3, (ord("!"),)))
        whole = request_of("whole", grammar, b"a" + euro[:cut] + b"!y", budget=ThoughtBudget(form, 3, (ord("!"),)))
        made_of(source, one)
        made_of(source, go_on(one, b"a" + euro[:cut]))
        assert allowed(made_of(source, go_on(one, b"!y"))["one"]) == [ord("e")]
        assert allowed(made_of(source, whole)["whole"]) == [ord("e")]
        end(source, one, whole)


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that are compiled from now on."""
    compiled = list[str]()

    def note(tokens: LLTokenizer, grammar: str) -> LLMatcher:
        compiled.append(grammar)
        return compile_grammar(tokens, grammar)

    monkeypatch.setattr(grammar_masks, "compile_grammar", note)
    return compiled


def test_requests_that_share_a_grammar_do_not_use_its_limit_up_for_each_other(
    source: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, compiled = grammar_of("regex", "(a|b)*a(a|b){14}"), compilations(monkeypatch)
    draw = np.random.default_rng(0)
    for number in range(100):
        output = bytes(draw.choice(list(b"ab"), 3000).tolist())
        request = request_of(f"{number}", grammar, output)
        assert made_of(source, request)[f"{number}"].error is None
        end(source, request)
        if len(compiled) == 2:  # its lexer is full, and the request has another one
            break
    else:
        pytest.fail("the lexer never became full")
    source.check_idle()
    # Neither lexer serves the next request.
    made_of(source, request_of("next", grammar))
    assert len(compiled) == 3


def test_a_model_without_a_tokenizer_fails_such_requests_alone(tmp_path: Path) -> None:
    source = GrammarMasks(tmp_path / "tokenizer.json", VOCAB_SIZE, [EOS])
    assert "tokenizer.json" in str(made_of(source, request_of("a", 'start: "x"'))["a"].error)
    source.close()


def test_a_grammar_is_compiled_once_and_kept_after_its_requests(
    source: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    monkeypatch.setattr(grammar_masks, "compile_grammar", lambda *of: compiled.append(of[1]) or compile_grammar(*of))
    requests = [request_of(name, 'start: "x"') for name in "abc"]
    assert len(made_of(source, *requests)) == 3
    end(source, *requests)
    assert allowed(made_of(source, request_of("d", 'start: "x"'))["d"]) == [ord("x")]
    assert compiled == ['start: "x"']


class Gate:
    """A compiler that waits for the test to let it go on, once for each grammar."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: SimpleQueue[str] = SimpleQueue()
        self._passes = threading.Semaphore(0)
        monkeypatch.setattr(grammar_masks, "compile_grammar", self._compile)

    def _compile(self, tokens: LLTokenizer, grammar: str) -> LLMatcher:
        self.begun.put(grammar)
        self._passes.acquire()
        return compile_grammar(tokens, grammar)

    def open(self, count: int = 1) -> None:
        self._passes.release(count)


def test_a_compilation_holds_up_neither_the_engine_nor_requests_with_other_grammars(
    source: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = request_of("known", 'start: "k"+')
    made_of(source, known)
    gate = Gate(monkeypatch)
    source.update([request_of("new", 'start: "n"')])
    assert gate.begun.get(timeout=60) == 'start: "n"'
    for _ in range(3):
        source.update([go_on(known, b"k")])
        made: list[MadeMask] = []
        while not made:
            source.wait(1.0)
            made = source.take()
        assert [one.request for one in made] == [known]
    gate.open()
    assert made_of(source).keys() == {"new"}


def test_one_keys_grammars_do_not_delay_another_keys_one(source: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    flood = [request_of(f"{number}", f'start: "f{number}"') for number in range(64)]
    other = request_of("other", 'start: "o"')
    for request in flood:
        request.terms = Terms("flood")
    other.terms = Terms("other")
    source.update([*flood, other])
    gate.open(65)
    made_of(source)
    order = [gate.begun.get(timeout=60) for _ in range(65)]
    assert order.index('start: "o"') <= 1


def test_an_abort_while_compiling_frees_everything(source: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    begun, waiting = request_of("begun", 'start: "b"'), request_of("waiting", 'start: "w"')
    source.update([begun, waiting])
    gate.begun.get(timeout=60)
    end(source, begun, waiting)
    assert not source.is_awaited
    gate.open()
    source.wait(60.0)
    assert source.take() == []
    assert gate.begun.empty()
    source.check_idle()
    # A result that came too late serves the next request.
    assert allowed(made_of(source, request_of("again", 'start: "b"'))["again"]) == [ord("b")]


def test_no_thread_is_left_in_the_library_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = GrammarMasks(write_model_dir(tmp_path) / "tokenizer.json", VOCAB_SIZE, [EOS], num_cores=8)
    gate = Gate(monkeypatch)
    before = set(threading.enumerate())
    source.update([request_of(f"{number}", f'start: "{number}"') for number in range(4)])
    for _ in range(2):
        gate.begun.get(timeout=60)
    gate.open(4)
    source.close()
    assert set(threading.enumerate()) <= before


def test_a_compilation_without_end_fails_its_requests_alone(
    source: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def spin(tokens: LLTokenizer, grammar: str) -> LLMatcher:
        while "endless" in grammar and not released.is_set():
            pass
        return compile_grammar(tokens, grammar)

    monkeypatch.setattr(grammar_masks, "compile_grammar", spin)
    monkeypatch.setattr(grammar_threads, "_MAX_CPU_SECONDS", 0.2)
    endless = [request_of(name, 'start: "endless"') for name in ("one", "two")]
    good = request_of("good", 'start: "g"')
    made = made_of(source, *endless, good)
    released.set()
    assert allowed(made["good"]) == [ord("g")]
    for name in ("one", "two"):
        assert made[name].error == f"{GRAMMAR_FAILED}it takes too long to compile"
    end(source, good)
    source.check_idle()


def test_compiled_grammars_are_kept_by_bytes_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_masks, "_BYTES_PER_MASK_SECOND", 0.0)
    num_bytes = grammar_masks._GRAMMAR_BYTES + 10 * grammar_masks._BYTES_PER_TEXT_BYTE
    path = write_model_dir(tmp_path) / "tokenizer.json"
    source, compiled = GrammarMasks(path, VOCAB_SIZE, [EOS], max_bytes=3 * num_bytes), compilations(monkeypatch)

    def ask(letter: str) -> Request:
        request = request_of(letter, f'start: "{letter}"')
        made_of(source, request)
        return request

    ask("u")
    for letter in "abcdef":
        end(source, ask(letter))
    assert len(compiled) == 7
    for letter in "uef":
        end(source, ask(letter))
    assert len(compiled) == 7
    ask("d")
    assert len(compiled) == 8
    source.close()
