"""The work list of split-KV attention, made on the device once per step and used by every layer.

Each sequence's context is cut into chunks at multiples of the chunk length, each piece of work being one chunk seen by
one tile of query tokens. Lengths are read on the device and the list has a fixed capacity, so a captured graph stays
valid while lengths change; a ragged batch becomes pieces of at most one size. With a fixed chunk length a sequence's
result depends on nothing else in the batch. The other way, the chunk length is the one of least estimated time: waves
of programs times the length of a chunk (as in stream-K and FlashInfer's planner; Ye et al., 2025).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention_config import SplitConfig, power_of_two

# Of a program beside its positions, and of reading one more partial result; in positions. Estimates, not measured.
_PROGRAM_OVERHEAD = 128
_PARTIAL_OVERHEAD = 4
_MAX_CANDIDATES = 128


class SplitWork:
    """Who computes what: for piece w of work its sequence `sequences[w]`; sequence s has pieces from `offsets[s]` on.

    Every sequence with query tokens has at least one piece, so that empty ones get their zeros written too. The number
    of pieces is `offsets[num_seqs]`, at most `capacity`; programs beyond it return. `chunk` [1] is the chunk length.
    """

    __slots__ = (
        "_slots",
        "capacity",
        "chunk",
        "config",
        "fixed_chunk",
        "max_seqs",
        "offsets",
        "sequences",
        "tokens_per_tile",
        "window",
    )

    def __init__(
        self,
        max_seqs: int,
        max_tiles: int,
        max_len: int,
        programs_per_piece: int,
        config: SplitConfig,
        device: torch.device | str,
        *,
        num_sms: int,
        max_query_len: int = 1,
        tokens_per_tile: int = 1,
        window: int | None = None,
        fixed_chunk: int | None = None,
    ) -> None:
        """For batches of at most `max_seqs` sequences, `max_tiles` tiles of query tokens and `max_len` positions,
        `max_query_len` of them new.

        `programs_per_piece` is the number of KV heads (times head groups). `fixed_chunk`, a multiple of the tile, makes
        results independent of the batch; its capacity, and with it the number of programs that start only to return,
        grows with max_tiles * max_len / fixed_chunk. Raises ValueError for a chunk length that is no multiple.
        """
        if fixed_chunk is not None and (fixed_chunk <= 0 or fixed_chunk % config.tile):
            raise ValueError(f"the chunk length {fixed_chunk} is not a multiple of the tile {config.tile}")
        if window is not None and window <= 0:
            raise ValueError(f"the window {window} is not positive")
        self.max_seqs, self.config, self.window, self.fixed_chunk = max_seqs, config, window, fixed_chunk
        self.tokens_per_tile = tokens_per_tile
        self._slots = max(1, num_sms * config.programs_per_sm // programs_per_piece)
        if fixed_chunk is None:
            self.capacity = max_tiles + 2 * self._slots
        else:
            seen = max_len if window is None else min(max_len, window + max_query_len - 1)
            # A window may begin and end within a chunk.
            self.capacity = max_tiles * (-(-seen // fixed_chunk) + (window is not None))
        self.offsets = torch.zeros(max_seqs + 1, dtype=torch.int32, device=device)
        self.sequences = torch.zeros(self.capacity, dtype=torch.int32, device=device)
        self.chunk = torch.zeros(1, dtype=torch.int32, device=device)

    def update(self, seq_lens: Tensor, query_starts: Tensor | None = None) -> None:
        """Makes the list for `seq_lens` [S] int32, S <= max_seqs, the lengths with their new tokens.

        `query_starts` [S + 1] int32 are where each sequence's new tokens begin; without it each has one token.
        Launches one kernel and waits for nothing.
        """
        num_seqs = seq_lens.shape[0]
        if num_seqs > self.max_seqs:
            raise ValueError(f"{num_seqs} sequences where there is room for {self.max_seqs}")
        _plan_kernel[(1,)](
            seq_lens,
            seq_lens if query_starts is None else query_starts,
            self.offsets,
            self.sequences,
            self.chunk,
            num_seqs,
            self.capacity,
            self._slots,
            self.fixed_chunk or 0,
            self.config.min_chunk,
            self.window or 0,
            TOKENS=self.tokens_per_tile,
            ONE_QUERY=query_starts is None,
            STEP=self.config.tile,
            BLOCK_SEQS=max(16, power_of_two(self.max_seqs)),
            MAX_CANDIDATES=_MAX_CANDIDATES,
            PROGRAM_OVERHEAD=_PROGRAM_OVERHEAD,
            PARTIAL_OVERHEAD=_PARTIAL_OVERHEAD,
            num_warps=4,
        )


@triton.jit
def count_chunks(seq_len, query_len, chunk, window):
    """The first chunk that the earliest of `query_len` new tokens sees, and how many there are from it on (>= 1).

    `window` 0 is none.
    """
    visible = seq_len - query_len - window + 1
    first = tl.where((window > 0) & (visible > 0), visible, 0) // chunk
    return first, tl.maximum((seq_len + chunk - 1) // chunk - first, 1)


@triton.jit(
    do_not_specialize=[
        "seq_lens",
        "query_starts",
        "offsets",
        "sequences",
        "chunk_out",
        "num_seqs",
        "capacity",
        "slots",
        "fixed_chunk",
        "min_chunk",
        "window",
    ]
)
def _plan_kernel(
    seq_lens,
    query_starts,
    offsets,
    sequences,
    chunk_out,
    num_seqs,
    capacity,
    slots,
    fixed_chunk,
    min_chunk,
    window,
    TOKENS: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    PROGRAM_OVERHEAD: tl.constexpr,
    PARTIAL_OVERHEAD: tl.constexpr,
):
    """One program. Chooses the chunk length, counts the pieces of every sequence and writes whose each piece is."""
    index = tl.arange(0, BLOCK_SEQS)
    valid = index < num_seqs
    lengths = tl.load(seq_lens + index, mask=valid, other=0)
    if ONE_QUERY:
        query_lens = tl.where(valid, 1, 0)
    else:
        ends = tl.load(query_starts + index + 1, mask=valid, other=0)
        query_lens = ends - tl.load(query_starts + index, mask=valid, other=0)
    tiles = (query_lens + TOKENS - 1) // TOKENS

    longest = tl.max(lengths, 0)
    # One chunk for all fits always: the capacity is at least the number of tiles.
    best = tl.maximum((longest + STEP - 1) // STEP, 1) * STEP
    if fixed_chunk > 0:
        best = fixed_chunk
    else:
        least_cost = 0x7FFFFFFF
        for parts in range(1, tl.minimum(longest // min_chunk, MAX_CANDIDATES) + 1):
            chunk = ((longest + parts - 1) // parts + STEP - 1) // STEP * STEP
            _, chunks = count_chunks(lengths, query_lens, chunk, window)
            pieces = tl.sum(tiles * chunks, 0)
            waves = (pieces + slots - 1) // slots
            cost = waves * (chunk + PROGRAM_OVERHEAD) + parts * PARTIAL_OVERHEAD
            better = (pieces <= capacity) & (cost < least_cost)
            best = tl.where(better, chunk, best)
            least_cost = tl.where(better, cost, least_cost)
    tl.store(chunk_out, best)

    _, chunks = count_chunks(lengths, query_lens, best, window)
    counts = tiles * chunks
    ends = tl.cumsum(counts, 0)
    begins = ends - counts
    tl.store(offsets, 0)
    tl.store(offsets + index + 1, ends, mask=valid)
    for piece in range(0, tl.max(counts, 0)):
        tl.store(sequences + begins + piece, index, mask=(piece < counts) & (begins + piece < capacity))
