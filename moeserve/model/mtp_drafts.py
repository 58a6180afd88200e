"""Draft tokens of an MTP layer, at the end of a step: the layer takes in what the step has computed, and goes on from
each sampled token.

The entry of a position in the layer's KV is made from the position's state and the token that follows. So all rows of a
step can be entered at its end, when the sampled tokens are known, and nothing is kept between steps. The last entry of
a cached block is that of the request which computed the block, whatever token follows in another one: that may make a
draft wrong, never a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeserve.model.decoder import Decoder, ForwardBatch, KvPools
from moeserve.model.paged_batch import make_batch
from moeserve.plan import Chunk, ChunkResult


@dataclass(frozen=True, slots=True)
class _Place:
    """A chunk that gets drafts. row: of its last right token among the rows of the step. position: of that row."""

    chunk: Chunk
    result: ChunkResult
    row: int
    position: int


class MtpDrafts:
    """Adds draft tokens to the results of steps, up to `num_drafts` for each chunk."""

    def __init__(self, decoder: Decoder, pools: KvPools, block_size: int, num_drafts: int) -> None:
        self._decoder, self._pools = decoder, pools
        self._block_size, self._num_drafts = block_size, num_drafts

    def add(self, chunks: Sequence[Chunk], results: Sequence[ChunkResult], batch: ForwardBatch, states: Tensor) -> None:
        """Enter all rows of a step, and add drafts to the results of chunks that were sampled.

        batch: of the step. states [T, hidden]: of all its rows, after the last norm. Mutate results and pools. Call it
        under ``torch.inference_mode``.
        """
        following, places = array("q"), list[_Place]()
        for chunk, result in zip(chunks, results, strict=True):
            first_row, tokens = len(following), result.tokens
            following.extend(iter(chunk.token_ids[1:]))
            following.append(chunk.following or 0)
            if tokens:
                last = len(chunk.token_ids) - chunk.num_sampled_rows + len(tokens) - 1
                # Rows behind it have taken in wrong drafts, and are computed again.
                following[first_row + last] = tokens[-1][0]
                places.append(_Place(chunk, result, first_row + last, chunk.start + last))
        entered = replace(batch, token_ids=torch.frombuffer(following, dtype=torch.int64))
        rows = torch.tensor([place.row for place in places], dtype=torch.int64)
        tokens_of, states = self._decoder.predict_next(entered, states, rows, self._pools)
        drafts = [[token] for token in tokens_of.tolist()]
        self._go_on(places, drafts, states)
        for place, found in zip(places, drafts, strict=True):
            place.result.drafts = tuple(found)

    def _go_on(self, places: Sequence[_Place], drafts: list[list[int]], states: Tensor) -> None:
        """Append further drafts, each predicted from the one before. states [S, hidden]: of the first ones.

        They are entered behind the request's tokens, as far as it holds slots; the next step overwrites these entries.
        """
        rows = list(range(len(places)))
        for count in range(1, self._num_drafts):
            going = [place for place, row in enumerate(rows) if self._has_slot(places[row], count)]
            states, rows = states[going], [rows[place] for place in going]
            if not rows:
                return
            chunks = [_draft_chunk(places[row], drafts[row][-1], count) for row in rows]
            batch = make_batch(chunks, self._block_size)
            every = torch.arange(len(rows))
            tokens, states = self._decoder.predict_next(batch, states, every, self._pools)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                drafts[row].append(token)

    def _has_slot(self, place: _Place, count: int) -> bool:
        """Return whether the position `count` behind a place has a slot, and an angle."""
        num_slots = len(place.chunk.block_table) * self._block_size
        return place.position + count < min(num_slots, self._decoder.max_model_len)


def _draft_chunk(place: _Place, token: int, count: int) -> Chunk:
    """Return the chunk that enters a draft at the position `count` behind a place."""
    chunk = place.chunk
    position = place.position + count
    return Chunk(chunk.request_id, array("i", [token]), position, chunk.block_table, None)
