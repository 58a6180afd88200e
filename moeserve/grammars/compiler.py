"""Compiling grammars by llguidance under limits, for frontend and ranks.

The limits count work, not time, so that a grammar fails at the same token on every machine.
"""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Limits for one grammar: ambiguity, work of one mask, and memory (a state of the lexer takes 1 to 2 kB).
_MAX_ITEMS_IN_ROW = 1000
_MAX_ITEMS_PER_STEP = 10_000
_MAX_LEXER_STATES = 20_000
_MAX_SYMBOLS = 200_000

# Of an error's text: lines of the grammar's source, marks under them, the definition that was compiled, compiled
# patterns and the list of special tokens.
_OF_THE_GRAMMAR = re.compile(
    r"^ *\d+ \|.*\n?|^ *\^+ *\n?|^  while processing .*|(?<=Regex is empty):.*|; following special tokens are .*",
    re.MULTILINE,
)
_AT_SCHEMA = re.compile(r"(at \d+\(\d+\): )?failed to compile JSON schema: ")


class GrammarError(Exception):
    """A grammar is invalid, exceeds the limits, or cannot be enforced with the model's tokens."""


def compile_grammar(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher before its first token. Raise GrammarError.

    Copies of a matcher share their lexer, and `_MAX_LEXER_STATES` holds for all copies together.
    """
    limits = LLParserLimits(
        max_items_in_row=_MAX_ITEMS_IN_ROW,
        step_max_items=_MAX_ITEMS_PER_STEP,
        max_lexer_states=_MAX_LEXER_STATES,
        max_grammar_size=_MAX_SYMBOLS,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(error_of(matcher))
    return matcher


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


def error_of(matcher: LLMatcher) -> str:
    """Return the error of a failed matcher without the parts that show the grammar or names in it."""
    text = _OF_THE_GRAMMAR.sub("", matcher.get_error().removesuffix("<non-verbose/>"))
    return _AT_SCHEMA.sub("", text).strip()
