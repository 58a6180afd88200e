"""The thought of an answer among its tokens: where it begins and ends, how long it is, when its budget is spent.

Frontends count thoughts for usage, and the scheduler ends thoughts that have a budget. Both follow an answer with
`Thought`, so their counts agree. Pure: token ids go in, and tables have the meaning of their bytes (`make_markers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

_MANY = 1 << 30  # tokens


@dataclass(frozen=True, slots=True)
class Marker:
    """A text that is found in tokens however they cut it. Its first byte stands in it once.

    A search knows the number of the marker's bytes with which the tokens so far end. By token id, `starts` has that
    number for tokens that hold nothing before these bytes, `tails` for tokens that hold other text before them, and
    `steps[n]` for tokens that continue n bytes. It is `length` where the marker is whole; more text may follow it.
    """

    length: int
    starts: dict[int, int] = field(default_factory=dict)
    tails: dict[int, int] = field(default_factory=dict)
    steps: dict[int, dict[int, int]] = field(default_factory=dict)


# Token ids with the bytes of the tokens, none empty.
Vocabulary = Sequence[tuple[int, bytes]]


def make_markers(texts: Iterable[str], tokens: Vocabulary, *, only_blanks_before: bool = False) -> tuple[Marker, ...]:
    """Return the tables of markers. only_blanks_before: a token's text before a marker is white space."""
    return tuple(_marker(text.encode(), tokens, only_blanks_before) for text in texts)


def _marker(marker: bytes, tokens: Vocabulary, only_blanks_before: bool) -> Marker:
    length, first = len(marker), marker[0]
    made = Marker(length)
    rests: dict[int, list[tuple[int, bytes]]] = {}
    for num_bytes in range(1, length):
        rests.setdefault(marker[num_bytes], []).append((num_bytes, marker[num_bytes:]))
    for token_id, data in tokens:
        for num_bytes, rest in rests.get(data[0], ()):
            if rest.startswith(data) or data.startswith(rest):
                made.steps.setdefault(num_bytes, {})[token_id] = min(length, num_bytes + len(data))
        if first not in data:
            continue
        place = data.find(marker)
        if place < 0:
            place = data.rfind(first)
            if not marker.startswith(data[place:]):
                continue
        if place == 0:
            made.starts[token_id] = min(length, len(data))
        elif not only_blanks_before or is_blank(data[:place]):
            made.tails[token_id] = min(length, len(data) - place)
    return made


def is_blank(data: bytes) -> bool:
    """Return whether bytes show no text but white space."""
    return not data or data.isspace() or (data[0] >= 0x80 and data.decode("utf-8", "replace").isspace())


@dataclass(frozen=True, slots=True)
class ThoughtForm:
    """The markers around the thoughts of a model.

    A thought begins behind `opening`, and behind the first marker of `header` if there are any; the other markers of
    `header` say that there is none. It ends with the first marker of `ends`. only_first: a thought stands at the
    beginning of an answer, where only tokens of `blanks` may come before it, and there is no second one.
    """

    opening: Marker
    ends: tuple[Marker, ...]
    header: tuple[Marker, ...] = ()
    only_first: bool = True
    blanks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """The bound for the thoughts of an answer: `max_tokens` inside their markers, all together.

    The tokens `closing` end the thought that spends the budget; `closing_again` end every later one. is_open: the
    prompt ends inside a thought.
    """

    form: ThoughtForm
    max_tokens: int
    closing: tuple[int, ...]
    closing_again: tuple[int, ...] = ()
    is_open: bool = False


class _Search:
    """Looks for one marker. `pending`: the last tokens, which hold nothing but the marker's bytes so far."""

    __slots__ = ("_marker", "num_bytes", "pending")

    def __init__(self, marker: Marker) -> None:
        self._marker = marker
        self.num_bytes = 0
        self.pending: list[int] = []

    def push(self, token_id: int) -> bool:
        """Return whether the marker is whole with this token."""
        marker = self._marker
        if (num_bytes := self._continued(token_id)) is not None:
            self.pending.append(token_id)
        elif (num_bytes := marker.starts.get(token_id)) is not None:
            self.pending = [token_id]
        else:
            num_bytes, self.pending = marker.tails.get(token_id, 0), []
        self.num_bytes = num_bytes
        return num_bytes == marker.length

    def may_begin_with(self, token_id: int) -> bool:
        """Return whether the token begins the marker, or continues the part that is there."""
        if self.num_bytes:
            return self._continued(token_id) is not None
        return token_id in self._marker.starts or token_id in self._marker.tails

    def _continued(self, token_id: int) -> int | None:
        steps = self._marker.steps.get(self.num_bytes) if self.num_bytes else None
        return None if steps is None else steps.get(token_id)


class _Stage(Enum):
    BEFORE = auto()
    HEADER = auto()
    INSIDE = auto()
    OVER = auto()


