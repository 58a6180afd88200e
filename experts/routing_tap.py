"""Keeps what the gates of a step chose, for those who want it as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from experts.observer import AnyObserver


class HeardIds:
    """The expert ids that the gates of one step gave out, turned into bytes when somebody wants them.

    It holds references: who gathers many steps at a time pays less, and nobody may write into such ids.
    """

    __slots__ = ("_ids", "_narrow")

    def __init__(self, ids: Sequence[Tensor], narrow: torch.dtype) -> None:
        """ids: [T, k] of each layer that computed something. narrow: the dtype of the bytes."""
        self._ids = ids
        self._narrow = narrow

    def __bytes__(self) -> bytes:
        """Layer after layer and row after row, k per row; see `experts.routing.unpack`.

        A layer has as many rows as it computed: the last one often fewer, or none.
        """
        ids = self.joined()
        return b"" if ids is None else ids.cpu().numpy().tobytes()

    def joined(self) -> Tensor | None:
        """[R, k] of the rows of all layers, where the ids are; None if no layer computed anything."""
        return torch.cat([*self._ids]).to(self._narrow) if self._ids else None


class RoutingTap(AnyObserver):
    """Keeps the expert ids of the step that runs, one tensor per layer. The runner takes them into its results."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        """num_layers: those with experts."""
        self._chosen: list[Tensor | None] = [None] * num_layers
        self._narrow = torch.uint8 if num_experts <= 256 else torch.int16

    def chose(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        self._chosen[layer] = expert_ids

    def clear(self) -> None:
        """Forget what was heard: a step begins."""
        self._chosen = [None] * len(self._chosen)

    def take(self) -> HeardIds:
        """What was heard since `clear`; the tap forgets it."""
        heard = [ids for ids in self._chosen if ids is not None]
        self.clear()
        return HeardIds(heard, self._narrow)
