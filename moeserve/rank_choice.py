"""On which rank a request is to live: where its prompt is cached or being computed, unless that rank has much to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto

from moeserve.request import Request
from moeserve.request_memory import RequestMemory

# A running request costs its rank a row in every step to come. It is weighed like this many tokens to be computed, so
# a cached prefix shorter than that does not outweigh a rank that runs one request less.
_TOKENS_PER_RUNNING_REQUEST = 64


class Placement(Enum):
    """What came of trying to place a waiting request."""

    PLACED = auto()
    FOLLOWS = auto()  # a request that computes what it needs next
    NO_ROOM = auto()


class RankLoads:
    """What each rank has to do and to hold for the requests that run, kept up to date during one admission."""

    __slots__ = ("_memories", "_num_promised_blocks", "_num_running", "_prompts", "_work")

    def __init__(self, memories: Sequence[RequestMemory], running: Iterable[Request]) -> None:
        self._memories = memories
        self._work = [0] * len(memories)
        self._num_running = [0] * len(memories)
        # Prompts that run already will want memory for their next chunks.
        self._num_promised_blocks = [0] * len(memories)
        self._prompts: list[list[Request]] = [[] for _ in memories]
        for request in running:
            self.add(request)

    def add(self, request: Request) -> None:
        """Counts a request that runs now."""
        rank = request.rank
        uncomputed = len(request.token_ids) - request.num_computed_tokens - request.num_scheduled_tokens
        self._work[rank] += uncomputed + _TOKENS_PER_RUNNING_REQUEST
        if uncomputed > 1 or request.num_scheduled_tokens > 1:
            self._prompts[rank].append(request)
        self._num_running[rank] += 1
        self._num_promised_blocks[rank] += self._memories[rank].num_missing_blocks(request)

    def place(self, request: Request, prompts: Sequence[Request]) -> Placement:
        """Gives a waiting request its rank and the lease on what is cached there, if it may run now.

        prompts: of the requests that are scheduled.
        """
        for rank in self._preferred_ranks(request):
            request.rank = rank
            memory = self._memories[rank]
            memory.attach(request)
            follows = memory.awaits_any(request, prompts)
            if not follows and self._have_room_for(request):
                return Placement.PLACED
            memory.detach(request)
            if follows:
                return Placement.FOLLOWS
        return Placement.NO_ROOM

    def _preferred_ranks(self, request: Request) -> Sequence[int]:
        """All ranks, the cheapest first; the lowest of equals.

        A rank's price is what it has to do before the request could be done, without what is cached there. Tokens that
        it is just computing for another request count twice: the request has them as soon as that one, and no rank
        computes them again.
        """
        if len(self._memories) == 1:
            return (0,)
        prices = list(self._work)
        if not request.wants_prompt_logprobs:
            for rank, memory in enumerate(self._memories):
                num_cached = memory.peek(request)
                num_coming = max((memory.num_coming(request, other) for other in self._prompts[rank]), default=0)
                prices[rank] -= num_cached + 2 * max(0, num_coming - num_cached)
        return sorted(range(len(prices)), key=prices.__getitem__)

    def _have_room_for(self, request: Request) -> bool:
        """Whether the rank that the request is attached to has memory for all its tokens, beside what is promised."""
        rank = request.rank
        memory = self._memories[rank]
        # Who was preempted returns when there is room to grow for all, or it would be preempted again at once.
        headroom = self._num_running[rank] if request.num_preemptions else 0
        wanted = self._num_promised_blocks[rank] + memory.num_missing_blocks(request) + headroom
        return wanted <= memory.num_available_blocks
