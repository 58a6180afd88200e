"""Where guesses of a request's next tokens come from: its own text, and what the prefix cache has behind it.

What grammars force comes from `moeserve.grammars.masks`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.plan import Request
from moeserve.scheduling.request_memory import RequestMemory
from moeserve.scheduling.suffix_index import LONGEST_MATCH, SuffixIndex

# The sources: the request's prompt and output; cached text that begins with all of the request's tokens.
OWN_TEXT = "own"
CACHED_TEXT = "cached"
# What the request's grammar forces behind its tokens, or behind a guess of another source.
FORCED = "forced"


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may follow a request's tokens. `num_matched` tokens before them are like those of the source."""

    source: str
    num_matched: int
    tokens: array[int]

    def num_right(self, new_tokens: Sequence[int]) -> int:
        """Return how many of the first tokens are right, given the tokens that have followed."""
        most = min(len(self.tokens), len(new_tokens))
        return next((n for n in range(most) if self.tokens[n] != new_tokens[n]), most)


class OwnText:
    """A request's prompt and output: where its last tokens occurred before, the same tokens are likely to follow."""

    __slots__ = ("_index",)

    def __init__(self) -> None:
        self._index = SuffixIndex()

    def extend(self, tokens: array[int], most: int) -> int:
        """Index up to `most` further tokens. Return how many."""
        return self._index.extend(tokens, most)

    def guess(self, tokens: array[int], least: int, most: int) -> Guess | None:
        """Return up to `most` tokens that followed the longest, then latest, match of at least `least` tokens."""
        position, num_matched = self._index.find(tokens, tokens[-LONGEST_MATCH:])
        if num_matched < least:
            return None
        return Guess(OWN_TEXT, num_matched, tokens[position : position + most])


class CachedText:
    """The cached text that continues a request's tokens: what followed here the last time.

    All tokens of the request are like those of the cached text. So the strength of a guess is the number of tokens in
    a row that earlier guesses had right.
    """

    __slots__ = ("_last", "_num_followed")

    def __init__(self) -> None:
        self._last: Guess | None = None
        self._num_followed = 0

    def follow(self, new_tokens: Sequence[int]) -> None:
        """Receive the tokens that have followed the last guess."""
        is_right = self._last is not None and self._last.num_right(new_tokens) == len(new_tokens)
        self._num_followed = self._num_followed + len(new_tokens) if is_right else 0

    def guess(self, request: Request, memory: RequestMemory, most: int) -> Guess | None:
        """Return up to `most` tokens that are cached behind the request's tokens."""
        tokens = memory.continuation(request, most)
        self._last = Guess(CACHED_TEXT, self._num_followed, tokens) if tokens else None
        return self._last
