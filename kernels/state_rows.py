"""The rows of a step that belong to each recurrent state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """The chunks of a step: chunk c has the rows first_rows[c] ... first_rows[c + 1] - 1, its state lies in slots[c].

    first_rows: [C + 1], slots: [C], on the device, int64, or int32 on a GPU. max_rows: the rows of the longest chunk.
    No two chunks share a slot, and every chunk has a row. On a GPU a chunk with slot -1 pads the batch.
    """

    first_rows: Tensor
    slots: Tensor
    max_rows: int

    def __iter__(self) -> Iterator[tuple[slice, int]]:
        bounds = self.first_rows.tolist()
        for first, end, slot in zip(bounds, bounds[1:], self.slots.tolist(), strict=False):
            yield slice(first, end), slot

    def places_of(self, states: Tensor) -> tuple[int, int, int, int, int]:
        """Return the arguments of the compiled kernels: where states [num_slots, ...] and the chunks lie in memory."""
        slots = self.slots
        return states.data_ptr(), states.stride(0), self.first_rows.data_ptr(), slots.data_ptr(), len(slots)
