"""Observes the steps of a rank: where they begin and end, and what the layers with experts compute in between."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


class PlannedChunk(Protocol):
    """One request's rows in a step. annotation: the signature of its cached prefix, when it begins behind one."""

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> array[int]: ...

    @property
    def annotation(self) -> bytes | None: ...


class PlannedStep(Protocol):
    """The part of a plan that observers read: its chunks in the order of their rows."""

    @property
    def chunks(self) -> Sequence[PlannedChunk]: ...


Plan_contra = TypeVar("Plan_contra", contravariant=True)
Result_contra = TypeVar("Result_contra", contravariant=True)


class StepObserver(Generic[Plan_contra, Result_contra]):
    """Observes the steps of one rank. By default it does nothing.

    A step's events come in the order of these methods, the middle three of them once a layer; layers go by their places
    among those with experts. All events of a step but `end` come before the next one begins, in the thread that
    computes; `end` comes for the steps in their order, but on a device with a queue the next one may have begun. A CUDA
    graph that is replayed tells nothing of its layers.
    """

    def begin(self, plan: Plan_contra) -> None:
        """A step begins."""

    def chose(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        """The gate chose for the rank's own rows: x [T, H], expert_ids [T, k] int64, weights [T, k] fp32.

        No expert has computed yet. T is 0 where a rank of several has no rows and its experts serve the others.
        """

    def arrived(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        """The rows of all ranks that are computed here: x [M, H], expert_ids and weights [M, k], -1 for experts
        elsewhere.

        Only where some experts are not in memory. Those that these rows miss are being loaded by now, before anything
        that observers ask for.
        """

    def after(self, layer: int, residual: Tensor) -> None:
        """The layer is computed, which is not the last one. residual: [T, H], which goes on to change in place."""

    def launched(self) -> None:
        """All layers of the step are computed, or queued on the device."""

    def end(self, plan: Plan_contra, result: Result_contra) -> None:
        """The result of a step is there, and may be added to."""


AnyObserver = StepObserver[Any, Any]
