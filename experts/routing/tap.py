"""Keeps the expert ids that the gates of a step chose, for the results of steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from experts.observer import AnyObserver


class HeardIds:
    """The expert ids that the gates of one step chose, converted to bytes on demand.

    It holds references to the gates' tensors, which therefore must not be written to. Converting many steps at a time
    costs less than converting each at once.
    """

    __slots__ = ("_ids", "_narrow")

    def __init__(self, ids: Sequence[Tensor], narrow: torch.dtype) -> None:
        """ids: [T, k] of each layer that computed any row, or of several layers, one after another.

        narrow: the dtype of the bytes.
        """
        self._ids = ids
        self._narrow = narrow

    def __bytes__(self) -> bytes:
        """Return the ids layer by layer and row by row, k per row; see `experts.routing.choices.unpack`.

        Each layer has as many rows as it computed: the last layer often fewer than the others, or none.
        """
        ids = self.joined()
        return b"" if ids is None else ids.cpu().numpy().tobytes()

    def joined(self) -> Tensor | None:
        """Return the ids of all layers, [R, k] on the device of the ids; None if no layer computed any row."""
        return torch.cat([*self._ids]).to(self._narrow) if self._ids else None


class RoutingTap(AnyObserver):
    """Keeps the expert ids of the step that runs, one tensor per layer. The runner takes them into its results."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        """num_layers: the number of layers with experts."""
        self._num_layers = num_layers
        self._chosen: list[Tensor | None] = [None] * num_layers
        self._narrow = torch.uint8 if num_experts <= 256 else torch.int16

    def chose(self, layer: int, expert_ids: Tensor) -> None:
        self._chosen[layer] = expert_ids

    def chose_all(self, expert_ids: Tensor) -> None:
        self.clear()
        self._chosen[0] = expert_ids

    def clear(self) -> None:
        """Forget the ids of an earlier step. Called before a step."""
        self._chosen = [None] * self._num_layers

    def abandon(self, plan: object) -> None:
        self.clear()

    def take(self) -> HeardIds:
        """Return the ids since `clear`, and forget them."""
        chosen = [ids for ids in self._chosen if ids is not None]
        self.clear()
        return HeardIds(chosen, self._narrow)
