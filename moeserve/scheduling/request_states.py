"""The recurrent states of one rank's requests: their slots, where snapshots are saved, and which requests wait.

A state can be saved only where a chunk ends, so chunks are cut where a snapshot is wanted: at the last block boundary
of a prompt, from which an equal or longer prompt continues; where the prompt leaves the cached prefix (a branching
point: another request came this far and left no state, or will branch there); at borders that the frontend or the
client marks; and now and then in a very long prompt. While it decodes, a request saves a snapshot now and then, for the
next turn of the conversation, and drops the previous one.

Draft tokens go into a copy of the state, in a slot that is free. If all are right the request goes on there. If not, it
goes on from its former slot, with the tokens since then computed again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from moeserve.plan import Chunk, Request, StateUse
from radix_cache import PrefixCache, Snapshot

# A snapshot costs a copy and, in a prompt, a step that ends early: about as much as computing this many tokens.
MIN_GAIN_TOKENS = 32
# Tokens between snapshots while decoding. A copy moves twice the state, 0.1 GB for the models in use, and a step at
# least 1 GB of weights, so that copies take less than 1 % of it.
DECODE_INTERVAL_TOKENS = 64

# Tokens between snapshots within a prompt, for prompts that diverge from it where none was kept. On the Mooncake trace
# 8192 and 32768 tokens save less computing.
PROMPT_INTERVAL_TOKENS = 16384

# (start, known, marks, last, smallest gain) -> positions; see `wanted_positions`.
ChoosePositions = Callable[[int, int, Iterable[int], int, int], list[int]]


def wanted_positions(start: int, known: int, marks: Iterable[int], last: int, min_gain: int) -> list[int]:
    """Return the positions at which to save while computing a request's known tokens, in order.

    All are block boundaries: start, where the request begins to compute; known, where the cached KV of its tokens ends;
    marks, further positions; last, the last boundary before its last token. Each position is at least `min_gain` tokens
    after the previous position; of two that are closer the first stays, since it serves more prompts.
    """
    chosen = []
    above = start
    for position in sorted({known, last, *marks}):
        if position <= last and position - above >= min_gain:
            chosen.append(position)
            above = position
    return chosen


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """The number of state slots of each rank (the first rows of its pool), and the positions of snapshots.

    min_gain: a snapshot is saved if it spares an equal prompt at least this number of tokens. decode_interval: tokens
    between snapshots while decoding, at least a block. prompt_interval: the same within a prompt. foresees: True if a
    request also saves where requests that wait, or are behind it, will diverge from its prompt.
    """

    num_slots: int
    min_gain: int = MIN_GAIN_TOKENS
    decode_interval: int = DECODE_INTERVAL_TOKENS
    prompt_interval: int = PROMPT_INTERVAL_TOKENS
    choose: ChoosePositions = wanted_positions
    foresees: bool = True


@dataclass(eq=False, slots=True)
class _State:
    """The recurrent state of a request that has a slot.

    `is_fresh`: no plan has used the slot yet, so the first plan loads the lease's snapshot, if there is one. `wanted`:
    the positions at which to save, in order. `saving`: the positions of saves in flight. `above`: the last position at
    which the request found or saved a snapshot. `resumed`: the snapshot from which it continued, until it has saved one
    itself. `rolling`: the last snapshot saved while decoding. `lost_until`: the tokens before this position have been
    computed, but the state behind them is lost, because a wrong draft went into it; they are computed once more.
    """

    slot: int
    above: int
    wanted: list[int]
    saving: list[int] = field(default_factory=list)
    is_fresh: bool = True
    resumed: Snapshot | None = None
    rolling: Snapshot | None = None
    lost_until: int = 0


class NoStates:
    """The recurrent states of requests where no layer is recurrent: none is needed."""

    are_needed = False

    @property
    def num_free(self) -> float:
        """The number of slots that are free. A chunk with drafts needs one."""
        return inf

    def enter(self, request: Request) -> None:
        """Give a slot to a request that has a new lease, if one is free."""

    def leave(self, request: Request) -> None:
        """Take back the slot of a request that no plan in flight names."""

    def has_slot(self, request: Request) -> bool:
        """Return whether a request with a lease has a slot, or needs none."""
        return True

    def num_lost_tokens(self, request: Request) -> int:
        """Count the request's pending tokens that were computed before, and lost with the state."""
        return 0

    def find_positions(self, request: Request) -> None:
        """Choose the positions at which the request saves, after its lease has found a prefix or a longer one."""

    def cut(self, request: Request, count: int) -> int:
        """Return the number of the next `count` tokens for a chunk, so that it ends where a snapshot is wanted."""
        return count

    def draft_room(self, request: Request) -> float:
        """Return how many drafts may follow the request's known tokens."""
        return inf

    def use(self, request: Request, count: int, num_drafts: int) -> StateUse | None:
        """Plan the use of the state by the chunk of the request's next `count` tokens, which is planned now.

        num_drafts: the number of drafts behind them, for which a slot is free; see `draft_room`.
        """
        return None

    def commit(self, request: Request, chunk: Chunk, *, keep: bool) -> None:
        """End the chunk's load, and put the saved snapshot into the tree if it is to be kept.

        keep: False if the request failed or has ended, or if one of the chunk's drafts was wrong. To be called after
        the chunk's blocks were published.
        """

    def want(self, request: Request, position: int) -> int:
        """Let the request save a snapshot at `position`, a block boundary, unless it does so shortly before.

        Return the last position, up to `position`, at which it saves or will save; 0 if there is none.
        """
        return 0

    def follows(self, request: Request, other: Request, num_common: int) -> bool:
        """Return whether `request` should wait until `other`, which is ahead of it, has saved a snapshot for both.

        num_common: the tokens that both begin with, in whole blocks. `other` will save a snapshot there.
        """
        return False

    def check_idle(self) -> None:
        """Raise AssertionError unless every slot is free and no snapshot is being written, as when nothing runs."""


