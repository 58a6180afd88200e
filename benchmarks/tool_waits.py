"""`python -m benchmarks.tool_waits`: which KV stays in memory while tools run, on a scripted clock.

The scheduler and the radix tree are the service's; steps take as long as a script says, so every run is the same. The
figure is the share of prompt tokens that were found in memory, by the rule that chooses which KV stays. A block of KV
stands for 512 tokens, the unit of the traces of Mooncake, so a simulated token stands for 32 (`benchmarks.replicas`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import Protocol

import click

from benchmarks.replicas import BLOCK, SCALE, mooncake
from moeserve.plan import ChunkResult, Request, SamplingParams, StepResult
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.tool_waits import ToolWaits
from radix_cache import PrefixCache

_BUDGET = 8192 // SCALE
_STEP_S, _TOKEN_S = 0.01, SCALE / 20_000  # of a step, and of each of its simulated tokens
_IDLE_S = 0.1  # between two looks of an idle engine
_TRACE_LOAD = 0.4  # of what the service could compute if nothing of the trace were cached
_MOST_OUTPUT = 14  # tokens of a trace's answer: less than a block, since its text is not in the trace
_LENGTHS = 96, 24, 8  # of an agent's first prompt, a tool's result, an answer
_TURNS, _JOBS = 24, 2
_ONE_SHOT = 128  # tokens of a prompt that nothing continues

# Seconds that tools take. Of a public trace 86 % of the gaps between an agent's turns are below 1 s, and 95 % below
# 10 s; log-uniform between these, and up to ten minutes.
_SHORT = (("read", 0.8646, 0.05, 1.0), ("search", 0.0866, 1.0, 10.0), ("build", 0.0488, 10.0, 600.0))
# Name, calls of ten, median of a log-normal time with sigma 1.
_LONG = (("read", 5, 2.0), ("search", 3, 10.0), ("build", 2, 90.0))


def short_wait(draw: Random) -> tuple[str, float]:
    name, _, low, high = draw.choices(_SHORT, [share for _, share, _, _ in _SHORT])[0]
    return name, math.exp(draw.uniform(math.log(low), math.log(high)))


def long_wait(draw: Random) -> tuple[str, float]:
    name, _, median = draw.choices(_LONG, [calls for _, calls, _ in _LONG])[0]
    return name, median * math.exp(draw.gauss(0, 1))


class Rule(Protocol):
    """Decides what becomes of the KV of turns; LRU but for that."""

    def arrive(self, request: Request, now: float) -> None: ...
    def end(self, request: Request, tool: str | None, now: float) -> None: ...
    def advance(self, now: float) -> None: ...


class LeastRecentlyUsed:
    """Does nothing."""

    def arrive(self, request: Request, now: float) -> None:
        pass

    def end(self, request: Request, tool: str | None, now: float) -> None:
        pass

    def advance(self, now: float) -> None:
        pass


class Retained(LeastRecentlyUsed):
    """Retains each turn that has called a tool for `seconds`."""

    def __init__(self, cache: PrefixCache, _: Scheduler, *, seconds: float) -> None:
        self._cache = cache
        self._seconds = seconds

    def end(self, request: Request, tool: str | None, now: float) -> None:
        if tool is not None:
            lease = self._cache.match(request.token_ids, request.namespace)
            self._cache.retain(lease, len(request.token_ids), self._seconds)
            self._cache.release(lease)


class Learned:
    """Learns how long each tool takes."""

    def __init__(self, cache: PrefixCache, scheduler: Scheduler) -> None:
        self._waits = ToolWaits([cache], scheduler.waiting)

    def arrive(self, request: Request, now: float) -> None:
        self._waits.record_return(request, now)

    def end(self, request: Request, tool: str | None, now: float) -> None:
        self._waits.record_end(request, now, is_whole=True)
        if tool is not None:
            self._waits.begin(request.request_id, [tool], now)

    def advance(self, now: float) -> None:
        self._waits.advance(now)


MakeRule = Callable[[PrefixCache, Scheduler], Rule]


@dataclass(slots=True)
class Service:
    """One service. cached, asked: prompt tokens of the requests that count."""

    num_blocks: int
    make_rule: MakeRule
    token_s: float = _TOKEN_S
    now: float = 0.0
    cached: int = 0
    asked: int = 0
    cache: PrefixCache = field(init=False)
    scheduler: Scheduler = field(init=False)
    rule: Rule = field(init=False)

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.num_blocks, BLOCK)
        self.scheduler = Scheduler(
            [self.cache],
            max_num_seqs=64,
            max_num_batched_tokens=_BUDGET,
            max_num_queued_reqs=10**6,
            max_model_len=self.num_blocks * BLOCK // 2,
        )
        self.rule = self.make_rule(self.cache, self.scheduler)

    def ask(self, name: str, tokens: array[int], num_output: int, *, has_tools: bool = True) -> None:
        session = "" if has_tools else None
        request = Request(name, tokens[:], SamplingParams(num_output), "key", session=session)
        self.scheduler.set_time(self.now)
        self.rule.arrive(request, self.now)
        self.scheduler.add(request)

    def step(self, until: float) -> Iterator[Request]:
        """Compute a step, or wait no longer than `until`. Yield the requests that have ended."""
        scheduler = self.scheduler
        scheduler.set_time(self.now)
        self.rule.advance(self.now)
        plans = None if scheduler.is_idle else scheduler.schedule()
        if plans is None:
            self.now = max(self.now, min(until, self.now + _IDLE_S))
            return
        seconds = _STEP_S + self.token_s * plans[0].num_tokens
        self.now += seconds
        results = [ChunkResult(None if chunk.sampling is None else 5) for chunk in plans[0].chunks]
        outputs = scheduler.commit(plans, [StepResult(plans[0].step, results)])
        scheduler.count_step(seconds)
        yield from (output.request for output in outputs if output.finish_reason is not None)

    def end(self, request: Request, tool: str | None) -> None:
        """Count a request that has ended. tool: that it calls, None for none."""
        self.cached += request.num_cached_tokens
        self.asked += request.num_prompt_tokens
        self.rule.end(request, tool, self.now)

    @property
    def hit_rate(self) -> float:
        return self.cached / self.asked


def replay(file: Path, num_blocks: int, make_rule: MakeRule) -> float:
    """Return the share of cached prompt tokens of a trace, in which every request counts as one that calls a tool."""
    asks = mooncake(file)
    num_tokens = sum(len(ask.blocks) * BLOCK for ask in asks)
    service = Service(num_blocks, make_rule, _TRACE_LOAD * asks[-1].at / num_tokens)
    for number, ask in enumerate(asks):
        while service.now < ask.at:
            for request in service.step(ask.at):
                service.end(request, "tool")
        tokens = array("i", (block * BLOCK + place for block in ask.blocks for place in range(BLOCK)))
        tokens.append(-1 - number)  # of no block: no answer is to one
        service.ask(f"{number}", tokens, min(_MOST_OUTPUT, ask.output))
    while not service.scheduler.is_idle:
        for request in service.step(math.inf):
            service.end(request, "tool")
    return service.hit_rate


@dataclass(frozen=True, slots=True)
class Load:
    """Agents of one key. share: of their working set, in KV. one_shots: prompts per second, of the same key, that call
    no tools and that nothing continues."""

    name: str
    wait: Callable[[Random], tuple[str, float]]
    share: float
    one_shots: float = 0.0
    agents: int = 24

    @property
    def num_blocks(self) -> int:
        prompt, result, answer = _LENGTHS
        final = prompt + _TURNS * (result + answer)
        return round(self.share * self.agents * final / BLOCK)


LOADS = (
    Load("agents, short waits", short_wait, 0.25),
    Load("agents, long waits", long_wait, 0.25),
    Load("agents, short waits, one-shot prompts", short_wait, 0.35, 2.0),
    Load("agents, long waits, one-shot prompts", long_wait, 0.35, 2.0),
)


@dataclass(slots=True)
class Agent:
    draw: Random
    tokens: array[int] = field(default_factory=lambda: array("i"))
    turn: int = 0
    job: int = 0

    def read(self, count: int) -> None:
        self.tokens.extend(self.draw.randrange(10**6) for _ in range(count))


class Agents:
    """Agents that do one job after another, each of some turns with a tool between two of them."""

    def __init__(self, load: Load, make_rule: MakeRule, seed: int) -> None:
        self._load = load
        self._service = Service(load.num_blocks, make_rule)
        self._agents = [Agent(Random(1000 * seed + number)) for number in range(load.agents)]
        self._calls = [(2.0 * number, number) for number in range(load.agents)]
        self._draw = Random(seed)
        self._next_one_shot = 0.0 if load.one_shots else math.inf
        for agent in self._agents:
            agent.read(_LENGTHS[0])

    def run(self) -> float:
        """Return the share of the agents' prompt tokens that were cached."""
        while any(agent.job < _JOBS for agent in self._agents):
            self._ask_due()
            due = self._calls[0][0] if self._calls else math.inf
            for request in self._service.step(min(due, self._next_one_shot)):
                if request.session is not None:
                    self._end(request)
        return self._service.hit_rate

    def _ask_due(self) -> None:
        service = self._service
        while self._calls and self._calls[0][0] <= service.now:
            number = heappop(self._calls)[1]
            service.ask(f"{number}", self._agents[number].tokens, _LENGTHS[2])
        while self._next_one_shot <= service.now:
            tokens = array("i", (self._draw.randrange(10**6) for _ in range(_ONE_SHOT)))
            service.ask(f"one shot {self._next_one_shot}", tokens, 4, has_tools=False)
            self._next_one_shot += self._draw.expovariate(self._load.one_shots)

    def _end(self, request: Request) -> None:
        agent = self._agents[int(request.request_id)]
        agent.turn += 1
        if agent.turn < _TURNS:
            tool, seconds = self._load.wait(agent.draw)
            agent.tokens = request.token_ids[:]
            agent.read(_LENGTHS[1])
        else:
            tool, seconds = None, agent.draw.expovariate(1 / 20)
            agent.turn, agent.job, agent.tokens = 0, agent.job + 1, array("i")
            agent.read(_LENGTHS[0])
        if agent.job < _JOBS:
            heappush(self._calls, (self._service.now + seconds, int(request.request_id)))
        self._service.end(request, tool)


