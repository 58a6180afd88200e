"""The plans of one rank on their way there: `PlanSender` encodes differences, `PlanReceiver` returns complete plans.

Between two plans of a running request almost nothing changes: it has one more token, and now and then one more block.
Both ends therefore keep the facts about each request that recent plans named: its sampling parameters, block table,
history, mask and window table. The sender describes a chunk by its differences from these facts, in a few dozen bytes
however long the context is, and names the request by a small number. Only a grammar's mask comes whole, one bit per
token of the vocabulary, whenever it is another one. The executor of the plans keeps nothing.

A plan travels as the MessagePack array of `_WirePlan`. Plans are numbered: number 0 makes the receiver forget
everything, and a gap is an error. So a sender that starts anew is understood by any receiver, and none computes with
facts that it has missed.

Pure: no sockets, no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moeserve.plan import Chunk, ChunkExtras, SamplingParams, StateUse, StepPlan, WindowTable
from moeserve.wire import MAX_STEP_BYTES, DecodeError, pack, unpack, unpack_token_ids

# The number of plans after which both ends forget a request that none of them named.
_PLANS_REMEMBERED = 32
_ITEM_BYTES = 4  # of a token id, and of a block id
_HEADER_ITEMS = 4  # int32 values before the tokens of a chunk in a run

# How int32 values changed: None not at all; bytes to append; or the number of values to drop in front, the number to
# keep after these, and the bytes to append.
_Change = bytes | tuple[int, int, bytes] | None


class _WireExtras(msgspec.Struct, array_like=True, frozen=True):
    """Trailing fields that are None are left out. `has_history` distinguishes an unchanged history from none. The two
    numbers are None if unchanged. `mask` and `banned_token_ids`: None for none, True if unchanged."""

    has_history: bool
    history: _Change = None
    mask: bool | bytes | None = None
    num_prompt_tokens: int | None = None
    num_top_logprobs: int | None = None
    banned_token_ids: bool | tuple[int, ...] | None = None
    prompt_targets: bytes | None = None
    draft_masks: list[bytes] | None = None
    num_banned_rows: int | None = None


class _WireChunk(msgspec.Struct, array_like=True, frozen=True):
    """Trailing fields that are None are left out.

    `request`: the request's number on this link; `request_id` comes with a new number. `sampling`: True if unchanged.
    `num_drafts`: None for 0. `state`: slot, load and save. `window`: the number of its first block,
    and the change. `following`: as in `Chunk`.
    """

    request: int
    token_ids: bytes
    start: int
    sampling: bool | SamplingParams | None = None
    block_table: _Change = None
    drawn_by: int | None = None
    extras: _WireExtras | None = None
    state: tuple[int, int | None, int | None] | None = None
    window: tuple[int, _Change] | None = None
    request_id: str | None = None
    num_drafts: int | None = None
    following: int | None = None


class _WirePlan(msgspec.Struct, array_like=True, frozen=True):
    """`number` counts the plans of a sender. `forgotten`: the numbers of requests to forget before reading `chunks`.

    Bytes among `chunks` are consecutive chunks of one token and drafts, for which nothing else has changed but blocks
    that were appended. Each is int32 values: the request's number, the number of drafts, that of the blocks' bytes, the
    position, the tokens and the blocks.
    """

    number: int
    step: int
    chunks: list[_WireChunk | bytes]
    forgotten: list[int] = []
    zeroed_blocks: bytes = b""
    zeroed_windows: bytes = b""
    copied_blocks: bytes = b""


@dataclass(slots=True)
class _Sent:
    """The receiver's facts about a request, as the sender knows them. named_at: the number of the plan that named it
    last."""

    number: int
    named_at: int = 0
    sampling: SamplingParams | None = None
    block_table: bytes = b""
    history: bytes = b""
    mask: bytes | None = None
    num_prompt_tokens: int = 0
    num_top_logprobs: int = 0
    banned_token_ids: tuple[int, ...] = ()
    first: int = 0
    window: bytes = b""


class PlanSender:
    """Encodes the plans of one rank, which receives them all in order."""

    def __init__(self) -> None:
        self._num_plans = 0
        self._sent: dict[str, _Sent] = {}
        self._free: list[int] = []

    def encode(self, plan: StepPlan) -> bytes:
        """Return the bytes of the next plan; later changes of its block tables do not affect them."""
        forgotten = self._forget()
        chunks = self._describe_all(plan.chunks)
        zeroed = plan.zeroed_blocks.tobytes(), plan.zeroed_windows.tobytes()
        copied = [plan.copied_blocks.tobytes()] if plan.copied_blocks else []
        data = pack([self._num_plans, plan.step, chunks, forgotten, *zeroed, *copied])
        self._num_plans += 1
        return data

    def _forget(self) -> list[int]:
        """Forget requests that no plan has named for long; return their numbers, which new requests may get."""
        oldest = self._num_plans - _PLANS_REMEMBERED
        old = [request_id for request_id, sent in self._sent.items() if sent.named_at < oldest]
        forgotten = [self._sent.pop(request_id).number for request_id in old]
        self._free += forgotten
        return forgotten

    def _describe_all(self, chunks: Sequence[Chunk]) -> list[Any]:
        described, run, sent_of, number = list[Any](), array("i"), self._sent.get, self._num_plans
        for chunk in chunks:
            sent = sent_of(chunk.request_id)
            # Fast path: most chunks of a large step are plain, and its cost grows with their number.
            if sent is not None and _is_next_token(chunk, sent):
                block_table, before = chunk.block_table.tobytes(), sent.block_table
                if block_table == before or block_table.startswith(before):
                    run.extend((sent.number, chunk.num_drafts, len(block_table) - len(before), chunk.start))
                    run += chunk.token_ids
                    if block_table != before:
                        run.frombytes(block_table[len(before) :])
                        sent.block_table = block_table
                    sent.named_at = number
                    continue
            if run:
                described.append(run.tobytes())
                run = array("i")
            described.append(self._describe(chunk))
        if run:
            described.append(run.tobytes())
        return described

    def _describe(self, chunk: Chunk) -> list[Any]:
        """Return the fields of a `_WireChunk`, and record the facts that the receiver then has."""
        sent = self._sent.get(chunk.request_id)
        is_new = sent is None
        if sent is None:
            sent = _Sent(self._free.pop() if self._free else len(self._sent))
            self._sent[chunk.request_id] = sent
        sent.named_at = self._num_plans
        sampling: bool | SamplingParams | None = chunk.sampling
        if chunk.sampling is not None:
            if sent.sampling is chunk.sampling or sent.sampling == chunk.sampling:
                sampling = True
            sent.sampling = chunk.sampling
        before, sent.block_table = sent.block_table, chunk.block_table.tobytes()
        state = chunk.state
        return _shortened(
            [
                sent.number,
                chunk.token_ids.tobytes(),
                chunk.start,
                sampling,
                _difference(before, sent.block_table),
                chunk.drawn_by,
                None if chunk.extras is None else _describe_extras(chunk.extras, sent),
                None if state is None else (state.slot, state.load, state.save),
                None if chunk.window is None else _describe_window(chunk.window, sent),
                chunk.request_id if is_new else None,
                chunk.num_drafts or None,
                chunk.following,
            ]
        )


def _is_next_token(chunk: Chunk, sent: _Sent) -> bool:
    """Return True if the receiver knows all of a chunk but its position, its token, drafts and the block table."""
    return (
        chunk.sampling is sent.sampling is not None
        and chunk.extras is None
        and chunk.drawn_by is None
        and chunk.state is None
        and chunk.window is None
        and chunk.following is None
        and len(chunk.token_ids) == 1 + chunk.num_drafts
    )


def _describe_extras(extras: ChunkExtras, sent: _Sent) -> list[Any]:
    history = None
    if extras.history is not None:
        before, sent.history = sent.history, extras.history.tobytes()
        history = _difference(before, sent.history)
    mask: bool | bytes | None = extras.mask
    if mask is not None:
        if mask == sent.mask:
            mask = True
        sent.mask = extras.mask
    banned: bool | tuple[int, ...] | None = extras.banned_token_ids or None
    if banned is not None:
        if extras.banned_token_ids == sent.banned_token_ids:
            banned = True
        sent.banned_token_ids = extras.banned_token_ids
    numbers = extras.num_prompt_tokens, extras.num_top_logprobs
    known = sent.num_prompt_tokens, sent.num_top_logprobs
    sent.num_prompt_tokens, sent.num_top_logprobs = numbers
    targets = None if extras.prompt_targets is None else extras.prompt_targets.tobytes()
    changed = [None if new == old else new for new, old in zip(numbers, known, strict=True)]
    num_banned_rows = None if extras.num_banned_rows == 1 else extras.num_banned_rows
    rows = [list(extras.draft_masks) or None, num_banned_rows]
    return _shortened([extras.history is not None, history, mask, *changed, banned, targets, *rows])


def _describe_window(window: WindowTable, sent: _Sent) -> tuple[int, _Change]:
    passed = window.first - sent.first
    dropped = passed if 0 < passed <= len(sent.window) // _ITEM_BYTES else 0
    before, sent.first, sent.window = sent.window, window.first, window.blocks.tobytes()
    return window.first, _difference(before, sent.window, dropped)


def _shortened(fields: list[Any]) -> list[Any]:
    while fields[-1] is None:
        fields.pop()
    return fields


def _difference(old: bytes, new: bytes, dropped: int = 0) -> _Change:
    """Return the change from `old` to `new`, int32 bytes. dropped: the number of values that are gone in front."""
    if dropped:
        old = old[dropped * _ITEM_BYTES :]
    elif new.startswith(old):
        return new[len(old) :] or None
    keep = _num_equal(old, new)
    return dropped, keep, new[keep * _ITEM_BYTES :]


def _num_equal(old: bytes, new: bytes) -> int:
    """Return the number of values in front that are equal."""
    low, high = 0, min(len(old), len(new)) // _ITEM_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        equal = slice(low * _ITEM_BYTES, middle * _ITEM_BYTES)
        if old[equal] == new[equal]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True)
class _Received:
    """The facts about a request at the receiving end."""

    request_id: str
    sampling: SamplingParams | None = None
    block_table: array[int] = field(default_factory=lambda: array("i"))
    history: array[int] = field(default_factory=lambda: array("i"))
    mask: bytes | None = None
    num_prompt_tokens: int = 0
    num_top_logprobs: int = 0
    banned_token_ids: tuple[int, ...] = ()
    window: array[int] = field(default_factory=lambda: array("i"))


class PlanReceiver:
    """Returns the plans of one sender. Plans share no mutable part but a request's block table, as `Chunk` says."""

    def __init__(self) -> None:
        self._next = 0  # -1 after an error: no number is right
        self._received: dict[int, _Received] = {}

    @property
    def num_requests(self) -> int:
        """The number of requests with facts here."""
        return len(self._received)

    def decode(self, data: bytes) -> StepPlan:
        """Return the next plan. Raise DecodeError for other bytes, or if a plan is missing; none can follow then but
        the first plan of another sender."""
        expected, self._next = self._next, -1
        wire = unpack(data, _WirePlan, MAX_STEP_BYTES)
        if wire.number == 0:
            self._received.clear()
        elif wire.number != expected:
            raise DecodeError(f"plan {wire.number} of the link came, but plan {expected} was expected")
        for number in wire.forgotten:
            self._received.pop(number, None)
        chunks = list[Chunk]()
        for one in wire.chunks:
            if isinstance(one, bytes):
                chunks += self._next_tokens(one)
            else:
                chunks.append(self._chunk(one))
        self._next = wire.number + 1
        blocks = wire.zeroed_blocks, wire.zeroed_windows, wire.copied_blocks
        return StepPlan(wire.step, chunks, *map(unpack_token_ids, blocks))

    def _next_tokens(self, data: bytes) -> Iterator[Chunk]:
        values, place = unpack_token_ids(data), 0
        while place < len(values):
            header, first = values[place : place + _HEADER_ITEMS], place + _HEADER_ITEMS
            if len(header) < _HEADER_ITEMS or header[1] < 0 or header[2] < 0:
                raise DecodeError("a run of chunks is torn")
            number, num_drafts, num_bytes, start = header
            end = first + 1 + num_drafts
            place = end + num_bytes // _ITEM_BYTES
            if place > len(values):
                raise DecodeError("a run of chunks is torn")
            known, tokens = self._known(number), values[first:end]
            known.block_table.extend(values[end:place])
            yield Chunk(known.request_id, tokens, start, known.block_table, known.sampling, num_drafts=num_drafts)

    def _known(self, number: int) -> _Received:
        known = self._received.get(number)
        if known is None:
            raise DecodeError(f"request {number} of the link is not known")
        return known

    def _chunk(self, wire: _WireChunk) -> Chunk:
        if wire.request_id is not None:
            self._received[wire.request] = _Received(wire.request_id)
        known = self._known(wire.request)
        if isinstance(wire.sampling, SamplingParams):
            known.sampling = wire.sampling
        # Another array unless it grows: a plan in flight may still name the former table.
        known.block_table = _changed(known.block_table, wire.block_table)
        return Chunk(
            known.request_id,
            unpack_token_ids(wire.token_ids),
            wire.start,
            known.block_table,
            known.sampling if wire.sampling else None,
            None if wire.extras is None else _extras(wire.extras, known),
            wire.drawn_by,
            None if wire.state is None else StateUse(*wire.state),
            None if wire.window is None else _window(*wire.window, known),
            wire.num_drafts or 0,
            wire.following,
        )


