"""`python -m benchmarks.replicas`: a router's choice among replicas, on a scripted clock.

Each replica has the service's scheduler and radix tree; steps take as long as a script says, so every run is the same.
A block of KV stands for 512 tokens, the unit of the trace of Mooncake, so a simulated token stands for 32.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from statistics import mean, quantiles

import click

from moeserve.plan import ChunkResult, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.scheduler import Scheduler
from radix_cache import PrefixCache

BLOCK = 16  # simulated tokens of a block
SCALE = 32  # tokens that a simulated token stands for
_BUDGET = 8192 // SCALE
_STEP_S, _TOKEN_S = 0.03, SCALE / 20_000  # of a step, and of each of its simulated tokens
_BLOCKS = 2048  # of a replica: KV of a million tokens
_OFFERED = 0.8  # of what the replicas could compute if nothing were cached
_POINTS = 64  # of each replica on the ring of hashes
_BOUND = 1.25  # of the mean load, beyond which the ring's next replica is asked


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: seconds of its arrival, ids of its blocks, simulated tokens of its output, its conversation."""

    at: float
    blocks: Sequence[int]
    output: int
    session: str


@dataclass(eq=False, slots=True)
class Replica:
    """One service. open_blocks: blocks of its `num_open` open requests; to_prefill: blocks among them that were not
    cached and are not computed yet."""

    number: int
    cache: PrefixCache = field(default_factory=lambda: PrefixCache(_BLOCKS, BLOCK))
    scheduler: Scheduler = field(init=False)
    plans: list[StepPlan] | None = None
    seconds: float = 0.0
    open_blocks: int = 0
    to_prefill: int = 0
    num_open: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            [self.cache],
            max_num_seqs=64,
            max_num_batched_tokens=_BUDGET,
            max_num_queued_reqs=10**6,
            max_model_len=_BLOCKS * BLOCK // 2,
        )

    def begin_step(self, now: float) -> float | None:
        """Plan the next step; return when it ends, None where nothing is to be done."""
        self.scheduler.set_time(now)
        self.plans = None if self.scheduler.is_idle else self.scheduler.schedule()
        if self.plans is None:
            return None
        self.seconds = _STEP_S + _TOKEN_S * self.plans[0].num_tokens
        return now + self.seconds


Choose = Callable[[Ask, "array[int]", Sequence[Replica]], Replica]


class Routing:
    """The choices of the routers, by name."""

    def __init__(self, seed: int = 1) -> None:
        self._draw = Random(seed)
        self._rings: dict[int, list[tuple[int, int]]] = {}
        self.policies: dict[str, Choose] = {
            "kv-aware": self.kv_aware,
            "prefix-hash": self.prefix_hash,
            "session": self.session,
            "random": self.random,
        }

    def kv_aware(self, _: Ask, tokens: array[int], replicas: Sequence[Replica]) -> Replica:
        """The least of blocks to compute, with this request's, and blocks in use, as Dynamo documents its cost."""
        needed = len(tokens) // BLOCK

        def cost(replica: Replica) -> tuple[int, int]:
            missing = needed - replica.cache.peek(tokens) // BLOCK
            return missing + replica.to_prefill + replica.open_blocks + needed, replica.number

        return min(replicas, key=cost)

    def prefix_hash(self, ask: Ask, _: array[int], replicas: Sequence[Replica]) -> Replica:
        """Consistent hashing of the first block, with bounded loads."""
        return self._on_ring(f"{ask.blocks[0]}", replicas)

    def session(self, ask: Ask, _: array[int], replicas: Sequence[Replica]) -> Replica:
        """Consistent hashing of the conversation, without a bound."""
        return replicas[self._walk(ask.session, len(replicas))[0]]

    def random(self, _: Ask, __: array[int], replicas: Sequence[Replica]) -> Replica:
        return replicas[self._draw.randrange(len(replicas))]

    def _on_ring(self, key: str, replicas: Sequence[Replica]) -> Replica:
        most = _BOUND * (1 + sum(replica.num_open for replica in replicas)) / len(replicas)
        order = self._walk(key, len(replicas))
        return next((replicas[at] for at in order if replicas[at].num_open + 1 <= most), replicas[order[0]])

    def _walk(self, key: str, number: int) -> list[int]:
        """Return the replicas in the order in which a key meets them on the ring."""
        if number not in self._rings:
            self._rings[number] = sorted((_hash(f"{at} {n}"), at) for at in range(number) for n in range(_POINTS))
        ring = self._rings[number]
        start = bisect_left(ring, (_hash(key), 0))
        return list(dict.fromkeys(at for _, at in ring[start:] + ring[:start]))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class Outcome:
    """hit_rate: the share of prompt tokens that were cached. ttft_s: seconds to the first token of each request."""

    hit_rate: float
    ttft_s: Sequence[float]

    @property
    def p50(self) -> float:
        return quantiles(self.ttft_s, n=100)[49]

    @property
    def p99(self) -> float:
        return quantiles(self.ttft_s, n=100)[98]


