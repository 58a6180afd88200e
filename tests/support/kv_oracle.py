"""An executor without tensors that knows what every KV slot must hold.

Instead of keys and values a slot stores the token and the namespace of the last write, and a digest of all tokens up to
it, by which keys and values differ behind different prefixes. A chunk may be computed only if its block table reads
back exactly the prefix of its own request, so a block that was freed, shared, rewritten, copied or published wrongly is
seen in the step that would have read it. The drawn token is a function of the whole prefix.

Window blocks hold the same cells. Of these a chunk reads back the tokens that its first one still sees.

A row of the pool of states holds the tokens that it has taken in. So a chunk that goes on from a wrong slot or from a
snapshot that was overwritten is seen in its step.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from zlib import crc32

from moeserve.engine.ranks.plan_link import PlanReceiver, PlanSender
from moeserve.plan import (
    Chunk,
    ChunkResult,
    FinishReason,
    Request,
    SamplingParams,
    StateUse,
    StepPlan,
    StepResult,
    TokenLogprobs,
    row_chunks,
)
from moeserve.thoughts import ThoughtBudget
from radix_cache import PrefixCache
from radix_cache.nodes import Node

Cell = tuple[int, int, str]  # the token, the digest of all tokens up to it, the namespace
POISON: Cell = (-1, -1, "poison")
FAILED = -1
SPOILT = array("i", [-7])


def draw(prefix: array[int], seed: int, vocab_size: int, banned: Collection[int] = ()) -> int:
    """The token after `prefix`."""
    token = crc32(prefix.tobytes(), seed) % vocab_size
    while token in banned:
        token = (token + 1) % vocab_size
    return token


def mask_of(output: array[int]) -> bytes:
    """Return the mask after an output. It tells outputs apart and forbids nothing here."""
    return crc32(output.tobytes()).to_bytes(4, "little")


def undisturbed(
    prompt: list[int],
    sampling: SamplingParams,
    vocab_size: int,
    budget: ThoughtBudget | None = None,
    earlier: Sequence[int] = (),
) -> tuple[list[int], FinishReason]:
    """The output of a request that runs alone, in a plain loop without any scheduler. earlier: its first tokens."""
    tokens, output = array("i", [*prompt, *earlier]), list(earlier)
    while True:
        banned = sampling.stop_token_ids if len(output) < sampling.min_tokens else ()
        token = _closing_token(output, budget)
        if token is None:
            token = draw(tokens, sampling.seed, vocab_size, banned)
        tokens.append(token)
        output.append(token)
        if token in sampling.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) == sampling.max_tokens:
            return output, FinishReason.LENGTH


def _closing_token(output: list[int], budget: ThoughtBudget | None) -> int | None:
    """The next token of a thought whose budget is spent, by the output alone. The markers are one token each."""
    if budget is None:
        return None
    if budget.is_open:
        thought = output
    elif output[:1] == [*budget.form.opening.starts]:
        thought = output[1:]
    else:
        return None
    (end,) = budget.form.ends[0].starts
    num_over = len(thought) - budget.max_tokens
    return None if num_over < 0 or end in thought else budget.closing[num_over]


@dataclass
class Record:
    """A request as its client sees it. `history` is the prompt and every token told so far."""

    request: Request
    prompt: list[int]
    sampling: SamplingParams
    history: array[int]
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    budget: ThoughtBudget | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    earlier: Sequence[int] = ()  # the output of an earlier life


@dataclass
class _Submitted:
    plan: StepPlan
    records: list[Record]


class KvOracle:
    """Executes plans late: `submit` when a plan is made, `execute` just before its commit.

    It works on the decoded bytes of a plan, so whatever the scheduler does to its own arrays meanwhile shows. A chunk
    for which `fails`, asked once, is true writes poison and returns an error.
    """

    def __init__(
        self, cache: PrefixCache, vocab_size: int, *, run_ahead: bool = False, num_slots: int = 0, most_drafts: int = 0
    ) -> None:
        """num_slots: for states, 0 for a model without. most_drafts: of a chunk."""
        self._most_ahead = -(-most_drafts // cache.block_size)
        self._cache = cache
        self._num_slots = num_slots
        self.rows = [SPOILT] * (num_slots + cache.states.table.num_rows)
        self._run_ahead = run_ahead
        self._last_drawn: list[int] = []
        # Slots that a wrong draft has filled, which are written once more; of window blocks too.
        self._stale: set[tuple[int, int]] = set()
        self._stale_windows: set[tuple[int, int]] = set()
        self._size = cache.block_size
        self._vocab_size = vocab_size
        self.kv: list[list[Cell | None]] = [[None] * self._size for _ in range(cache.num_blocks)]
        num_windows = cache.windows.num_blocks
        self.window_kv: list[list[Cell | None]] = [[None] * self._size for _ in range(num_windows)]
        self._in_flight: deque[_Submitted] = deque()
        self._sender, self._receiver = PlanSender(), PlanReceiver()
        self.fails: Callable[[Chunk], bool] = lambda chunk: False
        self.num_computed_tokens = 0

    def submit(self, plan: StepPlan, records: list[Record]) -> None:
        """Takes a plan; `records[i]` is who chunk i belongs to."""
        copy = self._receiver.decode(self._sender.encode(plan))
        assert copy == plan
        for chunk in copy.chunks:
            # The receiver's table grows with later plans.
            chunk.block_table = chunk.block_table[:]
        assert len({id(record) for record in records}) == len(records)
        zeroed, zeroed_windows = copy.zeroed_blocks.tolist(), copy.zeroed_windows.tolist()
        assert len(set(zeroed)) == len(zeroed)
        assert len(set(zeroed_windows)) == len(zeroed_windows)
        assert len(zeroed_windows) == (len(zeroed) if self.window_kv else 0)
        for earlier in self._in_flight:
            going_on = {id(record) for record in records}
            for chunk, record in zip(earlier.plan.chunks, earlier.records, strict=True):
                if not self._run_ahead and id(record) in going_on:
                    assert chunk.sampling is None, "a request goes on behind a token that is not known"
                assert not set(zeroed) & set(chunk.block_table), "a block of a plan in flight changed hands"
                if chunk.window is not None:
                    named = set(chunk.window.blocks)
                    assert not set(zeroed_windows) & named, "a window block of a plan in flight changed hands"
        for chunk, record in zip(copy.chunks, records, strict=True):
            self._check_chunk(chunk, record)
        self._check_rows(copy)
        self._in_flight.append(_Submitted(copy, records))

    def execute(self, live: list[Record]) -> StepResult:
        """Computes the oldest plan. `live` are all records whose request may hold blocks."""
        submitted = self._in_flight.popleft()
        plan, records = submitted.plan, submitted.records
        num_holders: dict[int, int] = {}
        for record in live:
            for block in record.request.lease.block_ids if record.request.lease else ():
                num_holders[block] = num_holders.get(block, 0) + 1
        sources, targets = plan.copied_blocks[::2], plan.copied_blocks[1::2]
        assert len({*sources}) + len(targets) == len({*sources, *targets}), "a copy reads or overwrites another one"
        for source, target in zip(sources, targets, strict=True):
            self.kv[target] = self.kv[source][:]
            self._stale |= {(target, offset) for offset in range(self._size)}
        for block in plan.zeroed_blocks:
            self.kv[block] = [None] * self._size
            self._stale -= {(block, offset) for offset in range(self._size)}
        for block in plan.zeroed_windows:
            self.window_kv[block] = [None] * self._size
            self._stale_windows -= {(block, offset) for offset in range(self._size)}
        for chunk in plan.chunks:
            if chunk.drawn_by is not None:
                chunk.token_ids[0] = self._last_drawn[chunk.drawn_by]
        faults = [self.fails(chunk) for chunk in plan.chunks]
        for chunk, record, is_faulty in zip(plan.chunks, records, faults, strict=True):
            self._write(chunk, record, num_holders, is_faulty)
        results: list[ChunkResult] = []
        for chunk, record, is_faulty in zip(plan.chunks, records, faults, strict=True):
            if is_faulty:
                results.append(ChunkResult(error="the oracle fails this chunk"))
            else:
                self._check_prefix(chunk, record)
                results.append(self._compute(chunk))
        for chunk, is_faulty in zip(plan.chunks, faults, strict=True):
            self._take_in(chunk, is_faulty)
        self._last_drawn = []
        for chunk, result in zip(plan.chunks, results, strict=True):
            # Before the commit nothing follows a token that was drawn after drafts.
            drawn = [FAILED if result.token_id is None else result.token_id] + [FAILED] * chunk.num_drafts
            self._last_drawn += drawn[: chunk.num_sampled_rows]
            self._note_stale(chunk, len(result.further))
        self.num_computed_tokens += plan.num_tokens
        return StepResult(plan.step, results)

    def check_published(self) -> None:
        """Every block in the tree holds what the tree says of it."""
        tree, windows = self._cache.tree, self._cache.windows
        # With each node the number and the digest of the tokens before it.
        nodes: list[tuple[Node, int, int]] = [(root, 0, 0) for root in tree.roots.values()]
        for node, start, before in nodes:
            wanted = _blocks(bytes(node.tokens), before, node.namespace, self._size)
            held = [self.kv[block] for block in node.blocks]
            assert held == wanted, f"one of the blocks {node.blocks} was published with wrong contents"
            for block, want in zip(node.blocks, wanted, strict=True):
                if windows.has(block):
                    (window_block,) = windows.of([block])
                    assert self.window_kv[window_block] == want, f"window block {window_block} has wrong contents"
            after = wanted[-1][-1][1] if wanted else before
            nodes += [(child, start + len(node.blocks) * self._size, after) for child in node.children.values()]
            for snapshot in node.snapshots:
                prefix = array("i", tree.prefix(node))
                stop = start + snapshot.offset * self._size
                assert self.rows[snapshot.row] == prefix[:stop], f"snapshot {snapshot.row} is of another prefix"

    def _check_chunk(self, chunk: Chunk, record: Record) -> None:
        end = chunk.start + len(chunk.token_ids) - chunk.num_drafts
        history = record.history
        drafts = chunk.token_ids[end - chunk.start :]
        assert chunk.request_id == record.request.request_id
        assert len(chunk.token_ids) > 0
        if chunk.drawn_by is not None:
            assert self._run_ahead
            assert end == len(history) + 1 + self._num_drawn(chunk.request_id)
            assert chunk.token_ids.tolist() == [0]
            before = self._in_flight[-1].plan
            sampled = [other for other in before.chunks for _ in range(other.num_sampled_rows)]
            assert sampled[chunk.drawn_by].request_id == chunk.request_id
            assert not sampled[chunk.drawn_by].num_drafts
            assert record.sampling.max_tokens > len(history) + 1 - len(record.prompt)
        else:
            assert chunk.token_ids == history[chunk.start : end] + drafts
            assert (chunk.sampling is not None) == (end == len(history))
        if chunk.num_drafts:
            # With a recurrent state, tokens behind which the state was lost come again.
            assert end - chunk.start == 1 or chunk.state is not None
            assert chunk.drawn_by is None
            assert len(history) - len(record.prompt) + 1 + len(drafts) <= record.sampling.max_tokens
        num_blocks = -(-(end + len(drafts)) // self._size)
        # A wrong draft may have taken a block before the request needs it.
        assert num_blocks <= len(chunk.block_table) <= num_blocks + self._most_ahead, "too few blocks, or too many"
        assert len(set(chunk.block_table)) == len(chunk.block_table)
        if self._cache.windows.num_blocks:
            assert chunk.window is not None
            assert chunk.window.first == max(0, chunk.start // self._size - self._cache.windows.span)
            assert chunk.window.first + len(chunk.window.blocks) == len(chunk.block_table)
            assert len(set(chunk.window.blocks)) == len(chunk.window.blocks)
        num_output = len(history) - len(record.prompt) + (chunk.drawn_by is not None)
        banned = record.sampling.stop_token_ids if num_output < record.sampling.min_tokens else ()
        if chunk.sampling is None:
            assert chunk.extras is None or (chunk.extras.history, chunk.extras.banned_token_ids) == (None, ())
        else:
            assert chunk.sampling == record.sampling
            assert (chunk.extras.banned_token_ids if chunk.extras else ()) == banned
            if chunk.sampling.penalises:
                assert chunk.extras is not None
                assert chunk.extras.history == history
                assert chunk.extras.num_prompt_tokens == len(record.prompt)
            mask = mask_of(history[len(record.prompt) :]) if chunk.sampling.grammar is not None else None
            assert (chunk.extras.mask if chunk.extras else None) == mask
        if chunk.num_drafts:
            for row, of_row in enumerate(row_chunks(chunk)):
                self._check_row(of_row, record, history + drafts[:row])

    def _check_row(self, chunk: Chunk, record: Record, history: array[int]) -> None:
        """A row after drafts is sampled as the chunk that would be planned with this history."""
        sampling, output, extras = record.sampling, history[len(record.prompt) :], chunk.extras
        assert (chunk.start, chunk.token_ids, chunk.sampling) == (len(history) - 1, history[-1:], sampling)
        banned = sampling.stop_token_ids if len(output) < sampling.min_tokens else ()
        assert (extras.banned_token_ids if extras else ()) == banned
        assert (extras.history if extras else None) == (history if sampling.penalises else None)
        assert (extras.mask if extras else None) == (mask_of(output) if sampling.grammar is not None else None)

    def _check_rows(self, plan: StepPlan) -> None:
        """Slots have one user; a row in flight is neither written by a later plan nor read before its commit."""
        if not self._num_slots:
            assert all(chunk.state is None for chunk in plan.chunks)
            return
        uses = [state_of(chunk) for chunk in plan.chunks]
        slots = [use.slot for use in uses]
        named = [state_of(chunk).load for chunk in plan.chunks if not chunk.num_drafts]
        loads = [load for load in named if load is not None]
        former = [slot for chunk in plan.chunks for slot in _former(chunk)]
        saves = [use.save for use in uses if use.save]
        assert len({*slots, *former}) == len(slots) + len(former)
        assert all(0 <= slot < self._num_slots for slot in former)
        assert len(set(saves)) == len(saves)
        assert not set(loads) & set(saves), "a snapshot is read and written in one plan"
        assert all(0 <= slot < self._num_slots for slot in slots)
        assert all(self._num_slots <= row < len(self.rows) for row in (*loads, *saves))
        for earlier in self._in_flight:
            for chunk in earlier.plan.chunks:
                assert state_of(chunk).save not in (*loads, *saves), "a snapshot is used before its commit"
                assert state_of(chunk).load not in saves, "a snapshot that a plan in flight loads is overwritten"
                held = {state_of(chunk).slot, state_of(chunk).load}
                mine = [own for own in plan.chunks if held & {state_of(own).slot, *_former(own)}]
                assert all(own.request_id == chunk.request_id for own in mine), "a slot in flight changed hands"

    def _take_in(self, chunk: Chunk, is_faulty: bool) -> None:
        """Let the chunk's state take in its tokens."""
        use = chunk.state
        if use is None:
            return
        if is_faulty or chunk.token_ids[0] == FAILED:
            self.rows[use.slot] = SPOILT
        else:
            if use.load is not None:
                self.rows[use.slot] = self.rows[use.load]
            elif not chunk.start:
                self.rows[use.slot] = array("i")
            cells = [cell for block in chunk.block_table for cell in self.kv[block]][: chunk.start]
            assert self.rows[use.slot] == array("i", [cell[0] for cell in cells if cell]), (
                "a chunk goes on from another state"
            )
            self.rows[use.slot] = self.rows[use.slot] + chunk.token_ids
        if use.save is not None:
            self.rows[use.save] = self.rows[use.slot]

    def _num_drawn(self, request_id: str) -> int:
        """How many tokens plans in flight but the last will draw for a request."""
        earlier = [chunk for submitted in list(self._in_flight)[:-1] for chunk in submitted.plan.chunks]
        return sum(chunk.request_id == request_id and chunk.sampling is not None for chunk in earlier)

    def _write(self, chunk: Chunk, record: Record, num_holders: dict[int, int], is_faulty: bool) -> None:
        lease = record.request.lease
        assert lease is not None, "blocks of a plan in flight were released"
        # Where a later plan names the request too, full blocks may have been exchanged for equal ones, and more leased.
        first = chunk.start // self._size
        held, named = lease.block_ids[first : len(chunk.block_table)], chunk.block_table[first:]
        assert held == named, "a block table changed under a plan in flight"
        assert lease.num_published_tokens <= chunk.start, "a published slot would be written"
        namespace = record.request.namespace
        place, offset = divmod(chunk.start - 1, self._size)
        last = self.kv[chunk.block_table[place]][offset] if chunk.start else None
        cells = _cells(chunk.token_ids, 0 if last is None else last[1], namespace)
        for position, cell in enumerate([POISON] * len(cells) if is_faulty else cells, chunk.start):
            block = chunk.block_table[position // self._size]
            offset = position % self._size
            assert num_holders[block] == 1, "a slot that another request reads would be written"
            is_free = self.kv[block][offset] is None or (block, offset) in self._stale
            assert is_free, "a slot is written twice, or was not cleared"
            self._stale.discard((block, offset))
            self.kv[block][offset] = cell
            if chunk.window is not None:
                block = chunk.window.blocks[position // self._size - chunk.window.first]
                window = self.window_kv[block]
                is_free = window[offset] is None or (block, offset) in self._stale_windows
                assert is_free, "a slot of a window block is written twice, or was not cleared"
                self._stale_windows.discard((block, offset))
                window[offset] = cell

    def _note_stale(self, chunk: Chunk, num_right: int) -> None:
        """Record the slots of a chunk's drafts that were wrong, or whose request had its last token before them."""
        end = chunk.start + len(chunk.token_ids)
        first = end - chunk.num_drafts + num_right
        if chunk.state is not None and num_right < chunk.num_drafts:
            first = chunk.start  # The state is lost, so all of it comes again.
        for position in range(first, end):
            place, offset = divmod(position, self._size)
            self._stale.add((chunk.block_table[place], offset))
            if chunk.window is not None:
                self._stale_windows.add((chunk.window.blocks[place - chunk.window.first], offset))

    def _check_prefix(self, chunk: Chunk, record: Record) -> None:
        if record.request.failed:
            return  # a chunk before it has written nothing, and its own result is dropped
        end = chunk.start + len(chunk.token_ids)
        namespace = record.request.namespace
        held = [cell for block in chunk.block_table for cell in self.kv[block]][:end]
        tokens = record.history[: end - chunk.num_drafts] + chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
        if chunk.drawn_by is not None and record.request.finished:
            if chunk.token_ids[0] == FAILED:
                return
            # The request ended before it was told the token that this chunk goes on with.
            tokens = tokens[: chunk.start] + chunk.token_ids
        if POISON in held and record.request.finished:
            return  # An earlier chunk failed while this one was in flight.
        want = _cells(tokens, 0, namespace)
        assert held == want, "the block table does not read back the prefix of its request"
        if chunk.window is not None:
            seen = [cell for block in chunk.window.blocks for cell in self.window_kv[block]]
            first = chunk.window.first * self._size
            assert seen[: end - first] == want[first:], "the window does not read back the tokens before the chunk"

    def _compute(self, chunk: Chunk) -> ChunkResult:
        result = ChunkResult()
        extras = chunk.extras
        if extras is not None and extras.prompt_targets is not None:
            result.prompt_logprobs = [
                TokenLogprobs(-1.0 - position, ((target, -1.0 - position),))
                for position, target in enumerate(extras.prompt_targets, chunk.start + 1)
            ]
        sampling = chunk.sampling
        if sampling is not None:
            cells = [cell for block in chunk.block_table for cell in self.kv[block]]
            drafts = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
            further = []
            for number, row in enumerate(row_chunks(chunk)):
                end = row.start + len(row.token_ids)
                prefix = array("i", [cell[0] for cell in cells[:end] if cell is not None])
                token = draw(prefix, sampling.seed, self._vocab_size, row.extras.banned_token_ids if row.extras else ())
                logprobs = None if sampling.logprobs is None else TokenLogprobs(-0.5)
                if number == 0:
                    result.token_id, result.logprobs = token, logprobs
                else:
                    further.append((token, logprobs))
                # The next row counts only if it goes on with the drawn token.
                if number < chunk.num_drafts and drafts[number] != token:
                    break
            result.further = tuple(further)
        return result


def _digest(before: int, token: int) -> int:
    """Return the digest of some tokens and one behind them. before: the digest of these; 0 for none."""
    return (before * 1_000_003 + token + 1) % (2**61 - 1)


@lru_cache(maxsize=1 << 16)
def _cell(token: int, digest: int, namespace: str) -> Cell:
    """Return equal cells as one object: these are compared at once."""
    return token, digest, namespace


def _cells(tokens: array[int], before: int, namespace: str) -> list[Cell]:
    """Return the cells of tokens behind others with a digest."""
    digests = accumulate(tokens, _digest, initial=before)
    next(digests)
    return [_cell(token, digest, namespace) for token, digest in zip(tokens, digests, strict=True)]


@lru_cache(maxsize=1 << 12)
def _blocks(tokens: bytes, before: int, namespace: str, size: int) -> list[list[Cell]]:
    """Return the contents of the blocks of a run. tokens: as int32. before: the digest of the tokens before the run."""
    cells = _cells(array("i", tokens), before, namespace)
    return [cells[first : first + size] for first in range(0, len(cells), size)]


def state_of(chunk: Chunk) -> StateUse:
    """Return where a chunk of a model with recurrent layers keeps its state."""
    assert chunk.state is not None
    return chunk.state


def _former(chunk: Chunk) -> list[int]:
    """Return the slot with the state before a chunk with drafts; none for other chunks."""
    load = state_of(chunk).load
    return [load] if chunk.num_drafts and load is not None else []
