"""What a GPU's steps have to know of other ranks, which compute every step together with this one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from moeserve.cuda.launch_variants import StepShape


class Traffic(Protocol):
    """What one graph sends to other ranks."""

    def recorded(self) -> AbstractContextManager[None]:
        """The graph is captured inside."""

    def replayed(self) -> AbstractContextManager[None]:
        """It is launched inside."""


class Peers(Protocol):
    """The other ranks. All call the same in the same order.

    decode_size: of the lasting batch that the step is computed in which has begun, the same on all ranks; None where
    each makes a batch of its own.
    """

    @property
    def decode_size(self) -> int | None: ...

    def begin_alike(self, shape: StepShape) -> None:
        """A step that is not captured begins, of the same shape on every rank."""

    def begin_decodes(self, size: int) -> None:
        """A step in lasting batches of `size` rows begins."""

    def traffic(self) -> Traffic:
        """For the graph of the batch that has begun."""

    def wait_for(self, event: torch.cuda.Event) -> None:
        """As long as ranks may be apart, and no longer."""

    def wait_for_device(self) -> None:
        """For everything queued, as long."""