class Simulation:
    """Replicas that answer the requests of a load, each sent where a router chooses."""

    def __init__(self, num_replicas: int, choose: Choose) -> None:
        self._replicas = [Replica(number) for number in range(num_replicas)]
        self._choose = choose
        self._ends: list[tuple[float, int, Replica]] = []
        self._order = count()
        self._open: dict[str, tuple[Ask, Request, int]] = {}  # with the blocks that were missing; -1 once computed
        self._ttft: list[float] = []
        self._cached = self._asked = 0

    def run(self, asks: Iterable[Ask]) -> Outcome:
        for number, ask in enumerate(asks):
            self._end_steps(ask.at)
            self._send(f"{number}", ask)
        self._end_steps(float("inf"))
        assert not self._open
        return Outcome(self._cached / self._asked, self._ttft)

    def _send(self, name: str, ask: Ask) -> None:
        tokens = array("i", (block * BLOCK + place for block in ask.blocks for place in range(BLOCK)))
        tokens.append(-1 - int(name))  # of no block: no answer is to one
        replica = self._choose(ask, tokens, self._replicas)
        missing = len(ask.blocks) - replica.cache.peek(tokens) // BLOCK
        request = Request(name, tokens, SamplingParams(ask.output))
        self._open[name] = (ask, request, missing)
        replica.num_open += 1
        replica.open_blocks += len(ask.blocks)
        replica.to_prefill += missing
        replica.scheduler.set_time(ask.at)
        replica.scheduler.add(request)
        if replica.plans is None:
            self._begin(replica, ask.at)

    def _begin(self, replica: Replica, now: float) -> None:
        if (end := replica.begin_step(now)) is not None:
            heapq.heappush(self._ends, (end, next(self._order), replica))

    def _end_steps(self, until: float) -> None:
        while self._ends and self._ends[0][0] <= until:
            now, _, replica = heapq.heappop(self._ends)
            assert replica.plans is not None
            results = [ChunkResult(None if chunk.sampling is None else 5) for chunk in replica.plans[0].chunks]
            outputs = replica.scheduler.commit(replica.plans, [StepResult(replica.plans[0].step, results)])
            replica.scheduler.count_step(replica.seconds)
            for output in outputs:
                self._take(output.request.request_id, replica, now, ended=output.finish_reason is not None)
            self._begin(replica, now)

    def _take(self, name: str, replica: Replica, now: float, *, ended: bool) -> None:
        ask, request, missing = self._open[name]
        if missing >= 0:
            self._ttft.append(now - ask.at)
            self._cached += request.num_cached_tokens
            self._asked += request.num_prompt_tokens
            replica.to_prefill -= missing
            self._open[name] = (ask, request, -1)
        if ended:
            del self._open[name]
            replica.num_open -= 1
            replica.open_blocks -= len(ask.blocks)


