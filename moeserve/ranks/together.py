"""How ranks begin a step together: a captured graph of one size for all, or each with its own rows.

All of it follows from how many rows every rank has, which all of them are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moeserve.model.step_arrays import padded_size
from moeserve.plan import StepPlan

if TYPE_CHECKING:
    import torch

    from experts.collectives import Collectives, RecordedTraffic
    from experts.dispatch import ExpertParallel
    from moeserve.model.step_arrays import StepShape

# Its sizes follow from the number of rows alone, so a graph can hold it.
_CAPTURED_SHAPE = "allgather"


@dataclass(frozen=True, slots=True)
class StepRows:
    """num_rows[r], num_logit_rows[r]: of rank r, in all layers and in the last one.

    only_decodes: whether all chunks of all ranks are single tokens whose logits are wanted.
    """

    num_rows: Sequence[int]
    num_logit_rows: Sequence[int]
    only_decodes: bool

    @classmethod
    def of(cls, plans: Sequence[StepPlan]) -> StepRows:
        """plans[r] is what rank r computes."""
        return cls(
            [plan.num_tokens for plan in plans],
            [plan.num_logit_rows for plan in plans],
            all(len(chunk.token_ids) == chunk.num_logit_rows == 1 for plan in plans for chunk in plan.chunks),
        )

    @classmethod
    def alike(cls, num_ranks: int, num_rows: int, num_logit_rows: int) -> StepRows:
        """Every rank computes a step of the same shape, of its own."""
        return cls([num_rows] * num_ranks, [num_logit_rows] * num_ranks, only_decodes=False)

    def captured_size(self, sizes: Sequence[int]) -> int | None:
        """The one of the captured sizes (ascending) that all ranks replay, those with fewer rows or none padded to it.

        None for a step that each rank computes with its own rows.
        """
        return padded_size(max(self.num_rows), sizes) if self.only_decodes else None


class GroupSteps:
    """Tells the exchange of rows of every step. On GPUs it is `moeserve.model.gpu_runner.Peers`.

    decode_size: of the step that has begun, None for one that is not captured.
    """

    def __init__(self, experts: ExpertParallel[Any], collectives: Collectives) -> None:
        self._experts, self._collectives = experts, collectives
        self._sizes: Sequence[int] = ()
        self._shape = _CAPTURED_SHAPE
        self.decode_size: int | None = None

    def use(self, shape: str, captured_sizes: Sequence[int]) -> None:
        """shape: of dispatch in steps that are not captured. captured_sizes: ascending; all ranks say the same."""
        self._shape, self._sizes = shape, tuple(captured_sizes)

    def begin(self, rows: StepRows) -> None:
        """Decides how the step is computed, which needs nothing but what all ranks know."""
        size = rows.captured_size(self._sizes)
        if size is not None:
            self.begin_decodes(size)
            return
        self.decode_size = None
        self._experts.use(self._shape)
        self._experts.begin_step(rows.num_rows, rows.num_logit_rows)

    def begin_alike(self, shape: StepShape) -> None:
        """A step that is not captured, of the same shape on every rank."""
        self.begin(StepRows.alike(self._collectives.num_ranks, shape.num_tokens, shape.num_logits))

    def begin_decodes(self, size: int) -> None:
        """A batch of `size` rows on every rank, of which some or all are padding."""
        self.decode_size = size
        self._experts.use(_CAPTURED_SHAPE)
        rows = [size] * self._collectives.num_ranks
        self._experts.begin_step(rows, rows)

    def traffic(self) -> RecordedTraffic:
        """For the graph of the batch that has begun."""
        return self._experts.traffic()

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Raises CollectiveError where that takes longer than ranks may be apart."""
        self._collectives.waits.wait_for(event)

    def wait_for_device(self) -> None:
        """The same for everything queued."""
        self._collectives.waits.wait_for_device()


def captures_decodes(shape: str, *, eager: bool, all_resident: bool) -> bool:
    """Whether ranks on GPUs replay decode steps; follows from settings alone, so that all ranks do the same.

    shape: of dispatch. Only the sizes of `allgather` need no word from the device; with `auto` decodes take it whatever
    suits the other steps. eager: `--enforce-eager`. all_resident: what the gate chose is not looked at on the host.
    """
    return shape != "alltoall" and all_resident and not eager
