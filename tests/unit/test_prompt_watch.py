"""How far prompts are: who is told, what is predicted, and what the prefix cache saved. Time is the test's."""

from __future__ import annotations

from array import array

import pytest
from structlog.testing import capture_logs

from moeserve.engine.prompt_watch import PromptWatch
from moeserve.plan import Asked, ChunkResult, PromptProgress, Request, SamplingParams, StepResult
from moeserve.scheduling.pacing import UNBOUNDED, Pace
from moeserve.scheduling.scheduler import Scheduler
from radix_cache import PrefixCache

BUDGET = 64
ROW_S = 0.1  # s; what each token of a step takes


class Served:
    """A scheduler whose steps take `ROW_S` a token, and the watch over its prompts."""

    def __init__(self) -> None:
        self.pace = Pace(UNBOUNDED, BUDGET, 4, warm_up=[(2**power, ROW_S * 2**power) for power in range(7)])
        self.watch = PromptWatch(self.pace)
        self.now = 100.0
        self.scheduler = Scheduler(
            [PrefixCache(64, 16)],
            max_num_seqs=4,
            max_num_batched_tokens=BUDGET,
            max_num_queued_reqs=8,
            max_model_len=1000,
            pace=self.pace,
            parts=[self.watch],
        )
        self.scheduler.set_time(self.now)

    def add(self, name: str, prompt: range, *, asks: bool = True, max_tokens: int = 1) -> None:
        asked = Asked(progress=asks)
        sampling = SamplingParams(max_tokens)
        self.scheduler.add(Request(name, array("i", prompt), sampling, arrived_at=self.now, asked=asked))

    def step(self, seconds_per_row: float = ROW_S) -> list[PromptProgress]:
        """Compute a step; return what is told before it is launched."""
        plans = self.scheduler.schedule()
        assert plans is not None
        told = list(self.watch.prompts())
        (plan,) = plans
        self.now += seconds_per_row * plan.num_tokens
        results = [ChunkResult(7 if chunk.sampling else None) for chunk in plan.chunks]
        self.scheduler.commit(plans, [StepResult(plan.step, results)])
        self.scheduler.set_time(self.now)
        return told

    def run(self) -> list[PromptProgress]:
        told = []
        while not self.scheduler.is_idle:
            told += self.step()
        return told

    def sample(self, name: str) -> list[list[str | int | float]]:
        return self.watch.samples()[name]


def test_a_client_that_asks_hears_of_its_prompt_before_each_of_its_steps() -> None:
    served = Served()
    served.add("r", range(160))
    told = served.run()
    assert {(at.num_tokens, at.num_cached) for at in told} == {(160, 0)}
    assert [at.num_computed for at in told] == [0, 64, 128]
    assert [at.seconds for at in told] == pytest.approx([0.0, 6.4, 12.8])


def test_the_rest_of_a_prompt_is_predicted_from_what_steps_cost() -> None:
    served = Served()
    served.add("r", range(160))
    assert [at.seconds_left for at in served.run()] == pytest.approx([16.0, 9.6, 3.2], rel=0.05)


def test_a_prompt_that_goes_slower_than_steps_cost_is_predicted_by_its_own_pace() -> None:
    served = Served()
    served.add("r", range(640))
    served.step(3 * ROW_S)
    served.step(3 * ROW_S)
    (told,) = served.step()
    assert 2.5 * ROW_S * 512 < told.seconds_left < 3 * ROW_S * 512


def test_prompts_that_share_steps_are_predicted_to_take_longer() -> None:
    served = Served()
    served.add("one", range(160))
    served.add("other", range(1000, 1160))
    (told,) = served.step()
    assert told.num_computed == 0
    alone = 16.0
    assert told.seconds_left == pytest.approx(alone, rel=0.05)  # the other one has not begun
    served.step()
    both = {at.request_id: at.seconds_left for at in (*served.step(), *served.step())}
    assert both["other"] > 0


def test_cached_tokens_are_told_as_such_from_the_start() -> None:
    served = Served()
    served.add("first", range(128))
    served.run()
    served.add("second", range(320))
    first, *_ = served.run()
    assert (first.request_id, first.num_cached, first.num_computed) == ("second", 128, 128)


def test_nobody_hears_of_a_prompt_who_has_not_asked() -> None:
    served = Served()
    served.add("r", range(160), asks=False)
    assert served.run() == []


def test_nothing_is_told_once_a_prompt_is_computed_or_its_client_has_left() -> None:
    served = Served()
    served.add("r", range(100), max_tokens=5)
    assert [at.num_computed for at in served.run()] == [0, 64]
    served.add("gone", range(500, 660))
    served.step()
    served.scheduler.abort("gone")
    assert list(served.watch.prompts()) == []
    assert served.sample("moeserve_prompts_under_way") == [[0]]


def test_a_long_prompt_has_a_line_in_the_log_when_it_begins_and_a_short_one_has_none() -> None:
    served = Served()
    with capture_logs() as lines:
        served.add("short", range(500, 532), asks=False)
        served.run()
        served.add("long", range(160), asks=False)
        served.run()
    (line,) = lines
    assert (line["event"], line["request_id"], line["tokens"], line["cached"]) == ("long_prompt", "long", 160, 0)
    assert line["seconds"] == pytest.approx(16.0, abs=0.5)


def test_metrics_tell_of_all_prompts_under_way_and_of_the_latest_one() -> None:
    served = Served()
    assert "moeserve_latest_prompt_seconds" not in served.watch.samples()
    served.add("r", range(160), asks=False)
    served.step()
    assert served.sample("moeserve_prompts_under_way") == [[1]]
    assert served.sample("moeserve_prompts_under_way_tokens") == [["total", 160], ["cached", 0], ["left", 96]]
    assert served.sample("moeserve_prompts_seconds_left")[0][0] == pytest.approx(9.6, rel=0.05)
    served.run()
    assert served.sample("moeserve_prompts_under_way_tokens") == [["total", 0], ["cached", 0], ["left", 0]]
    assert served.sample("moeserve_latest_prompt_tokens") == [["total", 160], ["cached", 0]]
    assert served.sample("moeserve_latest_prompt_seconds")[0][0] == pytest.approx(16.0, rel=0.05)


def test_cached_tokens_save_the_seconds_that_full_steps_would_have_taken() -> None:
    served = Served()
    served.add("first", range(160))
    served.run()
    assert served.sample("moeserve_prompt_seconds_saved") == [[0.0]]
    served.add("second", range(160))
    served.run()
    assert served.sample("moeserve_prompt_seconds_saved")[0][0] == pytest.approx(144 * ROW_S, rel=0.05)
