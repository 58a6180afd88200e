"""The sources of guesses of a request's next tokens: its own text, the cached text behind it, and the text that its
client predicts.

Tokens that grammars force come from `moeserve.grammars.masks`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from moeserve.plan import Request
from moeserve.scheduling.request_memory import RequestMemory
from moeserve.scheduling.suffix_index import LONGEST_MATCH, SuffixIndex

# The sources: the request's prompt and output; cached text that begins with all of the request's tokens; the text that
# the client predicts.
OWN_TEXT = "own"
CACHED_TEXT = "cached"
PREDICTED_TEXT = "predicted"
# The checkpoint's MTP layer.
MTP = "mtp"
# Tokens that the request's grammar forces behind its own tokens, or behind a guess of another source.
FORCED = "forced"
# White space and punctuation as the request's output has had them, and the tokens that its grammar forces between them.
LAYOUT = "layout"
# An answer that has left its predicted text is found in it again by this number of equal tokens.
_FOUND_AGAIN = 3
# At most this many byte positions are tried as places of int32 values; with crafted tokens most may not be aligned.
_MOST_PLACES = 16


class Guess(NamedTuple):
    """Tokens that may follow a request's tokens, none where the source has no guess.

    `num_matched` tokens before them equal the source's.
    """

    source: str
    num_matched: int
    tokens: array[int]

    def num_right(self, new_tokens: Sequence[int]) -> int:
        """Return how many of the first tokens are right, given the tokens that have followed."""
        number = 0
        for guessed, new in zip(self.tokens, new_tokens, strict=False):
            if guessed != new:
                break
            number += 1
        return number


_NOTHING_CACHED = Guess(CACHED_TEXT, 0, array("i"))


class OwnText:
    """A request's prompt and output: where its last tokens occurred before, the same tokens are likely to follow."""

    __slots__ = ("_index",)

    def __init__(self) -> None:
        self._index = SuffixIndex()

    def extend(self, tokens: array[int], most: int) -> int:
        """Index up to `most` further tokens. Return how many."""
        return self._index.extend(tokens, most)

    def guess(self, tokens: array[int], least: int, most: int) -> Guess:
        """Return up to `most` tokens that followed the longest, then latest, match of at least `least` tokens."""
        position, num_matched = self._index.find(tokens, tokens[-LONGEST_MATCH:])
        guessed = tokens[position : position + most] if num_matched >= least else array("i")
        return Guess(OWN_TEXT, num_matched, guessed)


class CachedText:
    """The cached text that continues a request's tokens, as an earlier request went on from here.

    All tokens of the request equal the cached text's. So the strength of a guess is the number of tokens in a row that
    earlier guesses had right. Where the text ends, it is asked for again once the request has published another block.
    """

    __slots__ = ("_last", "_num_followed", "_num_published")

    def __init__(self) -> None:
        self._last = _NOTHING_CACHED
        self._num_followed = 0
        # The number of tokens that the request had published when nothing continued them; -1 if something did.
        self._num_published = -1

    def follow(self, new_tokens: Sequence[int]) -> None:
        """Receive the tokens that have followed, also behind no guess."""
        is_right = self._last.num_right(new_tokens) == len(new_tokens)
        self._num_followed = self._num_followed + len(new_tokens) if is_right else 0
        self._last = _NOTHING_CACHED

    def guess(self, request: Request, memory: RequestMemory, most: int) -> Guess:
        """Return up to `most` tokens that are cached behind the request's tokens."""
        num_published = request.held.num_published_tokens
        if num_published == self._num_published:
            return _NOTHING_CACHED
        tokens = memory.continuation(request, most)
        self._num_published = -1 if tokens else num_published
        self._last = Guess(CACHED_TEXT, self._num_followed, tokens)
        return self._last


class PredictedText:
    """The text that a client predicts for the answer: it is guessed from its beginning, and goes on after each edit.

    A token that differs is assumed to be a replaced one. From then on the answer is searched for in the text, first
    behind the place that was reached, then before it.
    """

    __slots__ = ("_num_followed", "_place", "_tokens")

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        self._place = 0
        self._num_followed = 0

    def follow(self, new_tokens: Sequence[int], output: array[int]) -> None:
        """Receive the newest tokens of the answer. output: its end, with these."""
        for token in new_tokens:
            is_alike = self._place < len(self._tokens) and self._tokens[self._place] == token
            self._num_followed = self._num_followed + 1 if is_alike else 0
            self._place = min(self._place + 1, len(self._tokens))
        if self._num_followed < _FOUND_AGAIN <= len(output):
            tail = output[-_FOUND_AGAIN:]
            place = _find(self._tokens, tail, max(0, self._place - _FOUND_AGAIN))
            place = _find(self._tokens, tail, 0) if place is None else place
            if place is not None:
                self._place, self._num_followed = place + _FOUND_AGAIN, _FOUND_AGAIN

    def guess(self, most: int) -> Guess:
        """Return up to `most` tokens of the text, where the answer's last token is that of the text."""
        tokens = self._tokens[self._place : self._place + most] if self._num_followed else array("i")
        return Guess(PREDICTED_TEXT, self._num_followed, tokens)


def _find(tokens: array[int], wanted: array[int], start: int) -> int | None:
    """Return the first place from `start` on where the tokens are those wanted; None if there is none."""
    size, data, searched = tokens.itemsize, wanted.tobytes(), memoryview(tokens).cast("B")
    whole, place = bytes(searched[start * size :]), -1
    for _ in range(_MOST_PLACES):
        place = whole.find(data, place + 1)
        if place < 0 or place % size == 0:
            break
    return start + place // size if place >= 0 and place % size == 0 else None
