"""The way of rows from stage to stage of a pipeline, as one rank sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeserve.model.spec import DecoderSpec
from moeserve.model.stages import Stage

if TYPE_CHECKING:
    from experts.parallel.collectives import Collectives  # It imports deepspeed, which a single rank does not need.


class Pipe:
    """The borders of a rank's stage: implements `moeserve.model.decoder.Border`. part: the layers of the stage.
    num_stages: of all ranks.

    On a GPU decode batches lie in rows that graphs may read and write. Until `open`, and within `decoding`, no rows
    travel there: the decoder takes these rows and leaves its own in them. So ranks compile and capture each by itself.
    """

    def __init__(
        self,
        collectives: Collectives,
        stages: Sequence[Stage],
        spec: DecoderSpec,
        dtype: torch.dtype,
        *,
        max_rows: int = 0,
    ) -> None:
        """stages: of all ranks, each of as many ranks that follow each other. spec: of the whole model. dtype: in which
        it computes. max_rows: on a GPU, the rows of the largest step."""
        self.num_stages, self._width = len(stages), collectives.num_ranks // len(stages)
        self.stage = stages[collectives.rank // self._width]
        self.part = spec.of_layers(self.stage)
        self._collectives, self._dtype = collectives, dtype
        self._is_open = not max_rows
        self._lasting = self._new_rows(max_rows).zero_()

    def take(self, num_rows: int) -> Tensor:
        if not self._is_open:
            return self._lasting[:num_rows]
        rows = self._new_rows(num_rows)
        self._collectives.receive(rows, self._collectives.rank - self._width)
        return rows

    def give(self, rows: Tensor) -> None:
        if self._is_open:
            self._collectives.send(rows, self._collectives.rank + self._width)
        elif self.stage.is_first:
            self._lasting[: len(rows)].copy_(rows)

    def open(self) -> None:
        """Let rows travel from now on."""
        self._is_open = True

    def be_patient(self) -> None:
        """Wait for rows for any time from now on: rank 0 finds a stage that hangs."""
        self._collectives.wait_for_any_time()

    def begin_capture(self) -> None:
        """Do nothing: graphs exchange no rows."""

    @contextmanager
    def decoding(self, size: int) -> Iterator[None]:
        """Bring the rows of a decode batch, which is computed or replayed inside, and send a copy of what it leaves:
        the next batch may overwrite the rows before they are sent."""
        if not self.stage.is_first:
            self._lasting[:size].copy_(self.take(size))
        self._is_open = False
        try:
            yield
        finally:
            self._is_open = True
        if not self.stage.is_last:
            self.give(self._lasting[:size].clone())

    def whole_steps(self, measured: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
        """Return the tokens and seconds of steps on all ranks, of which this rank has `measured` its part.

        A rank's time holds its wait for the ranks before it, and most of that is what these compute.
        """
        if not measured:
            return []
        device = self._collectives.device
        seconds = torch.tensor([taken for _, taken in measured], dtype=torch.float64, device=device)
        of_ranks = self._collectives.all_gather(seconds).view(self._collectives.num_ranks, -1)
        slowest = of_ranks.amax(0).tolist()
        return [(tokens, taken) for (tokens, _), taken in zip(measured, slowest, strict=True)]

    def _new_rows(self, count: int) -> Tensor:
        size = (count, self.part.hidden_size)
        return torch.empty(size, dtype=self._dtype, device=self._collectives.device)
