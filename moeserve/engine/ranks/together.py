"""How ranks begin a step together: all replay a captured graph of one size, or each computes its own rows.

Ranks need no messages to agree: the choice follows from the numbers of rows of all ranks, which each rank knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moeserve.model.step_arrays import padded_size
from moeserve.plan import StepPlan

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from experts.parallel.collectives import Collectives, Traffic
    from experts.parallel.dispatch import ExpertParallel
    from moeserve.model.step_arrays import StepShape

# The sizes of this shape of dispatch follow from the number of rows alone, so a graph can hold it.
_CAPTURED_SHAPE = "allgather"


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step on all ranks.

    num_rows[r]: the rows of rank r in all layers but the last. num_logit_rows[r]: its rows in the last layer.
    only_decodes: True if every chunk of every rank is one token that needs logits.
    """

    num_rows: Sequence[int]
    num_logit_rows: Sequence[int]
    only_decodes: bool

    @classmethod
    def of(cls, plans: Sequence[StepPlan]) -> StepRows:
        """Count the rows of a step in which rank r computes plans[r]."""
        return cls(
            [plan.num_tokens for plan in plans],
            [plan.num_logit_rows for plan in plans],
            all(len(chunk.token_ids) == chunk.num_logit_rows == 1 for plan in plans for chunk in plan.chunks),
        )

    @classmethod
    def alike(cls, num_ranks: int, num_rows: int, num_logit_rows: int) -> StepRows:
        """Return the rows of a step that has the same shape on every rank and is not captured."""
        return cls([num_rows] * num_ranks, [num_logit_rows] * num_ranks, only_decodes=False)

    def of_first_ranks(self, num_shards: int) -> StepRows:
        """Return the rows of all ranks where each of these is a group, of which the first rank has the rows."""
        others = [0] * (num_shards - 1)
        of_all, of_last = (
            [number for count in counts for number in (count, *others)]
            for counts in (self.num_rows, self.num_logit_rows)
        )
        return StepRows(of_all, of_last, self.only_decodes)

    def captured_size(self, sizes: Sequence[int]) -> int | None:
        """Return the smallest of `sizes` (ascending) that holds the rows of any rank; all ranks pad to it.

        Return None for a step that each rank computes with its own rows.
        """
        return padded_size(max(self.num_rows), sizes) if self.only_decodes else None