class Thought:
    """Follows one answer. `num_tokens`: those inside thoughts so far. Tokens that are all marker are not inside; those
    of an end that is not whole yet count until it is."""

    def __init__(self, form: ThoughtForm, is_open: bool) -> None:
        self.num_tokens = 0
        self._num_pushed = 0
        # The token with which the thought begins, and the tokens inside earlier ones.
        self._begin = self._num_before = 0
        self._form = form
        self._stage = _Stage.BEFORE
        self._searches = [_Search(form.opening)]
        if is_open:
            self._enter(_Stage.INSIDE, form.ends)

    @property
    def is_open(self) -> bool:
        return self._stage is _Stage.INSIDE

    @property
    def may_open_next(self) -> bool:
        """True if a thought may begin behind the next token."""
        return self._stage is _Stage.HEADER or (self._stage is _Stage.BEFORE and not self._form.header)

    @property
    def pending_end(self) -> list[int]:
        """The last tokens, as far as they begin the first end marker."""
        return self._searches[0].pending if self.is_open else []

    def cut(self, place: int) -> None:
        """End the last thought before token `place` of the answer: a call, found later, begins there."""
        self.num_tokens = self._num_before + max(0, place - self._begin)
        if self._stage is _Stage.INSIDE:
            self._enter(_Stage.OVER if self._form.only_first else _Stage.BEFORE, (self._form.opening,))

    def push(self, token_id: int) -> None:
        """Take the next token of the answer."""
        self._num_pushed += 1
        if self._stage is _Stage.OVER:
            return
        if self._stage is _Stage.INSIDE:
            self.num_tokens += 1
        elif self._stage is _Stage.BEFORE and self._form.only_first and not self._may_open(token_id):
            self._stage = _Stage.OVER
            return
        found = [place for place, search in enumerate(self._searches) if search.push(token_id)]
        if found:
            self._pass(found[0], token_id)

    def _pass(self, place: int, token_id: int) -> None:
        """Go on behind a marker, number `place` of the stage's, that is whole with the token."""
        form = self._form
        if self._stage is _Stage.BEFORE and form.header:
            self._enter(_Stage.HEADER, form.header)
        elif self._stage is _Stage.BEFORE or (self._stage is _Stage.HEADER and place == 0):
            self._enter(_Stage.INSIDE, form.ends)
        else:
            if self._stage is _Stage.INSIDE:
                self.num_tokens -= len(self._searches[place].pending)
            self._enter(_Stage.OVER if form.only_first else _Stage.BEFORE, (form.opening,))
            # The token that ends one part may begin the next.
            self._searches[0].push(token_id)

    def _enter(self, stage: _Stage, markers: Iterable[Marker]) -> None:
        if stage is _Stage.INSIDE:
            self._begin, self._num_before = self._num_pushed, self.num_tokens
        self._stage = stage
        self._searches = [_Search(marker) for marker in markers]

    def _may_open(self, token_id: int) -> bool:
        search = self._searches[0]
        return search.may_begin_with(token_id) or (not search.num_bytes and token_id in self._form.blanks)


class BudgetedThought:
    """Follows an answer whose thoughts have a budget, and says which tokens have to come next once it is spent."""

    def __init__(self, budget: ThoughtBudget, output: Iterable[int] = ()) -> None:
        """output: the tokens of the answer that an earlier life of the engine has sampled."""
        self._budget = budget
        self._thought = Thought(budget.form, budget.is_open)
        self._closing = budget.closing
        # The tokens of the closing that the answer has.
        self._num_said = 0
        for token_id in output:
            self.push(token_id)

    @property
    def _is_spent(self) -> bool:
        return self._thought.is_open and self._thought.num_tokens >= self._budget.max_tokens

    @property
    def due(self) -> tuple[int, ...]:
        """The tokens that have to come next, none while the model is free."""
        return self._closing[self._num_said :] if self._is_spent else ()

    @property
    def may_be_due_next(self) -> bool:
        """True if tokens may be due behind the next one, whichever that is."""
        thought, budget = self._thought, self._budget
        num_tokens = thought.num_tokens + thought.is_open
        return num_tokens >= budget.max_tokens and (thought.is_open or thought.may_open_next)

    @property
    def num_free(self) -> int:
        """The number of next tokens that cannot be due, at least one; many where no thought is near its end."""
        left = self._budget.max_tokens - self._thought.num_tokens
        return max(1, left) if self._thought.is_open or self._thought.may_open_next else _MANY

    def push(self, token_id: int) -> None:
        """Take the next token of the answer."""
        was_spent = self._is_spent
        self._thought.push(token_id)
        if was_spent:
            self._num_said += 1
            if not self._thought.is_open:
                self._num_said, self._closing = 0, self._budget.closing_again or self._budget.closing
        elif self._is_spent:
            # The model may have begun the end by itself.
            begun = tuple(self._thought.pending_end)
            self._num_said = len(begun) if self._closing[: len(begun)] == begun else 0
