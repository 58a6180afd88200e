"""A plan's chunks as plain arrays, and the sizes to which decode batches are padded. No torch here."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from moeserve.plan import Chunk


def _int64() -> array[int]:
    return array("q")


def _int32() -> array[int]:
    return array("i")


@dataclass(frozen=True, slots=True)
class ExtendLimits:
    """The limits of prompts that attention computes as short extends.

    Each has at most `max_query_len` new tokens, and all of a step together take at most `max_tiles` tiles of
    `tokens_per_tile` tokens.
    """

    max_query_len: int
    tokens_per_tile: int
    max_tiles: int

    def run(self, query_lens: Sequence[int]) -> tuple[int, int]:
        """Return the places first, end of the longest run of neighbours computed as short extends; equal for none.

        It is the first such run. There is only one, because each run is two launches per layer; other prompts are
        computed like long ones.
        """
        best = (0, 0)
        first = tiles = 0
        for place, length in enumerate(query_lens):
            if length > self.max_query_len:
                first, tiles = place + 1, 0
                continue
            tiles += self._tiles(length)
            while tiles > self.max_tiles:
                tiles -= self._tiles(query_lens[first])
                first += 1
            if place + 1 - first > best[1] - best[0]:
                best = (first, place + 1)
        return best

    def _tiles(self, query_len: int) -> int:
        return -(-query_len // self.tokens_per_tile)


def share_prompts(prompt_lens: Sequence[int], extends: ExtendLimits | None) -> tuple[tuple[int, int] | None, int]:
    """Return the places (first, end) of prompts computed as short extends, or None, and the longest other length."""
    first, end = (0, 0) if extends is None else extends.run(prompt_lens)
    return (first, end) if first < end else None, max([*prompt_lens[:first], *prompt_lens[end:]], default=0)


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sequences with one new token each, then prompts. The last `num_logits` rows need logits."""

    num_decodes: int
    prompt_lens: tuple[int, ...]
    num_logits: int

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(self.prompt_lens)


@dataclass(slots=True)
class StepArrays:
    """Rows of a step, one chunk after another.

    Per row: token_ids, positions (rows of the table of rotary angles), slots. sources: the place of the row's token
    among the previous step's drawn tokens, -1 if `token_ids` holds the token; empty if no row has such a place. Per
    chunk: seq_lens (with the new tokens), query_starts (one entry more), block_tables; state_slots, empty for a model
    without recurrent states. The first `num_decodes` chunks have one token each. window_slots and window_tables are
    slots and block_tables for layers with window blocks, empty for a model without. Entries of blocks that no row sees
    repeat the first block that some row sees.
    """

    token_ids: array[int] = field(default_factory=_int64)
    positions: array[int] = field(default_factory=_int64)
    slots: array[int] = field(default_factory=_int64)
    sources: array[int] = field(default_factory=_int64)
    seq_lens: array[int] = field(default_factory=_int32)
    state_slots: array[int] = field(default_factory=_int64)
    query_starts: array[int] = field(default_factory=lambda: array("i", [0]))
    block_tables: list[array[int]] = field(default_factory=list)
    window_slots: array[int] = field(default_factory=_int64)
    window_tables: list[array[int]] = field(default_factory=list)
    num_decodes: int = 0
    max_query_len: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_lens(self) -> list[int]:
        """The numbers of new tokens of the chunks after the decodes."""
        starts = self.query_starts[self.num_decodes :]
        return [end - start for start, end in pairwise(starts)]


def step_arrays(chunks: Sequence[Chunk], block_size: int) -> StepArrays:
    """Return `chunks` as the arrays that a device computes with. Block tables are cut to the blocks that are in use."""
    arrays = StepArrays()
    leading = True
    for chunk in chunks:
        count = len(chunk.token_ids)
        first, last = chunk.start, chunk.start + count
        arrays.token_ids.extend(iter(chunk.token_ids))
        arrays.positions.extend(range(first, last))
        table = chunk.block_table
        _add_slots(arrays.slots, table, first, last, block_size)
        if chunk.window is not None:
            window = array("i", chunk.window.blocks[:1]) * chunk.window.first + chunk.window.blocks
            _add_slots(arrays.window_slots, window, first, last, block_size)
            arrays.window_tables.append(window)
        arrays.seq_lens.append(last)
        if chunk.state is not None:
            arrays.state_slots.append(chunk.state.slot)
        arrays.query_starts.append(arrays.num_rows)
        arrays.block_tables.append(table[: (last - 1) // block_size + 1])
        arrays.max_query_len = max(arrays.max_query_len, count)
        leading = leading and count == 1
        arrays.num_decodes += leading
    if any(chunk.drawn_by is not None for chunk in chunks):
        for chunk in chunks:
            source = -1 if chunk.drawn_by is None else chunk.drawn_by
            arrays.sources.extend([source] * len(chunk.token_ids))
    return arrays


def _add_slots(slots: array[int], table: array[int], first: int, last: int, block_size: int) -> None:
    for block in range(first // block_size, (last - 1) // block_size + 1):
        base = (table[block] - block) * block_size
        slots.extend(range(base + max(first, block * block_size), base + min(last, (block + 1) * block_size)))


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: 1, 2, 4, then multiples of 8 up to 256, of 16 beyond, and `max_num_seqs`."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 1, 16), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def padded_size(count: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of `sizes` (ascending) that is at least `count`; None for a count of 0 or above all sizes."""
    place = bisect_left(sizes, count)
    return sizes[place] if count and place < len(sizes) else None
