"""Guess the white space and punctuation of an answer whose grammar leaves them open: as the answer has had them so far.

A grammar of JSON forces the names of properties, but not the spaces and brackets between them, so what it forces ends
after a token or two. With a guess at each such place one forced run follows the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer

_NUM_REMEMBERED = 4


class Layout:
    """The tokens without a letter or digit that an answer has had, and what they followed."""

    __slots__ = ("_after", "_after_text", "_last", "_tokens")

    def __init__(self) -> None:
        self._tokens: LLTokenizer | None = None
        self._last: int | None = None
        # By such a token, another one that followed it the last time. Those that followed text, the latest first.
        self._after: dict[int, int] = {}
        self._after_text: list[int] = []

    def read(self, output: Sequence[int], tokens: LLTokenizer) -> None:
        """Read the newest tokens of the answer. tokens: those of the model."""
        self._tokens = tokens
        for token in output:
            before, self._last = self._last, token
            if before is None or not self._has(token):
                continue
            if self._has(before):
                self._after[before] = token
            else:
                self._after_text = [token, *(other for other in self._after_text if other != token)][:_NUM_REMEMBERED]

    def guess(self, mask: bytes, last: int | None, *, is_end: bool) -> int | None:
        """Return the token that may follow the last one as it did before, if a mask allows it.

        last: of the drafts behind the answer, None without any. is_end: the grammar has forced it, so that text ends
        with it; behind other text nothing is guessed, since it may go on. Nor is in the middle of free text, where a
        mask allows more than one in eight tokens.
        """
        last = self._last if last is None else last
        if last is None or int.from_bytes(mask).bit_count() > len(mask):
            return None
        if not self._has(last):
            return next((token for token in self._after_text if allows(mask, token)), None) if is_end else None
        follower = self._after.get(last)
        return follower if follower is not None and allows(mask, follower) else None

    def _has(self, token: int) -> bool:
        """Return True for a token without a letter or digit."""
        assert self._tokens is not None
        text = self._tokens.decode_bytes([token])
        return text.isascii() and not any(character.isalnum() for character in text.decode("ascii"))


def allows(mask: bytes, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)
