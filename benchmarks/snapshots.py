"""How much of their prompts models with recurrent states find cached, by the boundaries at which they keep snapshots.

    python -m benchmarks.snapshots [--trace mooncake_trace.jsonl]

The scheduler and the prefix cache are the service's; nothing is computed, so these are counts that any machine gives.
Each policy gets the same memory: `--memory` for KV and `--share` of that for snapshots, each as large as the KV of
`--state` tokens. A model that needs no states has all of it for KV, and its reuse is what can be reused.

Without a trace: the agents of `moeserve bench serve --workload agents`, one token per word. A trace has `input_length`
and `hash_ids`, one id for each 512 tokens with all before them; its requests come one after the other.
"""

from __future__ import annotations

import argparse
import json
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from zlib import crc32

from moeserve.bench.workloads import Shape, agents
from moeserve.plan import Chunk, ChunkResult, Request, SamplingParams, StepResult
from moeserve.scheduling.request_states import (
    DECODE_INTERVAL_TOKENS,
    MIN_GAIN_TOKENS,
    PROMPT_INTERVAL_TOKENS,
    ChoosePositions,
    StatePolicy,
)
from moeserve.scheduling.request_states import wanted_positions as end_and_branching
from moeserve.scheduling.scheduler import Scheduler
from radix_cache import PrefixCache

# The Qwen3.5 and 3.6 models with 35B parameters: 61.9 MiB of states, 20 KiB of KV per token.
_STATE_TOKENS = 3168
NUM_SLOTS = 64
_TRACE_UNIT = 512
STEP_TOKENS = 256
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
    """Talks. At most `concurrency` of them wait for an answer. A token stands for `unit` tokens."""

    talks: Sequence[Talk]
    concurrency: int
    block_size: int
    unit: int


def agents_load(shape: Shape) -> Load:
    (workload,) = agents(shape, seed=0, run=0)
    numbers: defaultdict[str, int] = defaultdict(count(len(_MESSAGE_TOKENS)).__next__)

    def message(text: str) -> array[int]:
        return array("i", [*_MESSAGE_TOKENS, *(numbers[word] for word in text.split())])

    talks = []
    for one in workload.conversations:
        turns = [message(question) + array("i", _MESSAGE_TOKENS) for question in one.questions]
        talks.append(Talk([message(one.system or "") + turns[0], *turns[1:]], workload.max_tokens, array("i")))
    return Load(talks, workload.concurrency, block_size=16, unit=1)


def trace_load(path: Path, limit: int) -> Load:
    talks = []
    with path.open() as lines:
        for number, line in enumerate(lines):
            one = json.loads(line)
            # Whole blocks before the last token, and an end of one's own.
            ids = one["hash_ids"][: (one["input_length"] - 1) // _TRACE_UNIT]
            talks.append(Talk([array("i", [*ids, 2**30 + number])], 1, array("i")))
    return Load(talks[:limit], 1, block_size=1, unit=_TRACE_UNIT)


def only_the_last(start: int, known: int, marks: Iterable[int], last: int, min_gain: int) -> list[int]:
    """At the last boundary of the prompt."""
    return [last] if last - start >= min_gain else []


def every(size: int) -> ChoosePositions:
    """At the multiples of `size`, and at the last boundary of the prompt."""

    def positions(start: int, known: int, marks: Iterable[int], last: int, min_gain: int) -> list[int]:
        return sorted({position for position in (*range(0, last, size), last) if position > start})

    return positions


def policies(load: Load) -> dict[str, StatePolicy | None]:
    """Return by name where snapshots are kept; None where none are needed."""
    gain = max(1, MIN_GAIN_TOKENS // load.unit)
    # The answers of a trace are not in it.
    interval = DECODE_INTERVAL_TOKENS if load.unit == 1 else 2**30

    def keep(choose: ChoosePositions, *, foresees: bool = False, prompt_interval: int = 2**30) -> StatePolicy:
        return StatePolicy(NUM_SLOTS, gain, interval, prompt_interval, choose, foresees)

    return {
        "no states needed": None,
        "the service's": keep(
            end_and_branching, foresees=True, prompt_interval=max(1, PROMPT_INTERVAL_TOKENS // load.unit)
        ),
        "end and branching": keep(end_and_branching, foresees=True),
        "end and branching without foresight": keep(end_and_branching),
        "only the last": keep(only_the_last),
        "every 8192 tokens and the last": keep(every(8192 // load.unit)),
        "every block": keep(every(load.block_size)),
    }


class Service:
    """A scheduler whose steps compute nothing."""

    def __init__(self, cache: PrefixCache, policy: StatePolicy | None = None) -> None:
        self.cache = cache
        self._scheduler = Scheduler(
            [cache],
            max_num_seqs=NUM_SLOTS,
            max_num_batched_tokens=max(NUM_SLOTS, STEP_TOKENS),
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
    return Service(PrefixCache(memory // (load.block_size * load.unit), load.block_size, snapshot_rows=rows), policy)


def _draw(chunk: Chunk) -> int:
    """Return a token that no other request draws at another position."""
    return crc32(f"{chunk.request_id} {chunk.start}".encode()) >> 1


def report(load: Load, memory: int, state: int, share: float) -> list[str]:
    """Return the lines of a table: by policy the reused share of the reusable tokens, and the snapshots.

    memory, state: in tokens of KV. share: of the memory, for snapshots beside it.
    """
    num_snapshots = int(memory * share) // state
    lines = [
        f"{memory} tokens of KV, {num_snapshots} snapshots of {state} tokens",
        "| snapshots at | prompt tokens reused | of what can be reused | saved | used | evicted |",
        "|---|---|---|---|---|---|",
    ]
    best = 0
    for name, policy in policies(load).items():
        own = int(memory * (1 + share)) if policy is None else memory
        service = with_snapshots(own, num_snapshots, load, policy)
        service.serve(load)
        best = best or service.num_cached
        table, share = service.cache.snapshots, service.num_cached / service.num_prompt
        counts = (table.num_placed, table.num_used, table.num_evicted) if policy else ("", "", "")
        cells = (name, f"{100 * share:.1f} %", f"{100 * service.num_cached / max(1, best):.1f} %", *counts)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.snapshots", description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="file of a trace; the agents without it")
    parser.add_argument("--requests", type=int, default=10**9, help="of the trace")
    parser.add_argument("--agents", type=int, default=Shape().num_agents)
    parser.add_argument("--turns", type=int, default=Shape().num_turns)
    parser.add_argument("--memory", type=float, nargs="+", default=[209_715], help="in tokens of KV")
    parser.add_argument("--state", type=int, default=_STATE_TOKENS, help="size of a snapshot in tokens of KV")
    parser.add_argument("--share", type=float, default=0.25, help="of the memory for KV, for snapshots")
    options = parser.parse_args(arguments)
    if options.trace is None:
        load = agents_load(Shape(num_agents=options.agents, num_turns=options.turns))
    else:
        load = trace_load(options.trace, options.requests)
    for memory in options.memory:
        print("\n".join(report(load, int(memory), options.state, options.share)), flush=True)


if __name__ == "__main__":
    main()
