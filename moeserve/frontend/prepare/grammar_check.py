"""The check of a request's grammar with the model's tokens, before the request is admitted.

A schema that cannot be enforced is refused with the place of its fault. Only in tools without `strict` are the words at
fault left out: a client that lets the model choose among the tools of others did not write their schemas.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from moeserve.frontend.dialects.formats import (
    Constraint,
    ascii_classes,
    constrain,
    constraint_of,
    of_calls,
    of_prepared,
    unenforceable,
)
from moeserve.frontend.dialects.internal import InputForm, OutputFormat, Tool
from moeserve.frontend.errors import ApiError, invalid
from moeserve.frontend.parsers.rules import arguments_schema, spaced
from moeserve.frontend.prepare.text_messages import Relaxed, Stage, Watch
from moeserve.grammars.compiler import GrammarError, error_in
from moeserve.grammars.large_numbers import LargeNumberError
from moeserve.grammars.schemas import SchemaPath, find_error, without
from moeserve.grammars.tokens import load_tokens
from moeserve.plan import SamplingParams

_MOST_VERDICTS = 1024  # that are kept
_MOST_SCHEMAS = 64  # of tools that have lost words, and are kept
_MOST_WORDS = 32  # that one schema may lose; with more at fault nothing of it is enforced
# Seconds of processor time: to find the place of an error, for which parts of a schema are compiled again, and to find
# and leave out the faults of all tools of a request.
_SECONDS_TO_LOCATE = 0.5
_SECONDS_TO_RELAX = 2.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check. error: the reason why the grammar is refused, None if it is not. path: of the error in the
    schema. grammar: the text, if it is another than the constraint's."""

    error: str | None = None
    path: SchemaPath = ()
    grammar: str | None = None


