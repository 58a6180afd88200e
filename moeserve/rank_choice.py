"""On which rank a request is to live: where its prompt is cached, unless that rank has much more to do."""

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
    FOLLOWS = auto()
    NO_ROOM = auto()


class RankLoads:
    """What each rank has to do and to hold for the requests that run, kept up to date during one admission."""

    __slots__ = ("_memories", "_num_promised_blocks", "_num_running", "_work")

    def __init__(self, memories: Sequence[RequestMemory], running: Iterable[Request]) -> None:
        self._memories = memories
        self._work = [0] * len(memories)
        self._num_running = [0] * len(memories)
        # Prompts that run already will want memory for their next chunks.
        self._num_promised_blocks = [0] * len(memories)
        for request in running:
            self.add(request)

    def add(self, request: Request) -> None:
        """Counts a request that runs now."""
        rank = request.rank
        uncomputed = len(request.token_ids) - request.num_computed_tokens - request.num_scheduled_tokens
        self._work[rank] += uncomputed + _TOKENS_PER_RUNNING_REQUEST
        self._num_running[rank] += 1
        self._num_promised_blocks[rank] += self._memories[rank].num_missing_blocks(request)

    def preferred_ranks(self, request: Request) -> Sequence[int]:
        """All ranks, the one first that would be done soonest with its work and the request's; the lowest of equals."""
        if len(self._memories) == 1:
            return (0,)
        use_cache = not request.wants_prompt_logprobs
        work = [
            work - (memory.peek(request) if use_cache else 0)
            for work, memory in zip(self._work, self._memories, strict=True)
        ]
        return sorted(range(len(work)), key=work.__getitem__)

    def have_room_for(self, request: Request) -> bool:
        """Whether the rank that the request is attached to has memory for all its tokens, beside what is promised."""
        rank = request.rank
        memory = self._memories[rank]
        # Who was preempted returns when there is room to grow for all, or it would be preempted again at once.
        headroom = self._num_running[rank] if request.num_preemptions else 0
        wanted = self._num_promised_blocks[rank] + memory.num_missing_blocks(request) + headroom
        return wanted <= memory.num_available_blocks
