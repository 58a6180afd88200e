"""`python -m benchmarks.tool_waits`: which KV stays in memory while tools run, on a scripted clock.

The scheduler and the radix tree are the service's; steps take as long as a script says, so every run is the same. The
figure is the share of prompt tokens that were found in memory, by the time for which turns are retained. A block of KV
stands for 512 tokens, the unit of the traces of Mooncake, so a simulated token stands for 32 (`benchmarks.replicas`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from random import Random

import click

from benchmarks.replicas import BLOCK, SCALE, mooncake
from moeserve.plan import Asked, ChunkResult, FinishReason, Request, SamplingParams, StepResult
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
_SHORT = ((0.8646, 0.05, 1.0), (0.0866, 1.0, 10.0), (0.0488, 10.0, 600.0))
# Calls of ten, and the median of a log-normal time with sigma 1.
_LONG = ((5, 2.0), (3, 10.0), (2, 90.0))


def short_wait(draw: Random) -> float:
    _, low, high = draw.choices(_SHORT, [share for share, _, _ in _SHORT])[0]
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def long_wait(draw: Random) -> float:
    _, median = draw.choices(_LONG, [calls for calls, _ in _LONG])[0]
    return median * math.exp(draw.gauss(0, 1))


@dataclass(slots=True)
class Service:
    """One service. retained_s: for which it retains turns that have called tools, 0 for LRU. cached, asked: prompt
    tokens of the requests that count."""

    num_blocks: int
    retained_s: float
    token_s: float = _TOKEN_S
    now: float = 0.0
    cached: int = 0
    asked: int = 0
    cache: PrefixCache = field(init=False)
    scheduler: Scheduler = field(init=False)
    waits: ToolWaits = field(init=False)

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.num_blocks, BLOCK)
        self.scheduler = Scheduler(
            [self.cache],
            max_num_seqs=64,
            max_num_batched_tokens=_BUDGET,
            max_num_queued_reqs=10**6,
            max_model_len=self.num_blocks * BLOCK // 2,
        )
        self.waits = ToolWaits([self.cache], self.retained_s)

    def ask(self, name: str, tokens: array[int], num_output: int, *, has_tools: bool = True) -> None:
        request = Request(name, tokens[:], SamplingParams(num_output), "key", asked=Asked(has_tools=has_tools))
        self.scheduler.set_time(self.now)
        self.scheduler.add(request)

    def step(self, until: float) -> Iterator[Request]:
        """Compute a step, or wait no longer than `until`. Yield the requests that have ended."""
        scheduler = self.scheduler
        scheduler.set_time(self.now)
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

    def end(self, request: Request, *, calls_tools: bool = True) -> None:
        """Count a request that has ended."""
        self.cached += request.num_cached_tokens
        self.asked += request.num_prompt_tokens
        if calls_tools and self.retained_s:
            self.waits.left(request, FinishReason.STOP)
            self.waits.turned(request.request_id)

    @property
    def hit_rate(self) -> float:
        return self.cached / self.asked


def replay(file: Path, num_blocks: int, retained_s: float) -> float:
    """Return the share of cached prompt tokens of a trace, in which every request counts as one that calls a tool."""
    asks = mooncake(file)
    num_tokens = sum(len(ask.blocks) * BLOCK for ask in asks)
    service = Service(num_blocks, retained_s, _TRACE_LOAD * asks[-1].at / num_tokens)
    for number, ask in enumerate(asks):
        while service.now < ask.at:
            for request in service.step(ask.at):
                service.end(request)
        tokens = array("i", (block * BLOCK + place for block in ask.blocks for place in range(BLOCK)))
        tokens.append(-1 - number)  # of no block: no answer is to one
        service.ask(f"{number}", tokens, min(_MOST_OUTPUT, ask.output))
    while not service.scheduler.is_idle:
        for request in service.step(math.inf):
            service.end(request)
    return service.hit_rate


@dataclass(frozen=True, slots=True)
class Load:
    """Agents of one key. share: of their working set, in KV. one_shots: prompts per second, of the same key, that call
    no tools and that nothing continues."""

    name: str
    wait: Callable[[Random], float]
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

    def __init__(self, load: Load, retained_s: float, seed: int) -> None:
        self._load = load
        self._service = Service(load.num_blocks, retained_s)
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
                if request.asked.has_tools:
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
        calls_tools = agent.turn < _TURNS
        if calls_tools:
            seconds = self._load.wait(agent.draw)
            agent.tokens = request.token_ids[:]
            agent.read(_LENGTHS[1])
        else:
            seconds = agent.draw.expovariate(1 / 20)
            agent.turn, agent.job, agent.tokens = 0, agent.job + 1, array("i")
            agent.read(_LENGTHS[0])
        if agent.job < _JOBS:
            heappush(self._calls, (self._service.now + seconds, int(request.request_id)))
        self._service.end(request, calls_tools=calls_tools)


@click.command()
@click.option("--seconds", type=float, multiple=True, default=(10, 60, 300), show_default=True, help="Of retention.")
@click.option("--seeds", type=click.IntRange(1), default=2, show_default=True)
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Of Mooncake: instead.")
@click.option("--blocks", type=int, multiple=True, default=(1024, 2048, 8192), show_default=True, help="With a trace.")
def command(seconds: Sequence[float], seeds: int, trace: Path | None, blocks: Sequence[int]) -> None:
    """Print the share of prompt tokens that were found in memory, in percent, by load and rule."""
    rules = (0.0, *seconds)
    click.echo(f"| load | KV, tokens | LRU | {' | '.join(f'{each:g} s' for each in seconds)} |")
    click.echo("|---" * (2 + len(rules)) + "|")
    if trace is not None:
        for number in blocks:
            rates = [replay(trace, number, each) for each in rules]
            click.echo(row(trace.stem, number, rates))
        return
    for load in LOADS:
        rates = [sum(Agents(load, each, 1 + seed).run() for seed in range(seeds)) / seeds for each in rules]
        click.echo(row(load.name, load.num_blocks, rates))


def row(name: str, num_blocks: int, rates: Sequence[float]) -> str:
    return f"| {name} | {num_blocks * BLOCK * SCALE:,} | " + " | ".join(f"{100 * rate:.1f}" for rate in rates) + " |"


if __name__ == "__main__":
    command()