class RequestStates(NoStates):
    """Gives requests their slots and their chunks a `StateUse`.

    A slot belongs to a request as long as its lease. A snapshot that a plan in flight loads stays pinned; a snapshot
    that it saves enters the tree with its commit.
    """

    are_needed = True

    def __init__(self, cache: PrefixCache, policy: StatePolicy) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._policy = policy
        self._min_gain = max(1, policy.min_gain)
        self._decode_interval = max(1, policy.decode_interval // cache.block_size) * cache.block_size
        self._prompt_interval = max(1, policy.prompt_interval // cache.block_size) * cache.block_size
        self._free = list(range(policy.num_slots - 1, -1, -1))
        self._states: dict[Request, _State] = {}  # of the requests that have a slot

    def enter(self, request: Request) -> None:
        if self._free:
            self._states[request] = _State(self._free.pop(), 0, [])
            self.find_positions(request)

    def leave(self, request: Request) -> None:
        if (state := self._states.pop(request, None)) is not None:
            self._free.append(state.slot)

    def has_slot(self, request: Request) -> bool:
        return request in self._states

    def num_lost_tokens(self, request: Request) -> int:
        return max(0, self._of(request).lost_until - request.num_planned_tokens)

    def find_positions(self, request: Request) -> None:
        lease, state, size = request.held, self._of(request), self._block_size
        state.is_fresh = True
        state.above = lease.num_published_tokens
        if not self._cache.states.are_kept:
            return
        last = (len(request.token_ids) - 1) // size * size
        marks = list(range(0, last, self._prompt_interval))
        retained = (num_tokens for num_tokens, _ in request.asked.cache.retentions)
        marks += [num_tokens // size * size for num_tokens in (*request.asked.cache.borders, *retained)]
        state.wanted = self._policy.choose(state.above, lease.num_known_tokens, marks, last, self._min_gain)

    def cut(self, request: Request, count: int) -> int:
        state = self._of(request)
        start = request.num_planned_tokens
        return next((min(count, position - start) for position in state.wanted if position > start), count)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def draft_room(self, request: Request) -> int:
        """Return how many drafts may follow the request's known tokens.

        None goes beyond the next boundary at which a request that decodes may save. So a request computes no more than
        the tokens between two of these once more, however many of its drafts are wrong.
        """
        state = self._of(request)
        return 0 if state.is_fresh else -len(request.token_ids) % self._decode_interval

    def use(self, request: Request, count: int, num_drafts: int) -> StateUse:
        lease, state = request.held, self._of(request)
        use = StateUse(state.slot)
        if num_drafts:
            use = StateUse(self._free.pop(), load=state.slot)
        elif state.is_fresh:
            use.load = self._cache.states.begin_load(lease)
            state.resumed = lease.snapshot
            state.is_fresh = False
        end = request.num_planned_tokens + count + num_drafts
        if self._is_wanted(request, state, end):
            use.save = self._cache.states.take(lease, end)
            if use.save is not None:
                state.saving.append(end)
                if not num_drafts:
                    state.above = end
        while state.wanted and state.wanted[0] <= end:
            del state.wanted[0]
        return use

    def commit(self, request: Request, chunk: Chunk, *, keep: bool) -> None:
        lease, state, use = request.held, self._of(request), chunk.state
        assert use is not None
        if chunk.num_drafts:
            self._settle(request, state, use, all_right=keep)
        elif use.load is not None:
            self._cache.states.end_load(lease)
        if use.save is None:
            return
        position = state.saving.pop(0)
        if not keep:
            self._cache.states.drop_row(use.save)
            return
        state.above = max(state.above, position)
        # While decoding a snapshot follows another: the last one is written when the request ends.
        snapshot = self._cache.states.keep(lease, use.save, position, to_lower=chunk.sampling is None)
        if state.resumed is not None and snapshot is not None:
            self._cache.states.supersede(state.resumed)
            state.resumed = None
        if chunk.sampling is not None:
            if state.rolling is not None and state.rolling is not snapshot:
                self._cache.states.drop_unused(state.rolling)
            is_own = snapshot is not None and snapshot.row == use.save
            state.rolling = snapshot if is_own else None

    def _settle(self, request: Request, state: _State, use: StateUse, *, all_right: bool) -> None:
        """Go on in the slot with the drafts of a committed chunk if they were all right, else in the one before."""
        if all_right:
            self._free.append(state.slot)
            state.slot = use.slot
        else:
            self._free.append(use.slot)
            state.lost_until = len(request.token_ids) - 1 - request.num_forced_tokens

    def want(self, request: Request, position: int) -> int:
        state = self._states.get(request)
        if state is None or not self._cache.states.are_kept:
            return 0
        best = max((p for p in (*state.saving, *state.wanted) if p <= position), default=0)
        is_ahead = self._policy.foresees and position > request.num_planned_tokens
        if is_ahead and position - max(best, state.above) >= self._min_gain:
            insort(state.wanted, position)
            return position
        return best

    def follows(self, request: Request, other: Request, num_common: int) -> bool:
        start = request.num_planned_tokens
        if other.num_planned_tokens <= start or num_common - start < self._min_gain:
            return False
        return self.want(other, num_common) - start >= self._min_gain

    def check_idle(self) -> None:
        num_held, num_written = self._policy.num_slots - len(self._free), self._cache.states.table.num_written
        if num_held or num_written:
            raise AssertionError(f"idle, but {num_held} slots are held and {num_written} snapshots being written")

    def _of(self, request: Request) -> _State:
        return self._states[request]

    def _is_wanted(self, request: Request, state: _State, end: int) -> bool:
        if end < len(request.token_ids):
            return end in state.wanted
        return end % self._decode_interval == 0 and end - state.above >= self._min_gain
