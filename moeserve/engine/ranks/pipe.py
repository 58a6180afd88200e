"""The way of rows from stage to stage of a pipeline, as one rank sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeserve.model.spec import DecoderSpec
from moeserve.model.stages import Stage

if TYPE_CHECKING:
    from experts.parallel.collectives import Collectives  # It imports deepspeed, which a single rank does not need.


class Pipe:
    """The borders of a rank's stage: implements `moeserve.model.decoder.Border`. part: the layers of the stage.
    num_stages: of all ranks."""

    def __init__(
        self, collectives: Collectives, stages: Sequence[Stage], spec: DecoderSpec, dtype: torch.dtype
    ) -> None:
        """stages: of all ranks, each of as many ranks that follow each other. spec: of the whole model. dtype: in which
        it computes."""
        self.num_stages, self._width = len(stages), collectives.num_ranks // len(stages)
        self.stage = stages[collectives.rank // self._width]
        self.part = spec.of_layers(self.stage)
        self._collectives, self._dtype = collectives, dtype

    def take(self, num_rows: int) -> Tensor:
        rows = torch.empty((num_rows, self.part.hidden_size), dtype=self._dtype)
        self._collectives.receive(rows, self._collectives.rank - self._width)
        return rows

    def give(self, rows: Tensor) -> None:
        self._collectives.send(rows, self._collectives.rank + self._width)

    def whole_steps(self, measured: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
        """Return the tokens and seconds of steps on all ranks, of which this rank has `measured` its part.

        A rank's time holds its wait for the ranks before it, and most of that is what these compute.
        """
        seconds = torch.tensor([taken for _, taken in measured], dtype=torch.float64)
        of_ranks = self._collectives.all_gather(seconds).view(self._collectives.num_ranks, -1)
        slowest = of_ranks.amax(0).tolist()
        return [(tokens, taken) for (tokens, _), taken in zip(measured, slowest, strict=True)]
