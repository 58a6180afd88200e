"""Token ids of rendered prompts that were mostly tokenised before: agents send a conversation again with each turn.

A rendered prompt is cut into pieces right before tokens that are always found, in any surrounding text
(`TextTokenizer.borders`): no tokenizer merges text across such a place, so the ids of a prompt are the ids of its
pieces, one after another. Pieces are remembered by their text, apart for each owner: nobody can find out by time what
another key has sent.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from moeserve.frontend.text import TextTokenizer

_LEAST_CHARS = 256  # a piece has at least this many characters, but for the last
_MOST_CHARS = 262_144  # a longer piece is not remembered
_OVERHEAD_BYTES = 512  # of the objects around one piece, about
_TEXT_BYTES = 4  # per character, at most


class PieceMemory:
    """Tokenises rendered prompts. Remembers the least recently used pieces within `max_bytes`."""

    def __init__(self, tokenizer: TextTokenizer, borders: Sequence[str], max_bytes: int) -> None:
        """borders: some of `tokenizer.borders`, where to cut."""
        self.num_bytes = 0
        self._tokenizer = tokenizer
        self._borders = borders
        self._max_bytes = max_bytes
        self._known: OrderedDict[tuple[bytes, str, str], array[int]] = OrderedDict()

    def encode(self, text: str, mark: str, owner: bytes) -> array[int]:
        """Return the token ids of a rendered template, as `TextTokenizer.encode_rendered` does."""
        pieces = list(self._cut(text))
        token_ids: array[int] = array("i")
        for piece in pieces[:-1]:
            token_ids += self._of_piece(piece, mark, owner)
        # The next turn goes on with the last piece.
        token_ids.extend(self._tokenizer.encode_rendered(pieces[-1], mark))
        return token_ids

    def _of_piece(self, piece: str, mark: str, owner: bytes) -> array[int]:
        key = (owner, piece, mark if mark in piece else "")
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        token_ids = array("i", self._tokenizer.encode_rendered(piece, mark))
        if len(piece) <= _MOST_CHARS:
            self._known[key] = token_ids
            self.num_bytes += _size(piece, token_ids)
            while self.num_bytes > self._max_bytes:
                (_, oldest, _), gone = self._known.popitem(last=False)
                self.num_bytes -= _size(oldest, gone)
        return token_ids

    def _cut(self, text: str) -> Iterator[str]:
        """Yield the pieces of a text, at least one. The cuts depend on the text before them alone."""
        places = sorted(place for border in self._borders for place in _places(text, border))
        start = 0
        for place in places:
            if place - start >= _LEAST_CHARS:
                yield text[start:place]
                start = place
        yield text[start:]


def _places(text: str, border: str) -> Iterator[int]:
    place = text.find(border)
    while place >= 0:
        yield place
        place = text.find(border, place + len(border))


def _size(piece: str, token_ids: array[int]) -> int:
    return _OVERHEAD_BYTES + _TEXT_BYTES * len(piece) + token_ids.itemsize * len(token_ids)
