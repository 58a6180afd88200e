"""The room for draft tokens in a step that is planned: which requests may have some, and how many."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from moeserve.plan import Request
from moeserve.scheduling.request_memory import RequestMemory


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """How many drafts the next chunks of running requests may have. Drafts take no block that one of them may need."""

    memories: Sequence[RequestMemory]  # by rank
    running: Sequence[Request]
    num_coming: int  # waiting requests that may get a place
    may_go_on: Callable[[Request], bool]  # whether the step may name a running request
    watched: Mapping[str, object]  # the ids of requests that parts watch
    most_drafts: Callable[[Request, int], int]  # see `Part.most_drafts`

    def decodes(self, ranks: Collection[int]) -> dict[int, list[Request]]:
        """Return, by rank of these, the running requests that lack one token, or none but the one that is being
        sampled; tokens lost with a state do not count."""
        decodes: dict[int, list[Request]] = {rank: [] for rank in ranks}
        for request in self.running:
            own = decodes.get(request.rank)
            if own is None:
                continue
            # Fast path: most requests of a large step are plain, and the step's cost grows with their number.
            if (
                request.is_always_plain
                and len(request.token_ids) - request.num_computed_tokens == 1
                and not (request.num_scheduled_tokens or request.yields or request.request_id in self.watched)
            ):
                own.append(request)
                continue
            if self.may_go_on(request):
                num_lost = self.memories[request.rank].num_lost_tokens(request)
                if 0 <= request.num_pending_tokens - num_lost <= 1:
                    own.append(request)
        return decodes

    def of_rank(self, rank: int, requests: Sequence[Request], num_guessed: Sequence[int]) -> list[int]:
        """Return for each request of a rank how many drafts it may have. num_guessed: the drafts that each has.

        Each request with drafts takes a free slot for recurrent states where the model has them; slots for requests
        that may come are left.
        """
        memory, rooms = self.memories[rank], list[int]()
        num_slots, num_spare = memory.num_free_slots - self.num_coming, dict[str, int]()
        block_size = memory.block_size if memory.needs_slots_alone else 0
        for request, count in zip(requests, num_guessed, strict=True):
            lease, end = request.lease, len(request.token_ids) + count
            # Fast path: most requests of a large step are plain, and the step's cost grows with their number.
            if (
                lease is not None
                and end <= len(lease.block_ids) * block_size
                and end < request.sampling.max_tokens + request.num_prompt_tokens
                and request.is_always_plain
                and request.request_id not in self.watched
            ):
                rooms.append(count)
                continue
            rooms.append(self._of(request, count, memory, num_spare) if num_slots > 0 else 0)
            num_slots -= rooms[-1] > 0
        return rooms

    def _of(self, request: Request, num_guessed: int, memory: RequestMemory, num_spare: dict[str, int]) -> int:
        """Return how many drafts a request may have: no row is needed whose token would be one too many.

        num_spare: by namespace, the blocks that are left for drafts, as far as they were counted."""
        num_known, lease = len(request.token_ids), request.held
        if request.wants_prompt_logprobs:
            return 0
        room = min(request.sampling.max_tokens + request.num_prompt_tokens - num_known - 1, num_guessed)
        room = int(min(room, memory.draft_room(request)))
        room = self.most_drafts(request, room)
        num_slots = len(lease.block_ids) * memory.block_size - num_known
        if num_slots < room:
            spare = num_spare.get(request.namespace)
            if spare is None:
                spare = memory.num_available_blocks(request, sparing=True) - len(self.running)
                num_spare[request.namespace] = spare
            if spare < memory.num_blocks_for(num_guessed):
                room = num_slots
        return max(0, room)
