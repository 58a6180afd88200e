"""Agents' conversations through the service's scheduler and prefix cache: how much of their prompts they find cached.

Nothing is computed, so these are counts that any machine gives. A token stands for a word.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from zlib import crc32

from moeserve.bench.workloads import Shape, agents
from moeserve.device import WindowDemand
from moeserve.plan import Chunk, ChunkResult, Request, SamplingParams, StepResult
from moeserve.scheduling.request_states import StatePolicy
from moeserve.scheduling.scheduler import Scheduler
from radix_cache import PrefixCache

NUM_SLOTS = 64
_STEP_TOKENS = 256
# Around the words of a message, and before an answer.
_MESSAGE_TOKENS = [0, 1, 2, 3]


@dataclass(eq=False, slots=True)
class Talk:
    """A conversation: each of `turns` follows the history, and an answer of `max_tokens` follows each."""

    turns: Sequence[array[int]]
    max_tokens: int
    history: array[int]
    num_turns: int = 0

    def next_prompt(self) -> array[int] | None:
        if self.num_turns == len(self.turns):
            return None
        self.num_turns += 1
        return self.history + self.turns[self.num_turns - 1]


@dataclass(frozen=True, slots=True)
class Load:
    """Talks. At most `concurrency` of them wait for an answer."""

    talks: Sequence[Talk]
    concurrency: int
    block_size: int


def agents_load(shape: Shape) -> Load:
    (workload,) = agents(shape, seed=0, run=0)
    numbers: defaultdict[str, int] = defaultdict(count(len(_MESSAGE_TOKENS)).__next__)

    def message(text: str) -> array[int]:
        return array("i", [*_MESSAGE_TOKENS, *(numbers[word] for word in text.split())])

    talks = []
    for one in workload.conversations:
        turns = [message(question) + array("i", _MESSAGE_TOKENS) for question in one.questions]
        talks.append(Talk([message(one.system or "") + turns[0], *turns[1:]], workload.max_tokens, array("i")))
    return Load(talks, workload.concurrency, block_size=16)


class Service:
    """A scheduler whose steps compute nothing."""

    def __init__(self, cache: PrefixCache, policy: StatePolicy | None = None) -> None:
        self.cache = cache
        self._scheduler = Scheduler(
            [cache],
            max_num_seqs=NUM_SLOTS,
            max_num_batched_tokens=max(NUM_SLOTS, _STEP_TOKENS),
            max_num_queued_reqs=NUM_SLOTS,
            max_model_len=cache.num_blocks * cache.block_size,
            states=policy,
        )
        self._num_requests = 0
        self.num_prompt = self.num_cached = 0

    def serve(self, load: Load) -> None:
        """Serve a load to its end. Its talks are as before afterwards."""
        waiting = deque(load.talks)
        running: dict[str, Talk] = {}
        for talk in load.talks:
            talk.history, talk.num_turns = array("i"), 0
        while waiting or running:
            while waiting and len(running) < load.concurrency:
                talk = waiting.popleft()
                prompt = talk.next_prompt()
                if prompt is not None:
                    running[self._add(prompt, talk.max_tokens)] = talk
            for request in self._step() if running else ():
                talk = running.pop(request.request_id)
                talk.history = request.token_ids
                waiting.append(talk)

    def _add(self, prompt: array[int], max_tokens: int) -> str:
        self._num_requests += 1
        request = Request(str(self._num_requests), prompt, SamplingParams(max_tokens=max_tokens))
        self._scheduler.add(request)
        return request.request_id

    def _step(self) -> list[Request]:
        """Return the requests that end with the next step."""
        plans = self._scheduler.schedule()
        assert plans is not None
        (plan,) = plans
        results = [ChunkResult(None if one.sampling is None else _draw(one)) for one in plan.chunks]
        outputs = self._scheduler.commit(plans, [StepResult(plan.step, results)])
        ended = [output.request for output in outputs if output.finish_reason is not None]
        self.num_prompt += sum(request.num_prompt_tokens for request in ended)
        self.num_cached += sum(request.num_cached_tokens for request in ended)
        return ended


def with_snapshots(memory: int, num_snapshots: int, load: Load, policy: StatePolicy | None) -> Service:
    """Return a service with this number of tokens of KV, and snapshots if there is a policy for them."""
    rows = None if policy is None else range(NUM_SLOTS, NUM_SLOTS + num_snapshots)
    return Service(PrefixCache(memory // load.block_size, load.block_size, snapshot_rows=rows), policy)


def _draw(chunk: Chunk) -> int:
    """Return a token that no other request draws at another position."""
    return crc32(f"{chunk.request_id} {chunk.start}".encode()) >> 1


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model: how many see all tokens, how many see the last `window`."""

    num_full: int
    num_windowed: int
    window: int


def caches(layers: Layers, memory: int, block_size: int) -> tuple[PrefixCache, PrefixCache]:
    """Return the caches of one pool for all layers, and of two pools. memory: in tokens of all layers."""
    # A layer takes a byte per token: only ratios count.
    block_bytes = (layers.num_full + layers.num_windowed) * block_size
    demand = WindowDemand(layers.num_windowed * block_size, layers.window, NUM_SLOTS, _STEP_TOKENS)
    total = memory // block_size * block_bytes
    num_blocks, num_window_blocks = demand.share(total, block_bytes, block_size, None)
    apart = PrefixCache(num_blocks, block_size, num_window_blocks=num_window_blocks, window=layers.window)
    return PrefixCache(memory // block_size, block_size), apart


def reused(cache: PrefixCache, load: Load) -> float:
    """Return the share of the prompts' tokens that were cached."""
    service = Service(cache)
    service.serve(load)
    return service.num_cached / service.num_prompt
