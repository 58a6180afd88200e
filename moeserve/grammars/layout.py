"""Guess the white space and punctuation of an answer whose grammar leaves them open: as the answer has had them so far.

A grammar of JSON forces the names of properties, but not the spaces and brackets between them, so what it forces ends
after a token or two. With a guess at each such place one forced run follows the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer

_NUM_REMEMBERED = 12


class Layout:
    """The different tokens without a letter or digit that an answer has had, the latest first."""

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest: list[int] = []

    def read(self, output: Sequence[int], tokens: LLTokenizer) -> None:
        """Read the newest tokens of the answer. tokens: those of the model."""
        for token in output[-_NUM_REMEMBERED:]:
            if token in self._latest:
                self._latest.remove(token)
            elif not _is_layout(tokens.decode_bytes([token])):
                continue
            self._latest.insert(0, token)
        del self._latest[_NUM_REMEMBERED:]

    def guess(self, mask: bytes) -> int | None:
        """Return the latest of the tokens that a mask allows; None for none, and in the middle of free text: where the
        mask allows more than one in eight tokens."""
        if not self._latest or int.from_bytes(mask).bit_count() > len(mask):
            return None
        return next((token for token in self._latest if allows(mask, token)), None)


def allows(mask: bytes, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def _is_layout(text: bytes) -> bool:
    return text.isascii() and not any(character.isalnum() for character in text.decode("ascii"))
