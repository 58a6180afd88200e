"""Which tokens are computed next, and where their KV lies. It knows no text, no tensors, no clock and no sockets.

There is no prefill phase and no decode phase. A request has `num_computed_tokens`; a step advances some requests by
some tokens under a token budget: first those that lack one token, then prompts in chunks with what is left. Prefix
hits, chunked prefill, preemption and resuming are all that one idea.
"""

from __future__ import annotations

from array import array

from moeserve.outputs import NeverFitsError, QueueFullError, RequestOutput, SchedulerCounters
from moeserve.plan import Chunk, ChunkResult, StepPlan, StepResult, chunk_extras
from moeserve.request import FinishReason, Request
from moeserve.waiting_queue import WaitingQueue
from radix_cache import PrefixCache


class Scheduler:
    """The truth about requests and, through `PrefixCache`, about memory.

    `schedule` may be called again before `commit` of the plan before: a request with tokens in flight is then left out.
    Commits come in the order of the plans.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_queued_reqs: int,
        max_model_len: int,
        policy: str = "fcfs",
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs {max_num_seqs}")
        if max_model_len > cache.num_blocks * cache.block_size:
            raise ValueError(f"max_model_len {max_model_len} exceeds the {cache.num_blocks} blocks of KV memory")
        self._cache = cache
        self._block_size = cache.block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_queued_reqs = max_num_queued_reqs
        self._max_model_len = max_model_len
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue(policy, lambda request: cache.peek(request.token_ids, request.namespace))
        self._running: list[Request] = []
        self._in_flight: list[list[Request]] = []
        self._retired_blocks: list[int] = []
        self._started: list[Request] = []
        self._arrivals = 0
        self._step = 0
        self.counters = SchedulerCounters()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._requests and not self._in_flight

    @property
    def num_empty_slots(self) -> int:
        """Slots that requests hold and have not filled yet."""
        return sum(
            len(request.lease.block_ids) * self._block_size - request.num_computed_tokens
            for request in self._running
            if request.lease is not None
        )

    def add(self, request: Request) -> None:
        """Queues a request. Raises NeverFitsError, QueueFullError, or ValueError for an id in use."""
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        wanted = request.num_prompt_tokens + request.sampling.max_tokens
        if not request.num_prompt_tokens or wanted > self._max_model_len:
            raise NeverFitsError(
                f"maximum context length is {self._max_model_len} tokens, but {wanted} were asked for: "
                f"{request.num_prompt_tokens} in the prompt and {request.sampling.max_tokens} for the completion"
            )
        if len(self._waiting) >= self._max_num_queued_reqs + max(0, self._max_num_seqs - len(self._running)):
            raise QueueFullError(f"{len(self._waiting)} requests wait already")
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request whose client left, in whatever state; None if it is not known (any more)."""
        return self._end(request_id, FinishReason.ABORT, None)

    def finish(self, request_id: str, keep_tokens: int) -> RequestOutput | None:
        """Ends a request with its first `keep_tokens` output tokens: the frontend found a stop string in them."""
        return self._end(request_id, FinishReason.STOP, keep_tokens)

    def take_started(self) -> list[Request]:
        """The requests that left the queue for the first time since the last call."""
        started, self._started = self._started, []
        return started

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed. Mutates the requests it schedules."""
        chunks: list[Chunk] = []
        planned: list[Request] = []
        fresh_blocks = array("i")
        behind: list[Request] = []
        position = 0
        while position < len(self._running):
            request = self._running[position]
            position += 1
            if request.num_scheduled_tokens:
                continue
            if len(request.token_ids) - request.num_computed_tokens > 1:
                behind.append(request)
            elif self._reserve(request, 1, fresh_blocks, preempt=True):
                chunks.append(self._make_chunk(request, 1))
                planned.append(request)
        budget = self._max_num_batched_tokens - len(chunks)
        behind = [request for request in behind if request.lease is not None]
        budget = self._schedule_prompts(behind, budget, chunks, planned, fresh_blocks)
        self._admit(behind, budget, chunks, planned, fresh_blocks)
        if not chunks:
            return None
        self._step += 1
        self._in_flight.append(planned)
        return StepPlan(self._step, chunks, fresh_blocks)

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Takes over what a step computed. Publishes full blocks, appends tokens, ends requests."""
        planned = self._in_flight.pop(0)
        outputs: list[RequestOutput] = []
        for request, chunk, computed in zip(planned, plan.chunks, result.chunks, strict=True):
            num_tokens = len(chunk.token_ids)
            request.num_scheduled_tokens -= num_tokens
            if request.finished:
                self._release(request)
                continue
            if computed.error is not None:
                outputs.append(self._fail(request, computed.error))
                continue
            request.num_computed_tokens += num_tokens
            lease = request.lease
            assert lease is not None
            if request.num_computed_tokens - lease.num_published_tokens >= self._block_size:
                self._retired_blocks += self._cache.publish(lease, request.token_ids, request.num_computed_tokens)
            if computed.token_id is not None:
                outputs.append(self._append(request, computed.token_id, computed))
            elif computed.prompt_logprobs:
                outputs.append(RequestOutput(request, prompt_logprobs=computed.prompt_logprobs))
        if self._retired_blocks and not self._in_flight:
            self._cache.free(self._retired_blocks)
            self._retired_blocks = []
        return outputs

    def _schedule_prompts(
        self,
        behind: list[Request],
        budget: int,
        chunks: list[Chunk],
        planned: list[Request],
        fresh_blocks: array[int],
    ) -> int:
        """Chunks for running requests that lack more than one token, in order; returns the budget left."""
        for index, request in enumerate(behind):
            if budget <= 0:
                break
            lease = request.lease
            if lease is None:
                continue
            if request.num_computed_tokens == lease.num_published_tokens:
                self._catch_up(request)
                if self._follows(request, behind[:index]):
                    continue
            count = self._room_for(request, budget, fresh_blocks, preempt=not chunks)
            if count:
                chunks.append(self._make_chunk(request, count))
                planned.append(request)
                budget -= count
        return budget

    def _admit(
        self,
        behind: list[Request],
        budget: int,
        chunks: list[Chunk],
        planned: list[Request],
        fresh_blocks: array[int],
    ) -> None:
        """Lets waiting requests run while budget, places and memory for their whole prompt last."""
        if not len(self._waiting) or budget <= 0 or len(self._running) >= self._max_num_seqs:
            return
        for request in self._waiting.candidates():
            if budget <= 0 or len(self._running) >= self._max_num_seqs:
                break
            use_cache = request.sampling.prompt_logprobs is None
            lease = self._cache.match(request.token_ids, request.namespace, use_cache=use_cache)
            request.lease, request.num_computed_tokens = lease, lease.num_published_tokens
            if self._follows(request, behind):
                self._withdraw(request)
                continue
            missing = -(-len(request.token_ids) // self._block_size) - len(lease.block_ids)
            if missing > self._cache.num_available and self._running:
                self._withdraw(request)
                break
            count = self._room_for(request, budget, fresh_blocks, preempt=False)
            if not count:
                self._withdraw(request)
                break
            self._waiting.take(request)
            self._running.append(request)
            self._running.sort(key=lambda r: r.queue_key)
            self._count_start(request)
            chunks.append(self._make_chunk(request, count))
            planned.append(request)
            behind.append(request)
            budget -= count

    def _follows(self, request: Request, others: list[Request]) -> bool:
        """Whether one of `others` is about to compute the block that comes next for this request.

        Waiting for it costs one step and saves the work: requests that arrive together with the same prompt prefill it
        once. The wait ends when the other has computed the block or has left.
        """
        start = request.num_computed_tokens
        end = start + self._block_size
        if end >= len(request.token_ids) or request.lease is None or not request.lease.use_cache:
            return False
        tokens = request.token_ids
        for other in others:
            if (
                other is not request
                and other.namespace == request.namespace
                and other.num_computed_tokens < end < len(other.token_ids)
                and other.token_ids[start:end] == tokens[start:end]
                and other.token_ids[:start] == tokens[:start]
            ):
                return True
        return False

    def _catch_up(self, request: Request) -> None:
        """Adopts blocks of the prompt that others have published meanwhile."""
        lease = request.lease
        assert lease is not None
        covered = self._cache.advance(lease, request.token_ids)
        if covered > request.num_computed_tokens:
            gained = covered - request.num_computed_tokens
            self.counters.prefix_hit_tokens += gained
            if not request.num_preemptions:
                request.num_cached_tokens += gained
            request.num_computed_tokens = covered

    def _room_for(self, request: Request, budget: int, fresh_blocks: array[int], *, preempt: bool) -> int:
        """How many of the request's pending tokens fit into budget and memory; their blocks are leased."""
        lease = request.lease
        assert lease is not None
        count = min(len(request.token_ids) - request.num_computed_tokens, budget)
        room = len(lease.block_ids) * self._block_size - request.num_computed_tokens
        if not preempt:
            count = min(count, room + self._cache.num_available * self._block_size)
        if count <= 0 or not self._reserve(request, count, fresh_blocks, preempt=preempt):
            return 0
        return count

    def _reserve(self, request: Request, count: int, fresh_blocks: array[int], *, preempt: bool) -> bool:
        """Leases the blocks for `count` more tokens; preempts later requests for them if allowed.

        The victim is the last in the order of service, at worst the request itself. It is never part of the plan in the
        making: those before the request are served first, and prompts preempt only while the plan is empty.
        """
        lease = request.lease
        assert lease is not None
        end = request.num_computed_tokens + count
        missing = -(-end // self._block_size) - len(lease.block_ids)
        if missing <= 0:
            return True
        while (new := self._cache.extend(lease, missing)) is None:
            if not preempt:
                return False
            victim = next((r for r in reversed(self._running) if not r.num_scheduled_tokens), request)
            self._preempt(victim)
            if victim is request:
                return False
        fresh_blocks.extend(new)
        return True

    def _preempt(self, request: Request) -> None:
        """Takes a request's memory; it waits again and will compute (or find cached) everything it had."""
        self._running.remove(request)
        self._withdraw(request)
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self._waiting.add(request)

    def _withdraw(self, request: Request) -> None:
        assert request.lease is not None
        self._cache.release(request.lease)
        request.lease = None
        request.num_computed_tokens = 0

    def _count_start(self, request: Request) -> None:
        self.counters.prefix_query_tokens += len(request.token_ids)
        self.counters.prefix_hit_tokens += request.num_computed_tokens
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
            self.counters.prompt_tokens += request.num_prompt_tokens
            self._started.append(request)

    def _make_chunk(self, request: Request, count: int) -> Chunk:
        start = request.num_computed_tokens
        lease = request.lease
        assert lease is not None
        request.num_scheduled_tokens = count
        end = start + count
        sampling = request.sampling if end == len(request.token_ids) else None
        extras = None if request.is_plain else chunk_extras(request, start, end)
        return Chunk(request.request_id, request.token_ids[start:end], start, lease.block_ids, sampling, extras)

    def _append(self, request: Request, token_id: int, computed: ChunkResult) -> RequestOutput:
        request.token_ids.append(token_id)
        self.counters.generation_tokens += 1
        sampling = request.sampling
        reason = None
        if token_id in sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif len(request.token_ids) - request.num_prompt_tokens >= sampling.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._running.remove(request)
            del self._requests[request.request_id]
            self._release(request)
        return RequestOutput(request, token_id, reason, computed.logprobs, computed.prompt_logprobs)

    def _end(self, request_id: str, reason: FinishReason, keep_tokens: int | None) -> RequestOutput | None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if keep_tokens is not None:
            del request.token_ids[request.num_prompt_tokens + keep_tokens :]
        request.finished = True
        if request.lease is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            if not request.num_scheduled_tokens:
                self._release(request)
        return RequestOutput(request, finish_reason=reason)

    def _fail(self, request: Request, error: str) -> RequestOutput:
        """The request ends alone; nothing of what it computed stays cached, as its KV is not to be trusted."""
        self._running.remove(request)
        del self._requests[request.request_id]
        request.finished = True
        assert request.lease is not None
        self._cache.release(request.lease, keep_tokens=request.num_cached_tokens)
        request.lease = None
        return RequestOutput(request, finish_reason=FinishReason.ERROR, error=error)

    def _release(self, request: Request) -> None:
        assert request.lease is not None
        self._cache.release(request.lease)
        request.lease = None

    def check_idle(self) -> None:
        """R5: when nothing runs, every block is free or cached. Raises if one is lost."""
        self._cache.check_counts()
        if self._cache.num_leased or self._cache.num_duplicates:
            raise AssertionError(f"idle, but {self._cache.num_leased} blocks are leased")
