"""The masks of requests' next tokens, as the scheduler asks for them and receives them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moeserve.plan import Request


@dataclass(frozen=True, slots=True)
class MadeMask:
    """A request's next mask (see `ChunkExtras.mask`), or the error that ends the request.

    draft_tokens: the request's drafts that the grammar allows, then `num_forced` tokens that it forces, then `num_laid`
    tokens of the answer's layout and of what the grammar forces between them. draft_masks: the mask after each of them.
    """

    request: Request
    mask: bytes = b""
    error: str | None = None
    draft_tokens: array[int] = field(default_factory=lambda: array("i"))
    draft_masks: tuple[bytes, ...] = ()
    num_forced: int = 0
    num_laid: int = 0


def no_drafts(request: Request) -> array[int]:
    """Return the drafts of a request where none are made."""
    return array("i")


class MaskMaker(Protocol):
    """Makes the masks of requests beside the engine: `moeserve.grammars.masks.GrammarMasks`."""

    @property
    def is_awaited(self) -> bool:
        """True if a request's next mask is not made, or not taken."""

    def update(self, changes: Iterable[Request], drafts_of: Callable[[Request], array[int]] = no_drafts) -> None:
        """Begin the masks of requests that need one, and free all that finished requests hold."""

    def take(self, seconds: float = 0.0) -> Sequence[MadeMask]:
        """Return the masks that were made. Wait for quick ones up to `seconds`."""

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until a mask may be made."""
