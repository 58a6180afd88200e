"""Grammars in Lark as one regular expression."""

from __future__ import annotations

import re

import pytest

from moeserve.grammars.regular import IrregularError, pattern_of


@pytest.mark.parametrize(
    ("lark", "matching", "others"),
    [
        ('start: "a.b" | "c"', ["a.b", "c"], ["axb", "", "a.bc"]),
        ('start: a+ ["z"]\n?a: "x" | "y" -> other', ["x", "xyxz"], ["z", "xzz"]),
        ('start: ("a" | "b")~2 "c"~0..1 "d"{2}', ["abdd", "bbcdd"], ["add", "abccdd"]),
        ('start: "0".."9" /[a-f]+/i "ok"i // a comment\n# and another', ["7ABOk"], ["xab", "7abk"]),
        ("start: A B\nA.2: /x|y/\nB: A", ["xy", "yy"], ["x", "y"]),
        (
            "start: NUMBER WS_INLINE W\n%import common (NUMBER, WS_INLINE)\n%import common.WORD -> W",
            ["1.5e3 a"],
            ["x a"],
        ),
        ('start: "\\"\\\\/" /\\/[^"]/s', ['"\\//\n'], ['"\\/"']),
    ],
)
def test_a_regular_grammar_is_one_expression(lark: str, matching: list[str], others: list[str]) -> None:
    pattern = re.compile(pattern_of(lark, 10_000))
    assert [text for text in matching if not pattern.fullmatch(text)] == []
    assert [text for text in others if pattern.fullmatch(text)] == []


@pytest.mark.parametrize(
    ("lark", "reason"),
    [
        ('a: "x"', "no definition of `start`"),
        ("start: missing", "no definition of `missing`"),
        ('start: "(" start ")" | "x"', "`start` names itself"),
        ('start: a "x"\na: b\nb: a?', "`a` names itself"),
        ('start: "x"\nstart: "y"', "defines `start` twice"),
        ('start: ("x"', "`(` is not closed"),
        ('start: ["x")', "`)` closes nothing"),
        ('start: "x"+?', "`?` repeats nothing"),
        ('start: "x"\n%ignore " "', "line 2: `%ignore`"),
        ("start: <|end|>", "line 1: `<|end|>`"),
        ("start: @answer", "line 1: `@answer`"),
        ("start: %json {}", "line 1: `%json`"),
        ('start: A & ~B\nA: "x"', "line 1: `&`"),
        ('start: "\\d"', "an escape that JSON lacks"),
        ("start: /x/x", "the flags of `/x/x`"),
        ("%import other.X\nstart: X", "`other.X` cannot be imported"),
        ('"x"', "outside of a definition"),
    ],
)
def test_a_grammar_that_is_not_regular_is_refused_with_the_reason(lark: str, reason: str) -> None:
    with pytest.raises(IrregularError, match=re.escape(reason)):
        pattern_of(lark, 10_000)


def test_the_expression_of_a_grammar_is_bounded_however_small_the_grammar() -> None:
    doubled = "\n".join(f"a{number}: a{number + 1} a{number + 1}" for number in range(40))
    with pytest.raises(IrregularError, match="over 10000 characters"):
        pattern_of(f'start: a0\n{doubled}\na40: "x"', 10_000)
    nested = "\n".join(f"a{number}: a{number + 1}" for number in range(5000))
    with pytest.raises(IrregularError, match="nest deeper than"):
        pattern_of(f'start: a0\n{nested}\na5000: "x"', 10_000)
