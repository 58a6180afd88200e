"""`python -m benchmarks.tool_waits`: agents that wait for tools, and which of their KV stays, on a scripted clock.

Scheduler, tree and decisions are the service's; steps and copies take as long as a script says
(`benchmarks.kv_overflow_simulation`). Each agent's prompt grows by its answer and the tool's result with every turn. A
job's time is that of all its turns, without the time of its tools.

Bélády's rule knows when each agent comes back: the KV that is needed last leaves memory first, and with a disk it comes
back just before it is needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import heappop, heappush
from math import exp, inf, log
from random import Random
from statistics import mean

import click

from benchmarks.kv_overflow_simulation import BUDGET, ScriptedCopies, results_of, step_seconds
from moeserve.plan import Request, SamplingParams
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.tool_waits import ToolWaits
from radix_cache import PrefixCache, StoredBlocks

SIZE = 16
_WEIGHT_BITS = 24  # between the weights of accounts one after another: more than their holdings differ by
_LEAD = 3.0  # Bélády's KV is read this many times as long before it is needed as that takes
# Median seconds of tools, and how often each is called.
TOOLS = {"read": (2.0, 5), "search": (10.0, 3), "build": (90.0, 2)}


class Policy(StrEnum):
    """The rule that chooses the KV that stays in memory."""

    LRU = "LRU"
    WAITS = "kept for the tool"
    BELADY = "Bélády"


# The rows of the table that all are compared with.
BASES = [f"{policy.value}{tier}" for policy in (Policy.LRU, Policy.BELADY) for tier in ("", ", disk")]


@dataclass(frozen=True, slots=True)
class Replay:
    """token_s: seconds that a copy of a token takes; None without a disk. share: of the working set, in KV. speed: of
    the service, times that of the script."""

    share: float = 0.25
    token_s: float | None = None
    agents: int = 32
    turns: int = 8
    prompt: int = 3000
    answer: int = 24
    result: int = 300
    speed: float = 16.0
    sigma: float = 1.0
    jobs: int = 3
    seed: int = 1


@dataclass(slots=True)
class Agent:
    """Does one job after another. due: when it asks next; the turns of its job have taken `busy_s`."""

    number: int
    random: Random
    tokens: array[int] = field(default_factory=lambda: array("i"))
    namespace: str = ""
    job: int = 0
    turn: int = 0
    asked_at: float = 0.0
    due: float = 0.0
    busy_s: float = 0.0
    is_waiting: bool = True

    def draw(self, count: int) -> array[int]:
        """Return new tokens."""
        return array("i", (self.random.randrange(10**6) for _ in range(count)))

    def call(self, sigma: float) -> tuple[str, float]:
        """Return a tool, and the seconds that it takes."""
        (tool,) = self.random.choices(list(TOOLS), [weight for _, weight in TOOLS.values()])
        return tool, exp(self.random.gauss(log(TOOLS[tool][0]), sigma))


class Bench:
    """One replay under one policy."""

    def __init__(self, replay: Replay, policy: Policy) -> None:
        self.replay, self.policy = replay, policy
        final = replay.prompt + replay.turns * (replay.answer + replay.result)
        self.num_blocks = round(replay.share * replay.agents * final / SIZE)
        stored = None if replay.token_s is None else StoredBlocks(bytes(32), "0" * 32, 10**12)
        self.cache = PrefixCache(self.num_blocks, SIZE, stored=stored, retention_share=0.9)
        self.scheduler = Scheduler(
            [self.cache],
            max_num_seqs=16,
            max_num_batched_tokens=BUDGET,
            max_num_queued_reqs=1000,
            max_model_len=final + BUDGET,
        )
        self.waits = ToolWaits([self.cache], self.scheduler.waiting) if policy is Policy.WAITS else None
        self.copies = ScriptedCopies(SIZE * (replay.token_s or 0.0))
        self.now = 0.0
        self.calls: list[tuple[float, int]] = []
        self.agents = [Agent(number, Random(1000 * replay.seed + number)) for number in range(replay.agents)]
        for agent in self.agents:
            agent.namespace = f"{agent.number}" if policy is Policy.BELADY else f"key/{agent.number}"
            agent.tokens = agent.draw(replay.prompt)
            agent.due = 2.0 * agent.number
            heappush(self.calls, (agent.due, agent.number))
        self.job_s: list[float] = []

    def run(self) -> float:
        """Return the mean seconds of a job."""
        while self.calls or not self.scheduler.is_idle:
            while self.calls and self.calls[0][0] <= self.now:
                self.ask(self.agents[heappop(self.calls)[1]])
            self.step()
        return mean(self.job_s)

    def ask(self, agent: Agent) -> None:
        agent.asked_at, agent.is_waiting = self.now, False
        request = Request(
            f"{agent.number}", agent.tokens[:], SamplingParams(self.replay.answer), agent.namespace, session=""
        )
        if self.waits is not None:
            self.waits.record_return(request, self.now)
        self.scheduler.add(request)

    def step(self) -> None:
        scheduler = self.scheduler
        scheduler.set_time(self.now)
        for result in self.copies.take(self.now):
            scheduler.waiting.end_copy(result, self.now)
        if self.waits is not None:
            self.waits.advance(self.now)
        for job in scheduler.waiting.take_copies(self.now):
            self.copies.start(job, self.now)
        if self.policy is Policy.BELADY:
            self.foresee()
        plans = scheduler.schedule()
        if plans is None:
            ends = self.copies.next_end() if self.copies.is_busy else inf
            self.now = max(self.now, min(ends, self.calls[0][0] if self.calls else inf, self.now + 0.05))
            return
        seconds = step_seconds(plans[0]) / self.replay.speed
        self.now += seconds
        outputs = scheduler.commit(plans, [results_of(plans[0])])
        scheduler.count_step(seconds)
        for output in outputs:
            if output.finish_reason is not None:
                self.end(output.request)

    def end(self, request: Request) -> None:
        agent = self.agents[int(request.request_id)]
        agent.busy_s += self.now - agent.asked_at
        agent.turn += 1
        if self.waits is not None:
            self.waits.record_end(request, self.now, is_whole=True)
        if agent.turn == self.replay.turns:
            self.end_job(agent)
            return
        tool, gap = agent.call(self.replay.sigma)
        agent.due, agent.is_waiting = self.now + gap, True
        agent.tokens = request.token_ids + agent.draw(self.replay.result)
        heappush(self.calls, (agent.due, agent.number))
        if self.waits is not None:
            self.waits.begin(request.request_id, [tool], self.now)

    def end_job(self, agent: Agent) -> None:
        """Let the agent begin its next job, unless it was its last one. The first one does not count."""
        agent.job += 1
        if agent.job > 1:
            self.job_s.append(agent.busy_s)
        agent.busy_s, agent.turn, agent.is_waiting = 0.0, 0, True
        agent.tokens = agent.draw(self.replay.prompt)
        agent.due = self.now + agent.random.expovariate(1 / 5.0) if agent.job < self.replay.jobs else inf
        if agent.due < inf:
            heappush(self.calls, (agent.due, agent.number))

    def foresee(self) -> None:
        """Let KV leave memory in the reverse order of the agents' returns, and have the next ones' read from disk.

        Each agent is an account of its own here, and the weights of accounts give the order.
        """
        waiting = sorted((one for one in self.agents if one.is_waiting), key=lambda one: one.due if one.turn else inf)
        for place, agent in enumerate(waiting, start=1):
            self.cache.share(agent.namespace, 2.0 ** (-_WEIGHT_BITS * place), 1.0)
        if self.replay.token_s is None:
            return
        for agent in waiting:
            if not agent.turn or agent.due - self.now > _LEAD * self.replay.token_s * len(agent.tokens):
                return
            self.scheduler.waiting.read_back(agent.tokens, agent.namespace, 0)


def mean_job_s(replay: Replay, policy: Policy, seeds: int) -> float:
    return mean(Bench(replace(replay, seed=1 + seed), policy).run() for seed in range(seeds))


def table(replay: Replay, seeds: int) -> Iterator[str]:
    """Yield the rows of a table: the mean seconds of a job by policy without the disk and with it."""
    in_memory = replace(replay, token_s=None)
    found: dict[str, float] = {}
    for policy in Policy:
        found[policy.value] = mean_job_s(in_memory, policy, seeds)
        found[f"{policy.value}, disk"] = mean_job_s(replay, policy, seeds)
    found["all KV in memory"] = mean_job_s(replace(in_memory, share=2.0), Policy.LRU, seeds)
    for name, seconds in found.items():
        yield f"| {name} | {seconds:.2f} | " + " | ".join(f"{seconds / found[base]:.2f}" for base in BASES) + " |"


@click.command()
@click.option("--share", type=float, default=0.25, show_default=True, help="KV, of the working set.")
@click.option("--token-ms", type=float, default=0.05, show_default=True, help="Of a copy, with a disk.")
@click.option("--speed", type=float, default=16.0, show_default=True, help="Of steps, times the demo's on two cores.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True)
def command(share: float, token_ms: float, speed: float, seeds: int) -> None:
    """Print the mean time of a job by policy, with KV in memory alone and with a disk."""
    headings = ["policy", "mean time of a job, s", *(f"of that of {base}" for base in BASES)]
    click.echo(f"| {' | '.join(headings)} |")
    click.echo("|---" * len(headings) + "|")
    for row in table(Replay(share, token_ms / 1000, speed=speed), seeds):
        click.echo(row)


if __name__ == "__main__":
    command()
