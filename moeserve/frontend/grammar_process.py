"""Compiles grammars of clients to see whether they are valid: `python -m MODULE TOKENIZER_JSON EOS_TOKEN_ID...`.

A process of its own, since compiling cannot be interrupted: one that takes too long ends the process by a signal, and
one that takes too much memory by the failed allocation. Jobs and verdicts are MessagePack objects.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from moeserve.frontend.constraints import subschemas
from moeserve.frontend.job_program import limit_cpu, serve_jobs
from moeserve.frontend.limits import GRAMMAR_CPU_SECONDS
from moeserve.grammar import GrammarError, compile_grammar, error_of, load_tokens

_MAX_MEMORY_BYTES = 4 * 2**30
# Finding the place of an error compiles parts of the schema again.
_CPU_SECONDS_TO_FIND = 0.5


class Job(msgspec.Struct):
    """A grammar to be checked. is_bnf: it is GBNF. schema: the JSON schema that it is, if it is one."""

    grammar: str
    is_bnf: bool = False
    schema: Any = None


class Verdict(msgspec.Struct):
    """The result of a check. error: the reason why the grammar is refused, None if it is not. path: of the error in the
    schema. grammar: the text, if it is another than the job's."""

    error: str | None = None
    path: list[str | int] = []
    grammar: str | None = None


def judge(tokens: LLTokenizer, job: Job) -> Verdict:
    """Compile a grammar. The process ends by SIGPROF if that takes more processor time than it may."""
    limit_cpu(GRAMMAR_CPU_SECONDS)
    grammar = job.grammar
    if job.is_bnf:
        try:
            grammar = LLMatcher.grammar_from_lark(any_to_lark(grammar))
        except Exception as failure:  # The converter raises whatever its parser does.
            return Verdict(f"it is not valid GBNF: {failure}")
    error = error_in(tokens, grammar)
    if error is None:
        return Verdict(grammar=grammar if job.is_bnf else None)
    limit_cpu(2 * _CPU_SECONDS_TO_FIND)
    deadline = time.process_time() + _CPU_SECONDS_TO_FIND
    return Verdict(error, find_error(job.schema, lambda schema: _fails_alike(tokens, schema, error, deadline)))


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


def main() -> None:
    """Serve until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokens: LLTokenizer | None = None
    failure = ""
    try:
        tokens = load_tokens(Path(sys.argv[1]), [int(token) for token in sys.argv[2:]])
    except GrammarError as error:
        failure = str(error)

    def answer(data: bytes) -> bytes:
        job = msgspec.msgpack.decode(data, type=Job)
        return msgspec.msgpack.encode(Verdict(failure) if tokens is None else judge(tokens, job))

    serve_jobs(answer)


if __name__ == "__main__":
    main()
