"""Observes the steps of a rank: where they begin and end, and what is computed in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kernels.activation import Activation

# Of a layer, as its dispatch takes them; on a CPU and on a GPU they are of different types.
Experts = TypeVar("Experts")
Dispatch = Callable[[Tensor, Tensor, Tensor, Experts, Activation], Tensor]


Plan_contra = TypeVar("Plan_contra", contravariant=True)
Result_contra = TypeVar("Result_contra", contravariant=True)


class StepObserver(Generic[Plan_contra, Result_contra]):
    """Observes the steps of one rank. By default it does nothing.

    `begin`, what the layers tell, and `launched` come for one step after the other, from the thread that computes.
    `end` comes for the steps in the same order, but on a device with a queue the next one may have begun.
    """

    def begin(self, plan: Plan_contra) -> None:
        """A step begins."""

    def chose(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        """The gate chose for x [T, H]: expert_ids [T, k] int64 and weights [T, k] fp32. No expert has computed yet.

        T is 0 in a step in which a rank of several has no rows.
        """

    def after(self, layer: int, residual: Tensor) -> None:
        """The layer is computed. residual: [T, H], which goes on to change in place. Not called for the last layer."""

    def launched(self) -> None:
        """All layers of the step that began last are computed, or queued on the device."""

    def end(self, plan: Plan_contra, result: Result_contra) -> None:
        """The result of a step is there, and may be added to."""


AnyObserver = StepObserver[Any, Any]


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
        """Layer after layer and row after row, k per row; see `step_routing.unpack`.

        A layer has as many rows as it computed: the last one often fewer, or none.
        """
        ids = self.joined()
        return b"" if ids is None else ids.cpu().numpy().tobytes()

    def joined(self) -> Tensor | None:
        """[R, k] of the rows of all layers, where the ids are; None if no layer computed anything."""
        return torch.cat([*self._ids]).to(self._narrow) if self._ids else None


class RoutingTap:
    """Keeps the expert ids of the step that runs, one tensor per sparse layer. Used by one thread."""

    __slots__ = ("_chosen", "_narrow", "_place")

    def __init__(self, sparse_layers: Sequence[int], num_experts: int) -> None:
        """sparse_layers: numbers of the layers with experts, ascending."""
        self._place = {layer: place for place, layer in enumerate(sparse_layers)}
        self._chosen: list[Tensor | None] = [None] * len(sparse_layers)
        self._narrow = torch.uint8 if num_experts <= 256 else torch.int16

    def around(self, dispatch_of: Callable[[int], Dispatch[Experts]]) -> Callable[[int], Dispatch[Experts]]:
        """The same dispatches, heard by this tap."""
        return lambda layer: self._around_one(layer, dispatch_of(layer))

    def begin(self) -> None:
        """Forgets what was heard: a step begins."""
        self._chosen = [None] * len(self._chosen)

    def take(self) -> HeardIds:
        """What was heard since `begin`; the tap forgets it."""
        heard = [ids for ids in self._chosen if ids is not None]
        self.begin()
        return HeardIds(heard, self._narrow)

    def _around_one(self, layer: int, inner: Dispatch[Experts]) -> Dispatch[Experts]:
        place = self._place[layer]

        def dispatch(
            x: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts, activation: Activation
        ) -> Tensor:
            self._chosen[place] = expert_ids
            return inner(x, expert_ids, weights, experts, activation)

        return dispatch
