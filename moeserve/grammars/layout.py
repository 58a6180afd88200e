"""Guess the white space and punctuation of an answer whose grammar leaves them open: as the answer has had them so far.

A grammar of JSON forces the names of properties, but not the spaces and brackets between them, so what it forces ends
after a token or two. With a guess at each such place one forced run follows the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer

# The different tokens behind one that are remembered.
_NUM_REMEMBERED = 4
_TEXT = -1


class Layout:
    """The tokens without a letter or digit that an answer has had, and the tokens that they followed."""

    __slots__ = ("_after", "_last", "_sizes", "_tokens")

    def __init__(self) -> None:
        self._tokens: LLTokenizer | None = None
        self._last: int | None = None
        # By such a token, or `_TEXT` for all others, the tokens that followed it, the latest first.
        self._after: dict[int, list[int]] = {}
        # By token, its bytes, 0 for one with a letter or digit.
        self._sizes: dict[int, int] = {}

    def read(self, output: Sequence[int], tokens: LLTokenizer) -> None:
        """Read the newest tokens of the answer. tokens: the model's tokens."""
        self._tokens = tokens
        for token in output:
            before, self._last = self._last, token
            if before is not None and self._size(token):
                known = self._after.setdefault(before if self._size(before) else _TEXT, [])
                known[:] = [token, *(other for other in known if other != token)][:_NUM_REMEMBERED]

    def guess(self, mask: bytes, last: int | None, *, is_end: bool) -> int | None:
        """Return the longest, or latest, token that a mask allows and that has followed such a token as the last one.

        last: of the drafts behind the answer, None without any. is_end: the grammar has forced it, so that text ends
        with it; behind other text nothing is guessed, since it may go on. Nor is in the middle of free text, where a
        mask allows more than one in eight tokens.
        """
        last = self._last if last is None else last
        if last is None or int.from_bytes(mask).bit_count() > len(mask):
            return None
        is_text = not self._size(last)
        if is_text and not is_end:
            return None
        known = [token for token in self._after.get(_TEXT if is_text else last, ()) if allows(mask, token)]
        return max(known, key=self._size, default=None)

    def _size(self, token: int) -> int:
        size = self._sizes.get(token)
        if size is None:
            assert self._tokens is not None
            text = self._tokens.decode_bytes([token])
            is_layout = text.isascii() and not any(character.isalnum() for character in text.decode("ascii"))
            size = self._sizes[token] = len(text) if is_layout else 0
        return size


def allows(mask: bytes, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)
