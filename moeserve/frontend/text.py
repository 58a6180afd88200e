"""Text to token ids and back: the tokenizer, the incremental detokenizer and the search for stop strings.

This module decides which text may become control tokens. A rendered chat template and the prompt of `/v1/completions`
are model input as a whole, so special tokens written in them count. Those inside a chat message do not: the template's
renderer puts a cut mark into every special token that it finds there (`protect`), and `encode_rendered` tokenises
around the marks, so that no such token is formed.
"""

from __future__ import annotations

import codecs
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from moeserve.model.spec import ModelError

if TYPE_CHECKING:
    Int32s = array[int]
else:
    Int32s = array  # msgspec reads the annotations of structs, and arrays take no parameter when programs run

# Unicode's noncharacters: valid in UTF-8, never part of real text. A cut mark is one that the conversation lacks.
CUT_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
CONTEXT_TOKENS = 5
_MARKER = re.compile(r"<[^\s<>]+>|\[/?[A-Z_]+\]")
# Templates look for these in the text of a model.
_REASONING_MARKERS = frozenset({"<think>", "</think>", "[THINK]", "[/THINK]"})
NO_IDS: frozenset[int] = frozenset()
# Tokens that may wait for the end of a character; a character has four bytes at most.
_MOST_PENDING = 32
_COUNTED_AT_ONCE = 65_536  # characters that are tokenised in one go only to be counted
_TAIL_TOKENS = 16  # tokens at the end of a prompt that may open the answer's reasoning

_LEAST_CHARS = 256  # a piece has at least this many characters, but for the last
_MOST_CHARS = 262_144  # a longer piece is not remembered
_OVERHEAD_BYTES = 512  # of the objects around one piece, about
_TEXT_BYTES = 4  # per character, at most


class TextTokenizer:
    """The tokenizer of a checkpoint's `tokenizer.json`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._byte_level = _is_byte_level(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        self._added_texts = {token_id: token.content for token_id, token in added.items()}
        specials = {token.content for token in added.values() if token.special}
        markers = {token.content for token in added.values() if _MARKER.fullmatch(token.content)}
        self._user_texts = _Spelled({*specials, *markers})
        self._model_texts = _Spelled(specials - _REASONING_MARKERS)
        self.longest_token = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self.token_bytes = lru_cache(maxsize=65_536)(self._token_bytes)
        self.special_in = lru_cache(maxsize=16)(self._special_in)

    @classmethod
    def from_file(cls, path: str | Path) -> TextTokenizer:
        """Read `tokenizer.json`. Raise ModelError if it is not one."""
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # The library raises a bare Exception.
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"{path} is not a usable tokenizer: {reason}.") from None

    def _special_in(self, texts: frozenset[str]) -> tuple[frozenset[int], frozenset[str]]:
        """Return the special tokens that some texts are or hold, and these texts."""
        pairs = [(text, special) for text in texts for special in self._special_ids if special and special in text]
        return frozenset(self._special_ids[special] for _, special in pairs), frozenset(text for text, _ in pairs)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, special tokens in it included. Releases the GIL."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def has_more(self, text: str, most: int) -> bool:
        """Return whether the parts of a text have more tokens than `most`, without the memory that all of it takes."""
        count = 0
        for start in range(0, len(text), _COUNTED_AT_ONCE):
            part = text[start : start + _COUNTED_AT_ONCE]
            count += len(self._tokenizer.encode_batch_fast([part], add_special_tokens=False)[0])
            if count > most:
                return True
        return False

    def spells_special(self, text: str) -> bool:
        """Return whether a token that `protect` cuts is spelled out in `text`."""
        return self._user_texts.is_in(text)

    def protect(self, text: str, mark: str, *, of_model: bool = False) -> str:
        """Return `text` with `mark` inside every special token that is spelled out in it, behind its first character.

        Tokens that only look like markup, `<tool_call>` or `[ARGS]`, count as special too. of_model: the text is an
        earlier answer, in which those and the marks of reasoning may stand.
        """
        return (self._model_texts if of_model else self._user_texts).cut(text, mark)

    @property
    def borders(self) -> tuple[str, ...]:
        """The added tokens before which a text can be cut: tokenising the parts gives the tokens of the whole.

        The library looks for added tokens first and tokenises each text between two of them by itself. So a token is a
        border if it is found wherever its text stands: no other one overlaps it or is longer, and its neighbours do not
        matter.
        """
        added = self._tokenizer.get_added_tokens_decoder().values()
        if any(token.single_word for token in added):
            return ()
        first = [token.content for token in added if not token.normalized and token.content]
        plain = {token.content for token in added if not token.normalized and not token.lstrip and token.content}
        return tuple(text for text in sorted(plain) if not any(_reaches(other, text) for other in first))

    def encode_rendered(self, text: str, mark: str) -> list[int]:
        """Return the token ids of a rendered template whose messages went through `protect` with the same mark."""
        if mark not in text:
            return self.encode(text, add_special_tokens=False)
        pieces = text.split(mark)
        return [token_id for piece in pieces for token_id in self.encode(piece, add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD. Releases the GIL."""
        texts: list[str] = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return texts[0]

    def _token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for an id without a token (padding rows of the vocabulary)."""
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._bytes_of(token_id, token)

    def _bytes_of(self, token_id: int, token: str) -> bytes:
        """Return the bytes of a token that the vocabulary spells so."""
        if token_id in self._added_texts:
            return self._added_texts[token_id].encode()
        if self._byte_level:
            try:
                return bytes(map(byte_alphabet().__getitem__, token))
            except KeyError:
                return token.encode()
        if token[:3] == "<0x" and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def all_token_bytes(self) -> list[tuple[int, bytes]]:
        return [(token_id, self._bytes_of(token_id, token)) for token, token_id in self._tokenizer.get_vocab().items()]

    def stream(self, context: Sequence[int], *, skip_special_tokens: bool = True) -> DecodeStream:
        """Return a decoder of the tokens that follow `context`."""
        return DecodeStream(ids=list(context), skip_special_tokens=skip_special_tokens)

    def step(self, stream: DecodeStream, token_id: int) -> str | None:
        """Return the text that one more token completes. Raise the errors of `tokenizers` for a broken sequence."""
        text: str | None = stream.step(self._tokenizer, token_id)
        return text


class _Spelled:
    """Finds and cuts texts that are spelled out in others.

    Most texts hold none, and looking for each text is far quicker than one pattern: they are looked for by their first
    two characters, then by themselves. A text is cut after its first character, so texts of one character stay whole.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        cuttable = sorted((text for text in texts if len(text) > 1), key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, cuttable)))
        self._by_head: dict[str, list[str]] = {}
        for text in cuttable:
            self._by_head.setdefault(text[:2], []).append(text)

    def is_in(self, text: str) -> bool:
        return any(head in text and any(one in text for one in texts) for head, texts in self._by_head.items())

    def cut(self, text: str, mark: str) -> str:
        """Return `text` with `mark` behind the first character of each."""
        if not self.is_in(text):
            return text
        return self._pattern.sub(lambda found: found[0][0] + mark + found[0][1:], text)


