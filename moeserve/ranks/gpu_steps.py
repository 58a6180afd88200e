"""How the ranks on GPUs begin a step together: a captured graph of one size for all, or each with its own rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from experts.collectives import Collectives, RecordedTraffic
from experts.dispatch import ExpertParallel
from kernels.gpu.moe_weights import GpuExperts
from moeserve.model.step_arrays import StepShape
from moeserve.ranks.messages import StepRows

# Its sizes follow from the number of rows alone, so a graph can hold it.
_CAPTURED_SHAPE = "allgather"


class GpuSteps:
    """See `moeserve.model.gpu_runner.Peers`. decode_size is that of the step that has begun."""

    def __init__(self, experts: ExpertParallel[GpuExperts], collectives: Collectives) -> None:
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
