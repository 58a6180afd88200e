"""Measure the cost of scheduling: planning a step of many running requests, and adding a request to a long queue.

    python -m benchmarks.scheduling

Times are of the process, medians in milliseconds; no model computes.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from random import Random
from statistics import median

from launcher.child import collect_seldom
from moeserve.engine.ranks.plan_link import PlanSender
from moeserve.plan import Chunk, ChunkResult, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.drafting import Drafting
from moeserve.scheduling.pacing import Pace, Slo
from moeserve.scheduling.scheduler import Scheduler
from moeserve.settings.drafts import SpeculativeConfig
from radix_cache import PUBLIC, PrefixCache

_NUM_STEPS = 14
_NUM_FIRST_STEPS = 16  # that compute prompts of several ranks, too
# The seconds of a step without rows and of a row: all of them where a row costs in full, so that no draft pays.
_FULL, _CHEAP = (0.0, 0.0025), (0.25, 0.00005)
_NUM_ADDED = 200  # The last additions, whose median is reported.


def _results(plans: list[StepPlan], draw: Random | None = None) -> list[StepResult]:
    """Return results with token 7 for all, or with drawn tokens."""
    return [
        StepResult(plan.step, [_result(chunk, 7 if draw is None else draw.randrange(50_000)) for chunk in plan.chunks])
        for plan in plans
    ]


def _result(chunk: Chunk, token_id: int) -> ChunkResult:
    num_right = next((i for i, token in enumerate(_drafts(chunk)) if token != token_id), chunk.num_drafts)
    return ChunkResult(token_id if chunk.sampling else None, further=((token_id, None),) * num_right)


def _drafts(chunk: Chunk) -> array[int]:
    return chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]


def planning_ms(num_running: int, *, run_ahead: bool) -> float:
    """Return the milliseconds of `Scheduler.schedule` with this number of decodes."""
    scheduler = Scheduler(
        [PrefixCache(20 * num_running, 16)],
        max_num_seqs=num_running,
        max_num_batched_tokens=max(4096, num_running),
        max_num_queued_reqs=num_running,
        max_model_len=256,
        run_ahead=run_ahead,
    )
    for number in range(num_running):
        prompt = array("i", [number + 1, number + 2, number + 3, number + 5] * 4)
        scheduler.add(Request(f"{number}", prompt, SamplingParams(max_tokens=200, temperature=0.0)))
    in_flight, seconds = deque[list[StepPlan]](), []
    for _ in range(_NUM_STEPS):
        started = time.process_time()
        plans = scheduler.schedule()
        seconds.append(time.process_time() - started)
        assert plans is not None
        in_flight.append(plans)
        while len(in_flight) > run_ahead:
            oldest = in_flight.popleft()
            scheduler.commit(oldest, _results(oldest))
    return 1000 * median(seconds[4:])


def ranked_ms(
    num_ranks: int, num_running: int, text: str | None = None, cost: tuple[float, float] = _FULL
) -> list[float]:
    """Return the milliseconds of planning a step of this number of decodes on each rank, of encoding and committing it,
    and behind them the number of its drafts.

    text: None without drafts; else whether tokens `repeat` themselves or are `random`. cost: the seconds of a step
    without rows, and of a row.
    """
    scheduler = Scheduler(
        [PrefixCache(20 * num_running, 16) for _ in range(num_ranks)],
        max_num_seqs=num_ranks * num_running,
        max_num_batched_tokens=num_ranks * num_running,
        max_num_queued_reqs=num_ranks * num_running,
        max_model_len=256,
        parts=[] if text is None else [Drafting(SpeculativeConfig("auto"))],
    )
    for number in range(num_ranks * num_running):
        prompt = array("i", [number + 1, number + 2])
        scheduler.add(Request(f"{number}", prompt, SamplingParams(max_tokens=200, temperature=0.0)))
    senders, measured, draw = [PlanSender() for _ in range(num_ranks)], list[list[float]](), Random(0)
    for _ in range(_NUM_FIRST_STEPS + _NUM_STEPS):
        times = [time.process_time()]
        plans = scheduler.schedule()
        times.append(time.process_time())
        assert plans is not None
        for sender, plan in zip(senders, plans, strict=True):
            sender.encode(plan)
        times.append(time.process_time())
        results = _results(plans, draw if text == "random" else None)
        begun = time.process_time()
        scheduler.commit(plans, results)
        num_drafts = sum(chunk.num_drafts for plan in plans for chunk in plan.chunks)
        seconds = times[1] - times[0], times[2] - times[1], time.process_time() - begun
        measured.append([*(1000 * each for each in seconds), num_drafts])
        scheduler.count_step(cost[0] + cost[1] * max(plan.num_tokens for plan in plans))
    return [median(column) for column in zip(*measured[_NUM_FIRST_STEPS:], strict=True)]


def admitting_ms(num_ranks: int, num_running: int, num_shared: int) -> float:
    """Return the milliseconds of a step that admits this number of requests on each rank.

    num_shared: the tokens that all prompts begin with; they are cached.
    """
    count = num_ranks * num_running
    scheduler = Scheduler(
        [PrefixCache(num_shared + 20 * num_running, 16) for _ in range(num_ranks)],
        max_num_seqs=count,
        max_num_batched_tokens=8 * count + num_shared,
        max_num_queued_reqs=count + num_ranks,
        max_model_len=256 + num_shared,
    )
    for rank in range(num_ranks):
        # So that each rank computes the shared tokens once.
        prompt = array("i", [1] * num_shared + [2])
        scheduler.add(Request(f"first {rank}", prompt, SamplingParams(max_tokens=1, temperature=0.0), PUBLIC))
        plans = scheduler.schedule()
        assert plans is not None
        scheduler.commit(plans, _results(plans))
    for number in range(count):
        prompt = array("i", [1] * num_shared + [number + 3, number + 4, number + 5])
        scheduler.add(Request(f"{number}", prompt, SamplingParams(max_tokens=9, temperature=0.0)))
    started = time.process_time()
    plans = scheduler.schedule()
    seconds = time.process_time() - started
    assert plans is not None
    assert sum(len(plan.chunks) for plan in plans) == count
    return 1000 * seconds


def adding_ms(num_waiting: int, num_shared: int) -> tuple[float, float]:
    """Return the milliseconds of `Scheduler.add` and of `drop_late` with this number of waiting requests.

    num_shared: the tokens that all prompts begin with.
    """
    num_running = 256
    scheduler = Scheduler(
        [PrefixCache(100 * num_running, 16)],
        max_num_seqs=num_running,
        max_num_batched_tokens=4096,
        max_num_queued_reqs=num_waiting + num_running,
        max_model_len=1024,
        pace=Pace(Slo(2.0, burst_s=1e9), 4096, num_running),
    )
    seconds = []
    for number in range(num_waiting + num_running):
        prompt = array("i", [1] * num_shared + [number + 1, number + 2, number + 3, number + 5] * 8)
        request = Request(f"{number}", prompt, SamplingParams(max_tokens=100, temperature=0.0))
        started = time.process_time()
        scheduler.add(request)
        seconds.append(time.process_time() - started)
    plans = scheduler.schedule()
    assert plans is not None
    scheduler.commit(plans, _results(plans))
    scheduler.count_step(0.02)
    started = time.process_time()
    scheduler.drop_late()
    return 1000 * median(seconds[-_NUM_ADDED:]), 1000 * (time.process_time() - started)


def main() -> None:
    # As a model process does.
    collect_seldom()
    for num_running in (64, 256, 1000):
        plain, ahead = (planning_ms(num_running, run_ahead=run_ahead) for run_ahead in (False, True))
        print(f"planning {num_running} decodes: {plain:.2f} ms, a step ahead {ahead:.2f} ms")
    for text, cost in ((None, _FULL), ("random", _FULL), ("repeat", _FULL), ("random", _CHEAP), ("repeat", _CHEAP)):
        plan, encode, commit, drafts = ranked_ms(8, 256, text, cost)
        name = "without drafts" if text is None else f"of {text} tokens, {drafts:.0f} drafts"
        print(f"8 ranks of 256 decodes {name}: plan {plan:.2f} ms, encode {encode:.2f} ms, commit {commit:.2f} ms")
    for num_ranks, num_shared in ((1, 0), (1, 2048), (8, 0), (8, 2048)):
        admit = admitting_ms(num_ranks, 2048 // num_ranks, num_shared)
        print(f"2048 requests admitted on {num_ranks} ranks, {num_shared} tokens cached: {admit:.1f} ms")
    for num_waiting in (256, 3000, 10_000):
        for num_shared in (0, 512):
            add, drop = adding_ms(num_waiting, num_shared)
            print(f"{num_waiting} wait, {num_shared} tokens shared: add {add:.3f} ms, drop late {drop:.1f} ms")


if __name__ == "__main__":
    main()