def _reaches(other: str, text: str) -> bool:
    """Return whether `other` can be found over a place where `text` stands, or `text` cannot be searched for."""
    longer = other != text and other.startswith(text)
    overlaps = any(text.startswith(other[start:]) or other.startswith(text, start) for start in range(1, len(other)))
    return longer or overlaps or any(mark in text for mark in CUT_MARKS)


class IncrementalDetokenizer:
    """Decodes one output token by token. A character split over tokens appears with its last one.

    `prompt` gives context: decoders of SentencePiece vocabularies drop the space before their first token.
    shown: the ids of special tokens whose text shows; the others have none.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int] = (), shown: frozenset[int] = NO_IDS) -> None:
        self._tokenizer = tokenizer
        self._skips = not shown
        self._dropped = tokenizer.special_token_ids - shown
        context = list(prompt[-CONTEXT_TOKENS:])
        if tokenizer.decode(context, skip_special_tokens=self._skips).endswith("\ufffd"):
            context = []  # a prompt that ends inside a character cannot be continued from
        self._shown = context  # the tokens before the pending ones, which their text depends on
        self._pending: list[int] = []
        self._stream: DecodeStream | None = tokenizer.stream(context, skip_special_tokens=self._skips)

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, possibly none."""
        if token_id in self._dropped:
            return ""
        self._pending.append(token_id)
        if len(self._pending) >= _MOST_PENDING:
            return self._cut()
        if self._stream is None:
            return self._compare()
        try:
            text = self._tokenizer.step(self._stream, token_id)
        except Exception:  # tokenizers raises a bare Exception when earlier text would change with this token
            text = self.flush()
            self._stream = self._tokenizer.stream(self._shown, skip_special_tokens=self._skips)
            return text
        if text is None:
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """Return the rest at the end of the output: an unfinished character shows as U+FFFD."""
        if not self._pending:
            return ""
        text = self._text_of(len(self._pending))
        self._shown, self._pending = self._pending, []
        return text

    def _cut(self) -> str:
        """Return the text of the pending tokens up to an unfinished character, and let go of its tokens.

        Tokens that complete no text would otherwise be decoded again with every further one, which takes quadratic
        time: broken bytes, one after another, or ids without a token.
        """
        self._stream = None
        self._pending = [token_id for token_id in self._pending if self._tokenizer.token_bytes(token_id)]
        num_final = self._num_final()
        text = self._text_of(num_final)
        if text:
            self._shown = self._pending[:num_final]
        self._pending = self._pending[num_final:]
        return text

    def _compare(self) -> str:
        """Return the text that the pending tokens add to those before, none while it may end inside a character.

        A decoding stream begins only after text that ends with a whole character. This one begins anew with such text.
        """
        text = self._text_of(len(self._pending))
        if not text or text.endswith("\ufffd"):
            return ""
        self._shown, self._pending = self._pending, []
        self._stream = self._tokenizer.stream(self._shown, skip_special_tokens=self._skips)
        return text

    def _text_of(self, num_pending: int) -> str:
        before = self._tokenizer.decode(self._shown, skip_special_tokens=self._skips)
        after = self._tokenizer.decode(self._shown + self._pending[:num_pending], skip_special_tokens=self._skips)
        return after[len(before) :]

    def _num_final(self) -> int:
        """Return how many pending tokens lie before a character that is unfinished at their end."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [self._tokenizer.token_bytes(token_id) for token_id in self._pending]
        decoder.decode(b"".join(pieces))
        num_open = len(decoder.getstate()[0])
        num_final = len(pieces)
        while num_open > 0:
            num_final -= 1
            num_open -= len(pieces[num_final])
        return num_final


@dataclass(frozen=True, slots=True)
class PromptText:
    """The text of a prompt's tokens, and where in it each token's text begins."""

    text: str
    offsets: Int32s


def decode_prompt(
    tokenizer: TextTokenizer, prompt: Sequence[int], shown: frozenset[int] = NO_IDS, spoken: str | None = None
) -> PromptText:
    """Return the text of a prompt, token by token, in time that is linear whatever the tokens are.

    shown: the ids of special tokens whose text shows. spoken: the text that was made into these tokens. It is returned
    as it is, and special tokens that the tokenizer put before it have no place in it.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, shown=shown)
    offsets: array[int] = array("i")
    pieces, length = [], 0
    for token_id in prompt:
        offsets.append(length)
        piece = detokenizer.push(token_id)
        pieces.append(piece)
        length += len(piece)
    pieces.append(detokenizer.flush())
    text = "".join(pieces)
    if spoken is None:
        return PromptText(text, offsets)
    ahead, end = len(text) - len(spoken) if text.endswith(spoken) else 0, len(spoken)
    return PromptText(spoken, array("i", [min(max(offset - ahead, 0), end) for offset in offsets]))