def _extras(wire: _WireExtras, known: _Received) -> ChunkExtras:
    known.history = _changed(known.history, wire.history)
    if isinstance(wire.mask, bytes):
        known.mask = wire.mask
    if wire.num_prompt_tokens is not None:
        known.num_prompt_tokens = wire.num_prompt_tokens
    if wire.num_top_logprobs is not None:
        known.num_top_logprobs = wire.num_top_logprobs
    if isinstance(wire.banned_token_ids, tuple):
        known.banned_token_ids = wire.banned_token_ids
    return ChunkExtras(
        known.history[:] if wire.has_history else None,
        known.num_prompt_tokens,
        known.banned_token_ids if wire.banned_token_ids else (),
        None if wire.prompt_targets is None else unpack_token_ids(wire.prompt_targets),
        known.num_top_logprobs,
        known.mask if wire.mask is not None else None,
        tuple(wire.draft_masks or ()),
        1 if wire.num_banned_rows is None else wire.num_banned_rows,
    )


def _window(first: int, change: _Change, known: _Received) -> WindowTable:
    known.window = _changed(known.window, change)
    return WindowTable(first, known.window[:])


def _changed(values: array[int], change: _Change) -> array[int]:
    """Return the changed values, in another array unless some are only appended. Raise DecodeError if they lack any."""
    if change is None:
        return values
    if isinstance(change, bytes):
        values.extend(unpack_token_ids(change))
        return values
    dropped, keep, appended = change
    if not 0 <= dropped <= dropped + keep <= len(values):
        raise DecodeError(f"{dropped} and {keep} values of {len(values)}")
    changed = values[dropped : dropped + keep]
    changed.extend(unpack_token_ids(appended))
    return changed