@click.command()
@click.option("--seconds", type=float, multiple=True, default=(10, 60, 300), show_default=True, help="Of retention.")
@click.option("--seeds", type=click.IntRange(1), default=2, show_default=True)
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Of Mooncake: instead.")
@click.option("--blocks", type=int, multiple=True, default=(1024, 2048, 8192), show_default=True, help="With a trace.")
def command(seconds: Sequence[float], seeds: int, trace: Path | None, blocks: Sequence[int]) -> None:
    """Print the share of prompt tokens that were found in memory, in percent, by load and rule."""
    rules: dict[str, MakeRule] = {"LRU": lambda _cache, _scheduler: LeastRecentlyUsed()}
    for each in seconds:
        rules[f"retained {each:g} s"] = partial(Retained, seconds=each)
    rules["learned"] = Learned
    click.echo(f"| load | KV, tokens | {' | '.join(rules)} |")
    click.echo("|---" * (2 + len(rules)) + "|")
    if trace is not None:
        for number in blocks:
            rates = [replay(trace, number, make) for make in rules.values()]
            click.echo(row(trace.stem, number, rates))
        return
    for load in LOADS:
        rates = [sum(Agents(load, make, 1 + seed).run() for seed in range(seeds)) / seeds for make in rules.values()]
        click.echo(row(load.name, load.num_blocks, rates))


def row(name: str, num_blocks: int, rates: Sequence[float]) -> str:
    return f"| {name} | {num_blocks * BLOCK * SCALE:,} | " + " | ".join(f"{100 * rate:.1f}" for rate in rates) + " |"


if __name__ == "__main__":
    command()
