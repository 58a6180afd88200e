"""Compiles grammars of clients to see whether they are valid, in a text process: compiling cannot be interrupted."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from moeserve.frontend.dialects.formats import Constraint, ascii_classes, constrain, subschemas
from moeserve.frontend.http import ApiError, invalid
from moeserve.frontend.prepare.watch import Stage, Watch
from moeserve.grammars.compiler import GrammarError, compile_grammar, error_of, load_tokens
from moeserve.plan import SamplingParams

_KEPT_VERDICTS = 256
_LONGEST_MESSAGE = 300
_SECONDS_TO_LOCATE = 0.5  # of processor time; finding the place of an error compiles parts of the schema again


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check. error: the reason why the grammar is refused, None if it is not. path: of the error in the
    schema. grammar: the text, if it is another than the constraint's."""

    error: str | None = None
    path: tuple[str | int, ...] = ()
    grammar: str | None = None


class GrammarCheck:
    """Checks grammars with a model's tokens, which are loaded for the first one, and keeps verdicts."""

    def __init__(self, tokenizer_json: Path, watch: Watch, tokens: LLTokenizer | None = None) -> None:
        """tokens: of the model, if they are loaded already."""
        self._tokenizer_json = tokenizer_json
        self._watch = watch
        self._tokens = tokens
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    def load(self, eos_token_ids: Sequence[int]) -> LLTokenizer:
        """Return the model's tokens, loaded once. Raises GrammarError."""
        if self._tokens is None:
            self._tokens = load_tokens(self._tokenizer_json, list(eos_token_ids))
        return self._tokens

    def constrain(
        self, constraint: Constraint, sampling: SamplingParams, eos_token_ids: Sequence[int]
    ) -> SamplingParams:
        """Return the sampling parameters with the constraint's grammar. Raises ApiError (400) if it is not valid."""
        verdict = self._verdict(constraint, eos_token_ids)
        if verdict.error is not None:
            raise _refusal(constraint, verdict)
        return constrain(sampling, verdict.grammar or constraint.grammar, eos_token_ids)

    def _verdict(self, constraint: Constraint, eos_token_ids: Sequence[int]) -> Verdict:
        text = f"{constraint.grammar}\0{constraint.bnf or ''}"
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._verdicts.get(key)
        if known is not None:
            self._verdicts.move_to_end(key)
            return known
        # The tokens of a model are not the request's to pay for.
        self._watch.leave()
        try:
            tokens = self.load(eos_token_ids)
        except GrammarError as error:
            return Verdict(str(error))
        verdict = self._judge(tokens, constraint)
        self._verdicts[key] = verdict
        if len(self._verdicts) > _KEPT_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    def _judge(self, tokens: LLTokenizer, constraint: Constraint) -> Verdict:
        """Compile a grammar. The process ends if that takes more processor time than it may."""
        grammar = constraint.grammar
        self._watch.enter(Stage.GRAMMAR, field=constraint.where)
        if constraint.bnf is not None:
            try:
                grammar = constraint.with_lark(ascii_classes(any_to_lark(constraint.bnf)))
            except Exception as failure:  # The converter raises whatever its parser does.
                return Verdict(f"it is not valid GBNF: {failure}")
        error = error_in(tokens, grammar)
        if error is None:
            return Verdict(grammar=None if constraint.bnf is None else grammar)
        self._watch.enter(Stage.LOCATE, field=constraint.where)
        deadline = time.process_time() + _SECONDS_TO_LOCATE
        path = find_error(constraint.schema, lambda schema: _fails_alike(tokens, schema, error, deadline))
        return Verdict(error, tuple(path))


def _refusal(constraint: Constraint, verdict: Verdict) -> ApiError:
    param = constraint.where + "".join(
        f"[{step}]" if isinstance(step, int) else f".{step[:60]}" for step in verdict.path
    )
    reason = " ".join((verdict.error or "").split())[:_LONGEST_MESSAGE]
    return invalid(f"Invalid value for `{param}`: {reason}", param)


def error_in(tokens: LLTokenizer, grammar: str) -> str | None:
    """Return why a grammar cannot be enforced from its first token on, or None."""
    try:
        matcher = compile_grammar(tokens, grammar)
    except GrammarError as error:
        return str(error)
    first = matcher.compute_bitmask()
    if matcher.is_error():
        return error_of(matcher)
    return None if any(first) else "nothing can match it"


def _fails_alike(tokens: LLTokenizer, schema: Any, error: str, deadline: float) -> bool:
    """Return whether a schema fails with this error; False when the time is up."""
    if time.process_time() > deadline:
        return False
    grammar = msgspec.json.encode({"grammars": [{"json_schema": schema}]}).decode()
    return error_in(tokens, grammar) == error


def find_error(schema: Any, fails: Callable[[Any], bool]) -> list[str | int]:
    """Return the path of the smallest part of a schema that `fails` by itself, ending in the keyword at fault."""
    path: list[str | int] = []
    definitions = {}
    if isinstance(schema, dict):
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    while isinstance(schema, dict):
        inner = next((found for found in subschemas(schema) if fails(_with(definitions, found[1]))), None)
        if inner is None:
            return [*path, *_keyword_at_fault(schema, definitions, fails)]
        path += inner[0]
        schema = inner[1]
    return path


def _keyword_at_fault(
    schema: dict[str, Any], definitions: dict[str, Any], fails: Callable[[Any], bool]
) -> Iterator[str]:
    """Yield the first keyword without which the schema does not fail, if there is one."""
    for keyword in schema:
        rest = {other: value for other, value in schema.items() if other != keyword}
        if keyword not in definitions and not fails(_with(definitions, rest)):
            yield keyword
            return


def _with(definitions: dict[str, Any], schema: Any) -> Any:
    return {**definitions, **schema} if isinstance(schema, dict) else schema