class GroupSteps:
    """Prepares the exchange of rows for every step. On GPUs it implements `moeserve.model.gpu.runner.Peers`.

    decode_size: the captured size of the step that has begun, None for a step that is not captured.
    """

    def __init__(self, experts: ExpertParallel[Any], collectives: Collectives) -> None:
        self._experts, self._collectives = experts, collectives
        self._sizes: Sequence[int] = ()
        self._choice = ShapeChoice.always(_CAPTURED_SHAPE)
        self.decode_size: int | None = None

    def use(self, choice: ShapeChoice, captured_sizes: Sequence[int]) -> None:
        """choice: for steps that are not captured. captured_sizes: ascending. Both are the same on all ranks."""
        self._choice, self._sizes = choice, tuple(captured_sizes)

    def size_for(self, _: int | None) -> int | None:
        """Return `decode_size`: each rank has rows of its own."""
        return self.decode_size

    def decoding(self, _: int) -> AbstractContextManager[None]:
        """Return a context that does nothing: rows travel within the layers."""
        return nullcontext()

    def begin(self, rows: StepRows) -> None:
        """Choose a captured size or the rows of each rank, from `rows` alone, so that all ranks choose alike."""
        size = rows.captured_size(self._sizes)
        if size is not None:
            self.begin_decodes(size)
            return
        self.decode_size = None
        self._experts.use(self._choice.shape_of(rows.num_rows))
        self._experts.begin_step(rows.num_rows, rows.num_logit_rows)

    def begin_alike(self, shape: StepShape) -> None:
        """Begin a step that is not captured and has the same shape on every rank."""
        self.begin(StepRows.alike(self._collectives.num_ranks, shape.num_tokens, shape.num_logits))

    def begin_decodes(self, size: int) -> None:
        """Begin a captured step with `size` rows on every rank; some or all of them may be padding."""
        self.decode_size = size
        self._experts.use(_CAPTURED_SHAPE)
        rows = [size] * self._collectives.num_ranks
        self._experts.begin_step(rows, rows)

    def recorded(self) -> AbstractContextManager[Traffic]:
        """See `Collectives.recorded`."""
        return self._collectives.recorded()

    def replayed(self, recorded: Traffic) -> AbstractContextManager[None]:
        """See `Collectives.replayed`."""
        return self._collectives.replayed(recorded)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for `event`. Raise CollectiveError after the time that ranks may be behind each other."""
        self._collectives.waits.wait_for(event)

    def wait_for_device(self) -> None:
        self._collectives.waits.wait_for_device()


class Shared(Protocol):
    """A part of the model whose other parts are on other ranks: `Pipe` or `RankPartners`."""

    def begin_capture(self) -> None:
        """Prepare for graphs, in which ranks exchange what they exchange within layers."""

    def open(self) -> None:
        """Exchange with the other ranks from now on."""

    def decoding(self, size: int) -> AbstractContextManager[None]:
        """See `decoding` of `moeserve.model.gpu.runner.Peers`."""


class OnePlanSteps:
    """Implements `moeserve.model.gpu.runner.Peers` for ranks that all compute the rows of one plan."""

    def __init__(self, collectives: Collectives, shared: Shared) -> None:
        self._shared = shared
        self.recorded, self.replayed = collectives.recorded, collectives.replayed
        self.wait_for, self.wait_for_device = collectives.waits.wait_for, collectives.waits.wait_for_device

    def size_for(self, own: int | None) -> int | None:
        """Return `own`: the plan is the same on all ranks."""
        return own

    def begin_alike(self, shape: StepShape) -> None:
        """Do nothing: ranks compile each by itself."""

    def begin_decodes(self, _: int) -> None:
        self._shared.begin_capture()

    def decoding(self, size: int) -> AbstractContextManager[None]:
        return self._shared.decoding(size)


def captures_decodes(shape: str, *, eager: bool, all_resident: bool) -> bool:
    """Return whether ranks on GPUs replay decode steps; follows from settings alone, so that all ranks do the same.

    shape: the setting of dispatch. Only with `allgather` does the host know the sizes without waiting for the device;
    with `auto` decode steps use `allgather` and other steps the faster shape for their rows. eager: `--enforce-eager`.
    all_resident: whether all experts are in memory, so that the host need not read the gate's choice.
    """
    return shape in ("auto", _CAPTURED_SHAPE) and all_resident and not eager


@dataclass(frozen=True, slots=True)
class ShapeChoice:
    """A step takes `small` while its busiest rank has fewer than `rows` rows, and `large` from there on.

    Every rank knows the rows of all ranks, so all ranks choose alike without a message.
    """

    small: str
    large: str
    rows: int = 0

    @classmethod
    def always(cls, shape: str) -> ShapeChoice:
        return cls(shape, shape)

    @classmethod
    def measured(cls, seconds: Mapping[int, Mapping[str, float]]) -> ShapeChoice:
        """Return the faster shape on each side of the size at which two straight lines cross.

        seconds[rows][shape]: the time of a step with `rows` rows on each rank, for one or two sizes.
        """
        few, many = min(seconds), max(seconds)
        small, large = (min(seconds[rows], key=seconds[rows].__getitem__) for rows in (few, many))
        if small == large:
            return cls.always(small)
        lead = seconds[few][large] - seconds[few][small]
        lag = seconds[many][small] - seconds[many][large]
        return cls(small, large, few + math.ceil((many - few) * lead / (lead + lag)) if lead + lag else many)

    def shape_of(self, num_rows: Sequence[int]) -> str:
        """Return the shape for a step in which rank r has num_rows[r] rows."""
        return self.small if max(num_rows) < self.rows else self.large

    def __str__(self) -> str:
        return self.large if self.small == self.large else f"{self.small}, {self.large} from {self.rows} rows"
