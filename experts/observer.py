"""The interface of everything that observes a rank's steps and the layers with experts in them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


class PlannedChunk(Protocol):
    """One request's rows in a step."""

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> array[int]: ...


class PlannedStep(Protocol):
    """The part of a plan that observers read: its chunks in the order of their rows."""

    @property
    def chunks(self) -> Sequence[PlannedChunk]: ...


Plan_contra = TypeVar("Plan_contra", contravariant=True)
Result_contra = TypeVar("Result_contra", contravariant=True)


class StepObserver(Generic[Plan_contra, Result_contra]):
    """Observes the steps of one rank. Every method does nothing by default.

    Methods are called in the order below, in the thread that computes: `gated`, `chose`, `arrived` and `attended` once
    per layer with experts, which `layer` numbers from 0, `passed` once per layer of any kind. A step whose layers are
    computed in one call has `chose_all` in place of all of these, unless an observer has `gated` or `attended`. The
    next step begins after `launched`; on a device with a queue it may begin before `end`. Steps end in their order; if
    one fails, `abandon` comes in place of its `end`. Replaying a CUDA graph calls no method of its layers.
    """

    def begin(self, plan: Plan_contra) -> None:
        """Observe that a step begins."""

    def gated(self, layer: int, x: Tensor, expert_ids: Tensor) -> None:
        """Observe the gate's input x [T, H] and its choice, as `chose`, before any expert computes."""

    def chose(self, layer: int, expert_ids: Tensor) -> None:
        """Observe the gate's choice [T, k] int64 for the rank's own rows. T is 0 if it has only rows of other ranks."""

    def chose_all(self, expert_ids: Tensor) -> None:
        """Observe the choices of all gates [R, k] int64, layer by layer and row by row; all layers have experts.

        All layers but the last have the same rows. The last one has the rows that need logits.
        """

    def arrived(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        """Observe the rows of all ranks that this rank computes. Called only where some experts are not in memory.

        x: [M, H]. expert_ids: [M, k], -1 for remote experts. weights: [M, k]. The experts that these rows miss are
        loading by now, ahead of anything that observers ask for.
        """

    def attended(self, layer: int, residual: Tensor, shared: Tensor | None) -> None:
        """Observe the residual stream without the layer's chosen experts. They load meanwhile where they may be absent
        and there is a shared expert; else they may be computed already.

        residual: [T, H], after attention, later changed in place. shared: [T, H], the output of the shared expert, None
        if the layer has none.
        """

    def passed(self) -> None:
        """Observe that a layer, with or without experts, is computed or queued on the device."""

    def launched(self) -> None:
        """Observe that all layers of the step are computed, or queued on the device."""

    def end(self, plan: Plan_contra, result: Result_contra) -> None:
        """Observe the result of a step. An observer may add to it."""

    def abandon(self, plan: Plan_contra) -> None:
        """Observe that a step that had begun has failed. It may be computed again, in parts, which begin anew."""


AnyObserver = StepObserver[Any, Any]


def observes_states(observer: AnyObserver) -> bool:
    """Return True if the observer reads states between the layers of a step, which change behind it."""
    kind = type(observer)
    return kind.gated is not StepObserver.gated or kind.attended is not StepObserver.attended
