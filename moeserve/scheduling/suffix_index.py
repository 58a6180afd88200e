"""Where the last tokens of a text have occurred before: the longest match, the latest among equals.

Positions whose last three tokens are alike are chained, the latest first, as in the search for matches of deflate
(RFC 1951, 4). So a token costs the same however long the text is, twelve bytes at most, and nothing is rebuilt when the
text grows.
"""

from __future__ import annotations

from array import array

# The number of equal tokens from which positions are chained.
LEAST_MATCH = 3
# Longer matches count as this long.
LONGEST_MATCH = 32
# The number of chained positions to look at.
_MOST_TRIED = 16
_NUM_BITS = 15
# Three shifts move a token's bits out of the key.
_SHIFT = _NUM_BITS // LEAST_MATCH
_MASK = (1 << _NUM_BITS) - 1


class SuffixIndex:
    """The positions of a text by the tokens before them. The text may grow at its end, and is not kept here."""

    __slots__ = ("_earlier", "_key", "_latest")

    def __init__(self) -> None:
        # By key, the latest position after tokens with that key; by position, the one before it in the chain.
        self._latest = array("i", [-1]) * (1 << _NUM_BITS)
        self._earlier = array("i")
        self._key = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens in front of the text that are indexed."""
        return len(self._earlier)

    def extend(self, text: array[int], most: int) -> int:
        """Index up to `most` further tokens of the text, but not its last. Return how many."""
        start = len(self._earlier)
        stop = min(len(text) - 1, start + most)
        latest, earlier, key = self._latest, self._earlier, self._key
        for position, token in enumerate(text[start:stop], start + 1):
            key = (key << _SHIFT ^ token) & _MASK
            earlier.append(latest[key])
            latest[key] = position
        self._key = key
        return max(0, stop - start)

    def find(self, text: array[int], tail: array[int]) -> tuple[int, int]:
        """Return the position of the text after the longest match of the end of `tail`, and the match's length.

        The length is at most LONGEST_MATCH. Without LEAST_MATCH equal tokens it is 0. text: as it was indexed.
        """
        if len(tail) < LEAST_MATCH:
            return 0, 0
        key = 0
        for token in tail[-LEAST_MATCH:]:
            key = (key << _SHIFT ^ token) & _MASK
        position, longest, found = self._latest[key], 0, 0
        end = len(tail)
        for _ in range(_MOST_TRIED):
            if position < 0:
                break
            most = min(position, end, LONGEST_MATCH)
            # Only a longer match replaces a later one.
            if most > longest and text[position - longest - 1 : position] == tail[end - longest - 1 :]:
                longest = _match_length(text, position, tail, most, longest + 1)
                found = position
                if longest >= LONGEST_MATCH:
                    break
            position = self._earlier[position - 1]
        return (found, longest) if longest >= LEAST_MATCH else (0, 0)


def _match_length(text: array[int], position: int, tail: array[int], most: int, known: int) -> int:
    """Return how many tokens before `position` equal the last of `tail`. known: that many do."""
    end = len(tail)
    if text[position - most : position] == tail[end - most :]:
        return most
    while known < most and text[position - known - 1] == tail[end - known - 1]:
        known += 1
    return known
