"""One regular expression for a grammar in Lark whose rules name each other without a circle.

A lexer that is greedy can miss texts of a grammar once they are escaped or stand before a closing tag. One expression
for the whole text misses none, and llguidance enforces it in JSON as well as in tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

_TOKEN = re.compile(
    r"""(?P<blank>\s+|(?://|\#)[^\n]*)
    | %import[ \t]+(?P<import>[\w.]+)(?:[ \t]*\((?P<several>[\w\s,]*)\))?(?:[ \t]*->[ \t]*(?P<alias>\w+))?
    | (?P<begin>[?!]*[A-Za-z_]\w*)(?:\.-?[0-9]+)?[ \t]*:
    | (?P<name>[A-Za-z_]\w*)
    | (?P<first>"(?:\\.|[^"\\\n])")\s*\.\.\s*(?P<last>"(?:\\.|[^"\\\n])")
    | (?P<text>"(?:\\.|[^"\\\n])*")(?P<folded>i?)
    | /(?P<pattern>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)
    | ~[ \t]*(?P<least>[0-9]+)(?:[ \t]*\.\.[ \t]*(?P<most>[0-9]+))?
    | (?P<repeat>[?*+]|\{[0-9]+(?:,[0-9]*)?\})
    | ->[ \t]*(?P<label>\w+)
    | (?P<sign>[|()\[\]])""",
    re.VERBOSE,
)
_FLAGS = frozenset("ims")
_CLOSING = {"(": ")", "[": ")?"}
_OPENING = {")": "(", "]": "["}
_MOST_LEVELS = 64  # of names within names

_FLOAT = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+"
# The terminals of Lark's own grammar `common`.
_COMMON: Mapping[str, str] = MappingProxyType(
    {
        "DIGIT": "[0-9]",
        "HEXDIGIT": "[a-fA-F0-9]",
        "INT": "[0-9]+",
        "SIGNED_INT": "[+-]?[0-9]+",
        "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
        "FLOAT": _FLOAT,
        "SIGNED_FLOAT": f"[+-]?(?:{_FLOAT})",
        "NUMBER": f"{_FLOAT}|[0-9]+",
        "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|[0-9]+)",
        "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
        "LCASE_LETTER": "[a-z]",
        "UCASE_LETTER": "[A-Z]",
        "LETTER": "[A-Za-z]",
        "WORD": "[A-Za-z]+",
        "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
        "WS_INLINE": r"[ \t]+",
        "WS": r"[ \t\f\r\n]+",
        "CR": r"\r",
        "LF": r"\n",
        "NEWLINE": r"(?:\r?\n)+",
    }
)


class IrregularError(Exception):
    """A grammar is malformed, or no regular expression of bounded length says the same."""


def pattern_of(lark: str, most_chars: int) -> str:
    """Return a regular expression that matches the same texts, whole, as a grammar. Raise IrregularError."""
    return _Grammar(lark, most_chars).pattern("start", 0)


class _Grammar:
    """The definitions of a grammar: by name, pieces of an expression, with names among them in a list of one."""

    def __init__(self, lark: str, most_chars: int) -> None:
        self._most_chars = most_chars
        self._pieces: dict[str, list[str | list[str]]] = {}
        self._patterns: dict[str, str] = {}
        self._unfinished: set[str] = set()
        self._read(lark)

    def pattern(self, name: str, level: int) -> str:
        """Return the expression of a definition with all names in it replaced."""
        if (known := self._patterns.get(name)) is not None:
            return known
        if name not in self._pieces:
            raise IrregularError(f"it has no definition of `{name[:60]}`")
        if name in self._unfinished:
            raise IrregularError(f"`{name[:60]}` names itself, and only regular grammars can be enforced")
        if level > _MOST_LEVELS:
            raise IrregularError(f"its definitions nest deeper than {_MOST_LEVELS} levels")
        self._unfinished.add(name)
        found, size = list[str](), 0
        for piece in self._pieces[name]:
            part = piece if isinstance(piece, str) else f"(?:{self.pattern(piece[0], level + 1)})"
            size += len(part)
            if size > self._most_chars:
                raise IrregularError(f"as one regular expression it has over {self._most_chars} characters")
            found.append(part)
        self._unfinished.remove(name)
        self._patterns[name] = "".join(found)
        return self._patterns[name]

    def _read(self, lark: str) -> None:
        pieces: list[str | list[str]] | None = None
        open_signs: list[str] = []
        may_repeat = False
        for token in _tokens(lark):
            kind = token.lastgroup or ""
            if kind in ("blank", "label"):
                continue
            if kind in ("import", "several", "alias"):
                self._import(token)
                continue
            if token["begin"]:
                _check_closed(open_signs)
                pieces, may_repeat = self._define(token["begin"].lstrip("?!"), []), False
                continue
            if pieces is None:
                raise IrregularError(f"`{token[0][:60]}` stands outside of a definition")
            if token["sign"]:
                pieces.append(_sign(token[0], open_signs))
                may_repeat = token[0] in _OPENING
                continue
            is_repeat = bool(token["repeat"] or token["least"])
            if is_repeat and not may_repeat:
                raise IrregularError(f"`{token[0][:60]}` repeats nothing")
            pieces.append(_expression(token))
            may_repeat = not is_repeat
        _check_closed(open_signs)

    def _define(self, name: str, pieces: list[str | list[str]]) -> list[str | list[str]]:
        if name in self._pieces:
            raise IrregularError(f"it defines `{name[:60]}` twice")
        self._pieces[name] = pieces
        return pieces

    def _import(self, token: re.Match[str]) -> None:
        library, _, name = token["import"].rpartition(".")
        if token["several"] is not None:
            library, names = token["import"], [one.strip() for one in token["several"].split(",")]
        else:
            names = [name]
        for one in names:
            if library != "common" or one not in _COMMON:
                raise IrregularError(f"`{library[:60]}.{one[:60]}` cannot be imported")
            self._define(token["alias"] or one, [_COMMON[one]])


def _tokens(lark: str) -> Iterator[re.Match[str]]:
    place = 0
    while place < len(lark):
        token = _TOKEN.match(lark, place)
        if token is None:
            word, line = lark[place : place + 60].split(None, 1)[0], lark.count("\n", 0, place) + 1
            raise IrregularError(f"line {line}: `{word}` is not part of the Lark that custom tools take")
        yield token
        place = token.end()


def _check_closed(open_signs: list[str]) -> None:
    if open_signs:
        raise IrregularError(f"a `{open_signs[-1]}` is not closed")


def _sign(sign: str, open_signs: list[str]) -> str:
    if sign == "|":
        return sign
    if sign not in _OPENING:
        open_signs.append(sign)
        return "(?:"
    if not open_signs or open_signs.pop() != _OPENING[sign]:
        raise IrregularError(f"a `{sign}` closes nothing")
    return _CLOSING[_OPENING[sign]]


def _expression(token: re.Match[str]) -> str | list[str]:
    """Return the piece for a name, a text, a range, a pattern or a repetition."""
    if token["name"]:
        return [token["name"]]
    if token["first"]:
        return f"[{_escaped(_text(token['first']))}-{_escaped(_text(token['last']))}]"
    if token["text"]:
        return f"(?{token['folded']}:{_escaped(_text(token['text']))})"
    if token["pattern"]:
        if not _FLAGS.issuperset(token["flags"]):
            raise IrregularError(f"the flags of `{token[0][:60]}` are not all of i, m and s")
        return f"(?{token['flags']}:{token['pattern']})"
    if token["least"]:
        return f"{{{token['least']},{token['most']}}}" if token["most"] else f"{{{token['least']}}}"
    return token["repeat"]


def _text(quoted: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        raise IrregularError(f"`{quoted[:60]}` has an escape that JSON lacks") from None


def _escaped(text: str) -> str:
    """Return a pattern for a text, without line breaks in it."""
    return "".join(re.escape(char) if char.isprintable() else f"\\x{{{ord(char):x}}}" for char in text)