def mooncake(file: Path) -> list[Ask]:
    """Return the requests of a trace. Conversations are not in it: a request goes on with the one that had at least
    half of its blocks."""
    asks, owners = list[Ask](), dict[int, str]()
    for number, line in enumerate(file.read_text().splitlines()):
        entry = json.loads(line)
        blocks = entry["hash_ids"]
        known = [block for block in blocks if block in owners]
        session = owners[known[-1]] if 2 * len(known) >= len(blocks) else f"{number}"
        owners |= dict.fromkeys((block for block in blocks if block not in owners), session)
        output = max(1, entry["output_length"] // SCALE)
        asks.append(Ask(entry["timestamp"] / 1000, blocks, output, session))
    return asks


def agents(number: int, turns: int = 3) -> list[Ask]:
    """Return the requests of agents of 20 kinds, each with a system prompt of 4 blocks, a task of 2 to 16, and 1 to 4
    more with each turn; between turns a tool takes a log-normal time."""
    draw, new, asks = Random(2), count(1000), list[Ask]()
    for agent in range(number):
        kind, at = draw.randrange(20), draw.uniform(0, 3600)
        blocks = [kind * 4 + place for place in range(4)]
        blocks += [next(new) for _ in range(draw.randint(2, 16))]
        for _ in range(turns):
            asks.append(Ask(at, list(blocks), draw.randint(1, 12), f"{agent}"))
            blocks += [next(new) for _ in range(draw.randint(1, 4))]
            at += draw.lognormvariate(3, 1)
    return sorted(asks, key=lambda ask: ask.at)


def paced(asks: Sequence[Ask], num_replicas: int) -> list[Ask]:
    """Return the requests at the pace at which these replicas are offered the same share of their capacity."""
    work_s = sum(len(ask.blocks) * BLOCK + ask.output for ask in asks) * _TOKEN_S
    factor = work_s / (_OFFERED * num_replicas) / (asks[-1].at - asks[0].at)
    return [Ask((ask.at - asks[0].at) * factor, ask.blocks, ask.output, ask.session) for ask in asks]


def draw_figures(found: dict[str, dict[int, Outcome]], title: str, file: Path) -> None:
    """Draw hit rate and time to first token over the number of replicas."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (hits, times) = pyplot.subplots(1, 2, figsize=(9, 3.2), dpi=110)
    for name, by_number in found.items():
        numbers = list(by_number)
        hits.plot(numbers, [100 * by_number[number].hit_rate for number in numbers], marker="o", label=name)
        times.plot(numbers, [by_number[number].p99 for number in numbers], marker="o", label=name)
    for axes, label in ((hits, "prompt tokens from the cache, %"), (times, "time to first token, p99, s")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("replicas")
        axes.set_ylabel(label)
    hits.set_ylim(bottom=0)
    times.set_yscale("log")
    hits.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


@click.command()
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Of Mooncake.")
@click.option("--agents", "num_agents", type=int, default=10_000, show_default=True, help="Without a trace.")
@click.option("--replicas", multiple=True, type=int, default=(1, 2, 4, 8, 16, 32, 64), show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="A PNG to write.")
def command(trace: Path | None, num_agents: int, replicas: tuple[int, ...], plot: Path | None) -> None:
    """Print hit rate and time to first token by routing and number of replicas."""
    asks = agents(num_agents) if trace is None else mooncake(trace)
    title = f"{num_agents:,} agents" if trace is None else "the trace of Mooncake"
    click.echo("| replicas | routing | cached, % | TTFT mean, s | p50, s | p99, s |\n|---|---|---|---|---|---|")
    found: dict[str, dict[int, Outcome]] = {}
    for number in replicas:
        for name, choose in Routing().policies.items():
            outcome = Simulation(number, choose).run(paced(asks, number))
            found.setdefault(name, {})[number] = outcome
            figures = [mean(outcome.ttft_s), outcome.p50, outcome.p99]
            times = " | ".join(f"{figure:.2f}" for figure in figures)
            click.echo(f"| {number} | {name} | {100 * outcome.hit_rate:.1f} | {times} |")
    if plot is not None:
        draw_figures(found, title, plot)


if __name__ == "__main__":
    command()