def prompt_tail(tokenizer: TextTokenizer, prompt: Sequence[int]) -> str:
    """Return the text of a prompt's last tokens, special ones too."""
    return tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)


class StopMatcher:
    """Finds stop strings in text that comes in pieces, and holds back text that may begin one.

    One Knuth-Morris-Pratt automaton per stop string: linear in the text, and independent of how it is cut. The stop
    string that is complete first counts; of several that end together, the longest. includes: it is shown as well.
    """

    def __init__(self, stops: Sequence[str], *, includes: bool = False) -> None:
        self._includes = includes
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    @property
    def num_held(self) -> int:
        return len(self._held)

    def push(self, text: str) -> str:
        """Return the text that may be shown now. Once `matched` is set, all text up to the stop string was shown."""
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        text = self._held + text
        for position in range(len(self._held), len(text)):
            self._advance(text[position])
            complete = [stop for stop, state in zip(self._stops, self._states, strict=True) if state == len(stop)]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return text[: position + 1 - (0 if self._includes else len(self.matched))]
        num_held = max(self._states)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return the held-back text, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> None:
        for index, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            state = self._states[index]
            while state and stop[state] != char:
                state = failure[state - 1]
            self._states[index] = state + 1 if stop[state] == char else 0


def _failure_table(pattern: str) -> list[int]:
    """Return for each prefix of `pattern` the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    decoder = msgspec.json.decode(tokenizer.decoder.__getstate__())
    return any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ())))


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: the byte that each character of a byte-level token means.

    Printable Latin-1 bytes are themselves; the others follow from U+0100 in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


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