class GrammarCheck:
    """Checks grammars with a model's tokens, which are loaded for the first one, and keeps verdicts."""

    def __init__(self, tokenizer_json: Path, watch: Watch, tokens: LLTokenizer | None = None) -> None:
        """tokens: of the model, if they are loaded already."""
        self._tokenizer_json = tokenizer_json
        self._watch = watch
        self._tokens = tokens
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._schemas: OrderedDict[bytes, Any] = OrderedDict()

    def load(self, eos_token_ids: Sequence[int]) -> LLTokenizer:
        """Return the model's tokens, loaded once. Raise GrammarError."""
        if self._tokens is None:
            self._tokens = load_tokens(self._tokenizer_json, list(eos_token_ids))
        return self._tokens

    def constrain(
        self, constraint: Constraint, sampling: SamplingParams, eos_token_ids: Sequence[int]
    ) -> SamplingParams:
        """Return the sampling parameters with the constraint's grammar. Raise ApiError (400) if it is not valid."""
        verdict = self._verdict(constraint, eos_token_ids)
        if verdict.error is not None:
            raise unenforceable(constraint.where, verdict.path, verdict.error)
        return constrain(sampling, verdict.grammar or constraint.grammar, eos_token_ids)

    def relax(
        self, tools: Sequence[Tool], calls_of: Callable[[Tool], str], eos_token_ids: Sequence[int]
    ) -> tuple[list[Tool], list[Relaxed]]:
        """Return tools with schemas that can be enforced, and those whose schemas have lost words in this call.

        calls_of: gives the grammar of a tool's calls. Raise ApiError (400) for a strict tool.
        """
        relaxed, news = list[Tool](), list[Relaxed]()
        deadline = time.process_time() + _SECONDS_TO_RELAX
        for tool in tools:
            key = _digest(f"{tool.strict}{json.dumps(tool.parameters)}{tool.input_form}")
            paths: tuple[str, ...] = ()
            if key in self._schemas:
                schema = self._schemas[key]
            else:
                schema, paths = self._without_faults(tool, calls_of, eos_token_ids, deadline)
                if paths and time.process_time() < deadline:
                    _keep(self._schemas, key, schema, _MOST_SCHEMAS)
            relaxed.append(replace(tool, parameters=schema))
            news += [Relaxed(tool.name, paths)] if paths else []
        return relaxed, news

    def _without_faults(
        self, tool: Tool, calls_of: Callable[[Tool], str], eos_token_ids: Sequence[int], deadline: float
    ) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """Return the schema of a tool without the words at fault, and their paths. Raise ApiError for a strict tool.

        deadline: of processor time; later nothing of a schema is enforced that is not strict.
        """
        if tool.input_form is not None:
            self._check_input(tool, tool.input_form, eos_token_ids)
        schema, paths = tool.parameters, list[str]()
        while time.process_time() < deadline and len(paths) < _MOST_WORDS:
            verdict = self._fault(replace(tool, parameters=schema), calls_of, eos_token_ids)
            if verdict.error is None:
                return schema, tuple(paths)
            fault = unenforceable("parameters", verdict.path, verdict.error)
            if tool.strict:
                message = f"The tool `{tool.name}` is strict, and its schema cannot be enforced. {fault.message}"
                raise invalid(message, "tools")
            schema = without(schema, verdict.path)
            paths.append(str(fault.param))
        return (tool.parameters, ()) if tool.strict else (None, ("parameters",))

    def _check_input(self, tool: Tool, form: InputForm, eos_token_ids: Sequence[int]) -> None:
        verdict = self._verdict(constraint_of(OutputFormat("regex", form.pattern, form.where)), eos_token_ids)
        if verdict.error is not None:
            fault = unenforceable(form.where, (), verdict.error)
            message = f"The custom tool `{tool.name}` has a form that cannot be enforced. {fault.message}"
            raise invalid(message, form.where)

    def _fault(self, tool: Tool, calls_of: Callable[[Tool], str], eos_token_ids: Sequence[int]) -> Verdict:
        """Return the verdict on a tool's calls, with the place of an error in its schema."""
        try:
            calls = self._verdict(of_calls(calls_of(tool), None), eos_token_ids)
        except ApiError as error:
            calls = Verdict(error.message)
        if calls.error is None:
            return calls
        try:
            schema = self._verdict(
                of_prepared(spaced(arguments_schema(tool), strict=tool.strict), "tools"), eos_token_ids
            )
        except LargeNumberError as error:
            return Verdict(str(error), error.path)
        return calls if schema.error is None else schema

    def _verdict(self, constraint: Constraint, eos_token_ids: Sequence[int]) -> Verdict:
        key = _digest(f"{constraint.grammar}\0{constraint.bnf or ''}")
        known = self._verdicts.get(key)
        if known is not None:
            self._verdicts.move_to_end(key)
            return known
        # Loading the model's tokens does not count as the request's time.
        self._watch.leave()
        try:
            tokens = self.load(eos_token_ids)
        except GrammarError as error:
            return Verdict(str(error))
        verdict = self._judge(tokens, constraint)
        _keep(self._verdicts, key, verdict, _MOST_VERDICTS)
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

        def fails_alike(part: Any) -> bool:
            if time.process_time() > deadline:
                raise TimeoutError
            return _error_in(tokens, part, constraint.schema) == error

        try:
            return Verdict(error, tuple(find_error(constraint.schema, fails_alike)))
        except TimeoutError:
            return Verdict(error)


def _error_in(tokens: LLTokenizer, part: Any, schema: Any) -> str | None:
    """Return the error of a part of a schema by itself."""
    if isinstance(part, dict):
        part = {**part, "x-guidance": schema.get("x-guidance", {})}
    try:
        return error_in(tokens, of_prepared(part, "").grammar)
    except LargeNumberError:
        return None


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _keep(kept: OrderedDict[bytes, _T], key: bytes, value: _T, most: int) -> None:
    kept[key] = value
    if len(kept) > most:
        kept.popitem(last=False)
