"""The memory side of scheduling: the leases of one rank's requests, and the choice of a rank for a request."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from itertools import chain

from moeserve.plan import Chunk, Request, StateUse, WindowTable
from moeserve.scheduling.open_prompts import OpenPrompts, ScheduledPrompts
from moeserve.scheduling.request_states import PROMPT_INTERVAL_TOKENS, NoStates
from radix_cache import PUBLIC, Miss, PrefixCache, Room, is_still_full


class RequestMemory:
    """Holds the leases of one rank's requests. It knows neither queues nor budgets.

    While a plan in flight names a request, its lease is not released; it only grows, or exchanges full blocks for equal
    ones (`publish`). So any other block that leaves a lease here can be freed at once.
    """

    def __init__(self, cache: PrefixCache, states: NoStates) -> None:
        self._cache = cache
        self._states = states
        self.block_size = cache.block_size
        self._windows = cache.windows
        # Whether a chunk needs nothing here but slots for its tokens. Asked first: most models need no more, and the
        # cost of a large step grows with the number of its requests.
        self.needs_slots_alone = not states.are_needed and not cache.windows.num_blocks
        self.has_states = states.are_needed

    def num_available_blocks(self, request: Request, *, sparing: bool, enough: int | None = None) -> int:
        """Count the blocks that the request could get now. See `grow` for `sparing`.

        enough: stop counting here; the result is then a lower bound.
        """
        counts = self._cache.counts
        return counts.num_available_to(request.namespace, enough) if sparing else counts.num_available

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that `num_tokens` further tokens of a request can begin."""
        return -(-num_tokens // self.block_size)

    def share(self, request: Request) -> None:
        """Set the terms of the request's account, by which its prefixes are evicted."""
        self._cache.share(request.namespace, request.terms.weight, request.terms.cached)

    def peek(self, request: Request) -> int:
        """Count the request's tokens that are cached now."""
        return self._cache.peek(request.token_ids, request.namespace)

    def continuation(self, request: Request, most: int) -> array[int]:
        """Return up to `most` tokens that followed the request's tokens the last time, as far as they are cached."""
        lease = request.held
        return self._cache.continuation(lease, request.token_ids[lease.num_published_tokens :], most)

    def num_missing_blocks(self, request: Request) -> int:
        """Count the blocks that the request lacks for its tokens."""
        lease = request.held
        return -(-len(request.token_ids) // self.block_size) - len(lease.block_ids)

    def num_missing_windows(self, request: Request) -> int:
        """Count the window blocks that the request lacks to be computed step by step."""
        if self.needs_slots_alone:
            return 0
        return self._windows.num_missing(request.held, -(-len(request.token_ids) // self.block_size))

    def room(self, num_spoken_for: int) -> Room | None:
        """Return the room that a waiting request finds now. See `BlockCounts.room`."""
        return self._cache.counts.room(num_spoken_for)

    def has_windows(self, count: int) -> bool:
        """Return whether `count` window blocks are available now."""
        return self.needs_slots_alone or count <= self._windows.num_available

    def num_empty_slots(self, request: Request) -> int:
        """Count the slots that the request holds and no plan fills yet."""
        lease = request.held
        return len(lease.block_ids) * self.block_size - request.num_planned_tokens

    def attach(self, request: Request) -> None:
        """Lease the cached prefix of the request's tokens and count it as computed.

        A request that still needs log probabilities of prompt tokens gets no hits: they come from the forward.
        """
        use_cache, names = not request.wants_prompt_logprobs, request.prefix_names
        lease = self._cache.match(request.token_ids, request.namespace, use_cache=use_cache, names=names)
        request.lease, request.num_computed_tokens = lease, lease.num_published_tokens
        self._states.enter(request)
        if self._windows.num_blocks:
            self._expect_ends(request)

    def _expect_ends(self, request: Request) -> None:
        """Keep the window at positions where other prompts are likely to diverge from a request with a new lease.

        These are the end of its prompt, the place where it leaves the cached prefix, the borders that the frontend or
        the client marks, and some places in a very long prompt.
        """
        lease = request.held
        last = (request.num_prompt_tokens - 1) // self.block_size * self.block_size
        positions = [last, *range(PROMPT_INTERVAL_TOKENS, last, PROMPT_INTERVAL_TOKENS)]
        if lease.is_branch:
            positions += [lease.num_known_tokens, lease.num_published_tokens]
        positions += [*request.asked.cache.borders, *(num_tokens for num_tokens, _ in request.asked.cache.retentions)]
        for position in positions:
            self._cache.windows.expect(lease, position)

    def num_lost_tokens(self, request: Request) -> int:
        """Count the request's pending tokens that were computed before, and lost with its recurrent state."""
        return self._states.num_lost_tokens(request) if self.has_states else 0

    def has_slot(self, request: Request) -> bool:
        """Return whether a request with a lease has a state slot, or needs none."""
        return self.needs_slots_alone or self._states.has_slot(request)

    def detach(self, request: Request, keep_tokens: int | None = None) -> None:
        """Release the request's blocks and its computed tokens. See `PrefixCache.release` for `keep_tokens`."""
        self._states.leave(request)
        self._cache.release(request.held, keep_tokens)
        request.lease = None
        request.num_computed_tokens = 0

    def set_time(self, now: float) -> None:
        """Set the time of the cache, which must not go back, in seconds."""
        self._cache.set_time(now)

    def record_hit(self, request: Request, num_tokens: int) -> None:
        """Count tokens that the request has found cached, and refresh the retentions of its prefix."""
        self._cache.retentions.record_hit(request.held, num_tokens)

    def explain(self, request: Request) -> Miss:
        """Return why no more of the request's tokens were cached. To be called immediately after the match."""
        return self._cache.explain(request.held, request.token_ids, tells_salts=request.asked.cache.tells_salts)

    def retain(self, request: Request) -> None:
        """Retain the prefixes of the request's prompt that it wishes to keep, as far as they are published.

        The longest goes first: if the budget cuts it, the shorter prefixes lie within the rest.
        """
        share = request.terms.retained
        for num_tokens, seconds in sorted(request.asked.cache.retentions, reverse=True):
            self._cache.retentions.retain(request.held, min(num_tokens, request.num_prompt_tokens), seconds, share)

    def catch_up(self, request: Request) -> int:
        """Adopt blocks that other requests have published; return the number of tokens that this saves from computing.

        A partly computed block of the request is replaced by the full one.
        """
        lease = request.held
        gained = self._cache.advance(lease, request.token_ids) - request.num_computed_tokens
        if gained <= 0:
            return 0
        request.num_computed_tokens += gained
        self._states.find_positions(request)
        return gained

    def take_over(self, request: Request, other: Request) -> list[tuple[int, int]]:
        """Lease a block for the tokens behind the request's shared blocks that `other` has computed, if both texts are
        equal up to there, and count these tokens as computed.

        Return (source, target) of the block that is to be copied before the request is computed; none if there is no
        such token, if memory is short, or if prefixes need more than KV blocks.
        """
        first = request.num_computed_tokens
        stop = min(other.num_computed_tokens, len(request.token_ids) - 1, first + self.block_size)
        if stop <= first or not self.needs_slots_alone or request.namespace != other.namespace:
            return []
        # Keys and values hang on all tokens before them: equal tokens behind different ones have others.
        if request.token_ids[:stop] != other.token_ids[:stop]:
            return []
        new = self._cache.extend(request.held, 1, sparing=True) or []
        request.num_computed_tokens += (stop - first) * len(new)
        return [(other.held.block_ids[first // self.block_size], block) for block in new]

    def foresee(self, request: Request, waiting: Iterable[Request]) -> None:
        """Let an admitted request keep its state and window where prompts of waiting requests diverge from its own."""
        if self.needs_slots_alone:
            return
        for other in waiting:
            if other is request:
                continue
            position = self.num_coming(other, request)
            self._states.want(request, position)
            if request.lease is not None:
                self._cache.windows.expect(request.lease, position)

    def cut_chunk(self, request: Request, count: int) -> int:
        """Return the number of the next `count` tokens for a chunk, so that it ends where a snapshot is wanted."""
        return count if self.needs_slots_alone else self._states.cut(request, count)

    def use_state(self, request: Request, count: int, num_drafts: int = 0) -> StateUse | None:
        """Plan the use of the request's state by the chunk of its next `count` tokens, which is planned now.

        num_drafts: the number of drafts behind them.
        """
        return None if self.needs_slots_alone else self._states.use(request, count, num_drafts)

    @property
    def num_free_slots(self) -> float:
        """The number of free slots for recurrent states. A chunk with drafts needs one."""
        return self._states.num_free

    def draft_room(self, request: Request) -> float:
        """Return how many drafts the recurrent state of a request may take in behind its known tokens."""
        return self._states.draft_room(request)

    def commit_state(self, request: Request, chunk: Chunk, *, keep: bool) -> None:
        """End a committed chunk's use of the state. See `RequestStates.commit` for `keep`."""
        self._states.commit(request, chunk, keep=keep)

    def grow(self, request: Request, count: int, *, sparing: bool) -> Sequence[int] | None:
        """Lease blocks for `count` more tokens. Return the new ids, or None with nothing changed if memory is short.

        sparing: leave some blocks to cached prefixes of accounts that hold less (`PrefixCache.extend`).
        """
        lease = request.lease  # not by `held`: this is called for each request of a step
        assert lease is not None
        missing = (request.num_planned_tokens + count - 1) // self.block_size + 1 - len(lease.block_ids)
        if missing <= 0:
            return ()
        return self._cache.extend(lease, missing, sparing=sparing)

    def windows_of(self, blocks: Sequence[int]) -> Sequence[int]:
        """Return the window blocks of new blocks, none for models without window blocks."""
        return () if self.needs_slots_alone else self._windows.of(blocks)

    def window_table(self, request: Request) -> WindowTable | None:
        """Return the table of window blocks for the request's next chunk, None for models without window blocks."""
        if self.needs_slots_alone:
            return None
        table = self._windows.table(request.held, request.num_planned_tokens)
        return None if table is None else WindowTable(*table)

    def num_tokens_that_fit(self, request: Request, *, sparing: bool) -> int:
        """Count the further tokens of the request that could get a slot now. See `grow` for `sparing`."""
        num_blocks = min(self.num_available_blocks(request, sparing=sparing), self._windows.num_available)
        return self.num_empty_slots(request) + int(num_blocks) * self.block_size

    def publish(self, request: Request) -> list[int] | None:
        """Publish the full blocks that the request has computed.

        Return the duplicates that the request no longer holds, to be passed to `free`; None if there are none.
        """
        lease = request.lease  # not by `held`: this is called for each request of a step
        assert lease is not None
        if request.num_computed_tokens - lease.num_published_tokens < self.block_size:
            return None
        if lease.num_published_tokens < request.num_prompt_tokens:
            self._cache.counts.record_change()
        duplicates = self._cache.publish(lease, request.token_ids, request.num_computed_tokens)
        return duplicates or None

    def free(self, duplicates: list[int]) -> None:
        """Free the duplicates that `publish` returned. No plan in flight may name them."""
        self._cache.free(duplicates)

    def awaits_any(self, request: Request, steps: Iterable[ScheduledPrompts]) -> bool:
        """Return whether a scheduled prompt of `steps` computes the next block of `request`.

        Waiting for it costs a step and saves the work: requests that arrive together with the same prompt prefill it
        once. Only scheduled prompts count, so no request waits for a waiting request. Where prefixes need states, the
        request asks the other for a snapshot in their common prefix, and waits for it.
        """
        lease, tokens = request.held, request.token_ids
        end = lease.num_published_tokens + self.block_size
        if not lease.use_cache or end >= len(tokens):
            return False
        awaits = self._waits_for_snapshot if self.has_states else self._is_computed_by
        alike = chain.from_iterable(step.that_begin_with(tokens[:end], request.namespace) for step in steps)
        return any(other is not request and awaits(request, other) for other in alike)

    def awaited_prefix(self, request: Request) -> array[int]:
        """Return the tokens with which any longer prompt of the namespace awaits what `request` awaits."""
        lease = request.held
        # Two requests that wait for a snapshot may want different ones, unless their prompts are equal.
        end = len(request.token_ids) - 1 if self.has_states else lease.num_published_tokens + self.block_size
        return request.token_ids[:end]

    def _waits_for_snapshot(self, request: Request, other: Request) -> bool:
        if other.rank != request.rank:
            return False
        return self._states.follows(request, other, self.num_coming(request, other))

    def _is_computed_by(self, request: Request, other: Request) -> bool:
        """Return whether the scheduled chunk of `other`, which begins alike, computes the next block of `request`."""
        return other.rank == request.rank and other.num_planned_tokens > request.held.num_published_tokens

    def num_coming(self, request: Request, other: Request) -> int:
        """Count the tokens of the waiting `request` that will be cached once the prompt of `other` is computed here."""
        return 0 if other.lease is None or not other.lease.use_cache else self.num_shared(request, other)

    def num_shared(self, request: Request, other: Request) -> int:
        """Count the leading tokens of `request` that it could take over from `other`.

        Whole blocks from the first token on, and never the request's last token.
        """
        size = self.block_size
        longest = (min(len(request.token_ids) - 1, len(other.token_ids)) // size) * size
        mine, theirs = request.token_ids, other.token_ids
        if request.namespace != other.namespace or not longest:
            return 0
        if mine[:size] != theirs[:size]:
            return 0
        if mine[:longest] == theirs[:longest]:
            return longest
        equal, unequal = size, longest
        while unequal - equal > size:
            middle = (equal + unequal) // (2 * size) * size
            if mine[equal:middle] == theirs[equal:middle]:
                equal = middle
            else:
                unequal = middle
        return equal

    def check_idle(self, num_held: int = 0) -> None:
        """Raise AssertionError unless every block is free or cached, as it must be when nothing runs.

        num_held: the number of blocks that are held for other services.
        """
        counts = self._cache.counts
        counts.check()
        if counts.num_leased != num_held or counts.duplicates:
            raise AssertionError(f"idle, but {counts.num_leased} blocks are leased")
        self._states.check_idle()


# A running request costs its rank a row in every step to come. It weighs as much as this many tokens to be computed, so
# a shorter cached prefix does not outweigh a rank that runs one request less.
_TOKENS_PER_RUNNING_REQUEST = 64


class AdmissionOutcome(Enum):
    """The outcome of `RankLoads.place`."""

    ADMITTED = auto()
    FOLLOWS = auto()  # it waits for another request, which computes its next block
    NO_ROOM = auto()


class RankLoads:
    """The work and the memory that each rank owes its running requests, during one round of admissions.

    It places a request where its prompt is cached or being computed, unless that rank has much more to do.
    """

    def __init__(self, memories: Sequence[RequestMemory], running: Iterable[Request]) -> None:
        self._memories = memories
        self._work = [0] * len(memories)
        self._priorities = [Counter[int]() for _ in memories]
        self._num_of_tenant: Counter[tuple[int, str]] = Counter()
        # Running prompts will need memory for their next chunks.
        self._num_promised_blocks = [0] * len(memories)
        self._num_promised_windows = [0] * len(memories)
        self._prompts = [OpenPrompts() for _ in memories]
        # Namespaces and prefixes of prompts that wait until another request has computed them.
        self._awaited: list[tuple[str, array[int]]] = []
        for request in running:
            self.add(request)

    def add(self, request: Request) -> None:
        """Count a request that runs now."""
        rank, lease = request.rank, request.held
        uncomputed = request.num_pending_tokens
        self._work[rank] += uncomputed + _TOKENS_PER_RUNNING_REQUEST
        is_prompt = uncomputed > 1 or request.num_scheduled_tokens > 1
        if is_prompt and lease.use_cache and len(self._memories) > 1:
            self._prompts[rank].add(request)
        self._priorities[rank][request.priority] += 1
        self._num_of_tenant[rank, request.terms.tenant] += 1
        self._num_promised_blocks[rank] += self._memories[rank].num_missing_blocks(request)
        self._num_promised_windows[rank] += self._memories[rank].num_missing_windows(request)

    def place(self, request: Request, steps: Sequence[ScheduledPrompts]) -> AdmissionOutcome:
        """Give a waiting request its rank and the lease on its cached prefix there, if it may run now.

        steps: the prompts that are computed in this step and in steps in flight.
        """
        if self._is_known_to_follow(request):
            return AdmissionOutcome.FOLLOWS
        # A prompt that is computed may be one to wait for.
        is_room_all = len(self._memories) == 1 and not any(steps)
        if is_room_all and is_still_full(self._room(request), request.no_room):
            return AdmissionOutcome.NO_ROOM
        for rank in self.preferred_ranks(request):
            request.rank = rank
            memory = self._memories[rank]
            memory.attach(request)
            follows = memory.awaits_any(request, steps)
            if not follows and self._have_room_for(request):
                return AdmissionOutcome.ADMITTED
            prefix = memory.awaited_prefix(request) if follows else None
            memory.detach(request)
            if prefix is not None:
                self._awaited.append((request.namespace, prefix))
                return AdmissionOutcome.FOLLOWS
        request.no_room = self._room(request) if is_room_all else None
        return AdmissionOutcome.NO_ROOM

    def _room(self, request: Request) -> Room | None:
        return self._memories[request.rank].room(self.num_spoken_for(request))

    @property
    def num_followers_tried(self) -> int:
        """The number of requests known to wait for another one; a request behind one of these costs no search."""
        return len(self._awaited)

    def _is_known_to_follow(self, request: Request) -> bool:
        if not self._awaited or request.wants_prompt_logprobs:
            return False
        token_ids = request.token_ids
        return any(
            namespace == request.namespace and len(token_ids) > len(prefix) and token_ids[: len(prefix)] == prefix
            for namespace, prefix in self._awaited
        )

    def preferred_ranks(self, request: Request) -> Sequence[int]:
        """Return all ranks, the cheapest first and the lowest number among equals.

        A rank's price is its work before the request could be done, less the request's tokens that are cached there.
        Tokens that the rank is computing for another request count twice: this request has them as soon as the other
        request, and no rank computes them again.
        """
        if len(self._memories) == 1:
            return (0,)
        if request.namespace == PUBLIC:
            # Every rank needs its own copy of a public prefix: the request for it comes once per rank.
            return sorted(range(len(self._memories)), key=lambda rank: self._memories[rank].peek(request))
        prices = list(self._work)
        if not request.wants_prompt_logprobs:
            for rank, memory in enumerate(self._memories):
                num_cached = memory.peek(request)
                alike = self._prompts[rank].neighbours(request)
                num_coming = max((memory.num_coming(request, other) for other in alike), default=0)
                prices[rank] -= num_cached + 2 * max(0, num_coming - num_cached)
        return sorted(range(len(prices)), key=prices.__getitem__)

    def _have_room_for(self, request: Request) -> bool:
        """Return whether the request's rank has memory for all its tokens, beside what running requests need."""
        rank = request.rank
        memory = self._memories[rank]
        if not memory.has_slot(request):
            return False
        if not memory.has_windows(self._num_promised_windows[rank] + memory.num_missing_windows(request)):
            return False
        wanted = self.num_spoken_for(request) + memory.num_missing_blocks(request)
        # A tenant's first request may take any block; further requests spare the cached prefixes of other tenants.
        is_further = self._num_of_tenant[rank, request.terms.tenant] > 0
        return wanted <= memory.num_available_blocks(request, sparing=is_further, enough=wanted)

    def num_spoken_for(self, request: Request) -> int:
        """Count the blocks of the request's rank that running requests will need, before the request may begin.

        One for each running request is among them, which could otherwise take it from the newcomer, whose prompt would
        be lost.
        """
        priorities = self._priorities[request.rank].items()
        headroom = sum(count for priority, count in priorities if priority <= request.priority)
        return self._num_promised_blocks[request.rank] + headroom
