"""Requests whose outputs grammars bind: no step names one without the mask of its next token.

Masks are made beside the engine (`moeserve.grammars.masks`). Until its first one is made a request waits outside of the
queue; a late mask delays its own request alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from moeserve.grammars.made_masks import MadeMask, MaskMaker, no_drafts
from moeserve.plan import Chunk, FinishReason, Request
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.parts import Part, Prefixes

_MASK_SECONDS = 0.005  # a step waits this long for masks; requests whose mask comes later are left out of it


class Drafts(Part):
    """The draft tokens of requests, which grammars correct: none are made here."""

    makes_any = False  # whether requests get drafts
    most_forced = 0  # the number of drafts up to which tokens that a grammar forces are added

    def of(self, request: Request) -> array[int]:
        """Return a request's guessed next tokens."""
        return no_drafts(request)

    def receive(self, request: Request, tokens: array[int], num_forced: int, num_laid: int) -> None:
        """Replace a request's drafts by those that its grammar allows and adds, see `MadeMask`."""


class Grammars(Part):
    """Asks for the masks of requests, and completes their chunks with them."""

    def __init__(self, masks: MaskMaker, drafts: Drafts) -> None:
        self._masks = masks
        self._drafts = drafts
        self._made: dict[str, MadeMask | None] = {}  # by request id, its next mask; None until it is made
        self._changed: list[Request] = []  # have come to need a mask, or have ended, since the last update
        self._ready: list[Request] = []

    def enter(self, request: Request) -> bool:
        if request.sampling.grammar is None:
            return False
        self._made[request.request_id] = None
        self._changed.append(request)
        return True

    def keeps_out(self, request: Request) -> bool:
        return self.holds(request)

    def holds(self, request: Request) -> bool:
        return self._made[request.request_id] is None

    def needs_token(self, request: Request) -> bool:
        """Return True: the next mask depends on the token."""
        return True

    def most_drafts(self, request: Request, most: int) -> int:
        made = self._made[request.request_id]
        return 0 if made is None else min(most, len(made.draft_masks))

    def planned(self, request: Request, chunk: Chunk) -> None:
        made = self._made[request.request_id]
        if made is not None and chunk.extras is not None and chunk.sampling is not None:
            chunk.extras.mask, chunk.extras.draft_masks = made.mask, made.draft_masks[: chunk.num_drafts]

    def appended(self, request: Request, token_id: int) -> None:
        if self._made[request.request_id] is not None:
            self._made[request.request_id] = None
            self._changed.append(request)

    def committed(self) -> None:
        """Begin the next masks, which are made while the outputs are sent and messages are read."""
        self._update()

    def declined(self, prefixes: Prefixes) -> Iterator[RequestOutput]:
        """Receive the masks that are made. Yield the requests whose grammar failed."""
        self._update()
        for made in self._masks.take(_MASK_SECONDS):
            request = made.request
            if request.finished:
                continue
            if made.error is not None:
                yield RequestOutput(request, finish_reason=FinishReason.ERROR, error=made.error)
                continue
            self._made[request.request_id] = made
            self._drafts.receive(request, made.draft_tokens, made.num_forced, made.num_laid)
            self._ready.append(request)

    def ready(self) -> list[Request]:
        ready, self._ready = self._ready, []
        return ready

    def left(self, output: RequestOutput) -> None:
        request = output.request
        if request.request_id in self._made:
            del self._made[request.request_id]
            self._changed.append(request)

    def wait(self, seconds: float) -> bool:
        if not self._masks.is_awaited:
            return False
        self._masks.wait(seconds)
        return True

    def _update(self) -> None:
        if self._changed:
            changed, self._changed = self._changed, []
            self._masks.update(changed, self._drafts.of)
