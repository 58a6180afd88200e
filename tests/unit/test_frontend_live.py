"""Live figures from the engine's stats, and who waits for them."""

import asyncio
from datetime import date
from typing import Any

import pytest

from moeserve.frontend.live import DraftsNow, KvBelow, KvBlocks, LatestPrompt, LiveStats, Process, PromptsNow, quantiles
from moeserve.frontend.metrics import Metrics
from moeserve.wire import FeatureSamples, Stats


def stats(**fields: Any) -> Stats:
    nothing = {name: 0 for name in Stats.__struct_fields__ if name not in ("queue_seconds", "features")}
    return Stats(**{**nothing, "rejections": {}, "step_seconds": 0.0, "load": None, **fields})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_rates_are_per_second_since_the_sample_before(clock: Clock) -> None:
    figures = LiveStats(Metrics(), clock)
    figures.on_stats(stats(generation_tokens=100, step=5, step_seconds=1.0))
    assert figures.latest is None
    clock.forward(2)
    figures.on_stats(
        stats(
            generation_tokens=150,
            prompt_tokens=40,
            prefix_query_tokens=40,
            prefix_hit_tokens=30,
            step=9,
            step_seconds=1.2,
            num_running=3,
            num_waiting=1,
            blocks_free=5,
            blocks_cached=2,
            blocks_leased=1,
            rejections={"queue_full": 2, "draining": 1},
        )
    )
    sample = figures.latest
    assert sample is not None
    assert (sample.running, sample.waiting) == (3, 1)
    assert (sample.generation_rate, sample.prompt_rate, sample.cached_rate) == (25.0, 20.0, 15.0)
    assert sample.step_seconds == pytest.approx(0.05)
    assert sample.hit_rate == 0.75
    assert sample.kv == KvBlocks(free=5, cached=2, leased=1)
    assert sample.rejections == 3


def test_the_hour_has_a_sample_for_twelve_seconds_with_rates_over_all_of_them(clock: Clock) -> None:
    figures = LiveStats(Metrics(), clock, lambda: Process(7_000_000, 2))
    for second in range(30):
        figures.on_stats(stats(generation_tokens=10 * second))
        clock.forward(1)
    assert [sample.generation_rate for sample in figures.hour] == [10.0, 10.0]
    assert (figures.samples[-1].memory_bytes, figures.samples[-1].restarts) == (7_000_000, 2)


def test_refusals_failures_and_waits_in_the_queue_are_told(clock: Clock) -> None:
    metrics = Metrics()
    figures = LiveStats(metrics, clock)
    figures.on_stats(stats())
    clock.forward(60)
    metrics.rejections["key_full"] += 1
    for status in (200, 400, 500, 503):
        metrics.count_response("/v1/x", status)
    now = stats(rejections={"queue_full": 2}, queue_seconds=[0.2])
    metrics.on_stats(now)
    figures.on_stats(now)
    sample = figures.latest
    assert sample is not None
    assert (sample.rejections, sample.refused_rate, sample.failed_rate) == (3, 3.0, 1.0)
    assert sample.queue is not None
    assert 0.1 <= sample.queue.p50 <= 0.5


def test_prompts_under_way_and_the_latest_one_are_told_where_there_are_some(clock: Clock) -> None:
    figures = LiveStats(Metrics(), clock)
    under_way = {
        "moeserve_prompts_under_way": [[2]],
        "moeserve_prompts_under_way_tokens": [["total", 21034], ["cached", 6016], ["left", 12842]],
        "moeserve_prompts_seconds_left": [[41.26]],
        "moeserve_prompt_seconds_saved": [[1560.04]],
        "moeserve_latest_prompt_tokens": [["total", 300], ["cached", 256]],
        "moeserve_latest_prompt_seconds": [[0.9]],
    }
    none = {"moeserve_prompts_under_way": [[0]], "moeserve_prompt_seconds_saved": [[0.0]]}
    for features in (none, none, under_way):
        figures.on_stats(stats(features=features))
        clock.forward(1)
    first, second = figures.samples
    assert (first.prompts, first.latest_prompt, first.saved_seconds) == (None, None, 0.0)
    assert second.prompts == PromptsNow(2, 21034, 6016, 12842, 41.3)
    assert second.latest_prompt == LatestPrompt(300, 256, 0.9)
    assert second.saved_seconds == 1560.0


def test_the_time_that_the_cache_has_saved_is_of_today_and_goes_on_with_another_engine(clock: Clock) -> None:
    days = iter([1, 1, 1, 1, 2, 2])  # the first look is before any figure
    figures = LiveStats(Metrics(), clock, today=lambda: date(2026, 1, next(days)))
    told = []
    for saved in (50.0, 60.0, 3.0, 4.0, 6.0):
        figures.on_stats(stats(features={"moeserve_prompt_seconds_saved": [[saved]]}))
        clock.forward(1)
        told.append(figures.latest.saved_seconds if figures.latest else None)
    assert told == [None, 10.0, 13.0, 1.0, 3.0]


def test_kv_below_memory_is_told_where_there_is_some(clock: Clock) -> None:
    figures = LiveStats(Metrics(), clock)
    disk = {
        "moeserve_kv_tier_blocks": [["device", 3], ["disk", 40]],
        "moeserve_kv_tier_bytes": [["device", 300], ["disk", 4000]],
        "moeserve_kv_tier_age_seconds": [["device", 1], ["disk", 90]],
        "moeserve_kv_tier_hit_tokens": [["device", 30], ["disk", 10]],
    }
    host_and_disk = {
        "moeserve_kv_tier_blocks": [["device", 3], ["disk", 40], ["host", 20]],
        "moeserve_kv_tier_bytes": [["device", 300], ["disk", 4000], ["host", 2000]],
        "moeserve_kv_tier_age_seconds": [["device", 1], ["disk", 90], ["host", 8]],
        "moeserve_kv_tier_hit_tokens": [["device", 30], ["host", 60], ["disk", 10]],
    }
    for features in ({}, {}, disk, host_and_disk):
        figures.on_stats(stats(features=features))
        clock.forward(1)
    assert [sample.below for sample in figures.samples] == [
        [],
        [KvBelow(tier="disk", blocks=40, bytes=4000, unused_for_s=90, hit_share=0.25)],
        [
            KvBelow(tier="host", blocks=20, bytes=2000, unused_for_s=8, hit_share=0.6),
            KvBelow(tier="disk", blocks=40, bytes=4000, unused_for_s=90, hit_share=0.1),
        ],
    ]


def test_drafts_have_rates_where_some_are_made(clock: Clock) -> None:
    figures = LiveStats(Metrics(), clock)
    for features in ({}, {}, drafts_of(10, 4), drafts_of(50, 34)):
        figures.on_stats(stats(features=features))
        clock.forward(2)
    assert [sample.drafts for sample in figures.samples] == [None, DraftsNow(5.0, 2.0), DraftsNow(20.0, 15.0)]


def drafts_of(verified: int, accepted: int) -> FeatureSamples:
    return {"moeserve_draft_tokens": [[verified]], "moeserve_draft_accepted_tokens": [[accepted]]}


def test_stats_that_come_faster_give_one_sample_a_second(clock: Clock) -> None:
    figures = LiveStats(Metrics(), clock)
    for _ in range(41):
        figures.on_stats(stats())
        clock.forward(0.25)
    assert len(figures.samples) == 10


def test_an_engine_that_takes_the_place_of_another_has_no_negative_rates(clock: Clock) -> None:
    figures = LiveStats(Metrics(), clock)
    for step, tokens in ((100, 9000), (110, 9100), (3, 20), (5, 30)):
        counts = {"generation_tokens": tokens, "prompt_tokens": tokens, "prefix_query_tokens": tokens}
        figures.on_stats(stats(step=step, step_seconds=step / 10, prefix_hit_tokens=tokens // 2, **counts))
        clock.forward(1)
    assert [sample.generation_rate for sample in figures.samples] == [100.0, 10.0]
    assert [sample.hit_rate for sample in figures.samples] == [0.5, 0.5]


def test_samples_of_the_latest_minutes_are_kept_and_no_more(clock: Clock) -> None:
    figures = LiveStats(Metrics(), clock)
    for _ in range(1000):
        figures.on_stats(stats())
        clock.forward(1)
    assert len(figures.samples) == 300


def test_latencies_are_those_observed_in_the_window(clock: Clock) -> None:
    metrics = Metrics()
    figures = LiveStats(metrics, clock)
    metrics.time_to_first_token.observe(50)
    for _ in range(2):
        figures.on_stats(stats())
        clock.forward(1)
    assert figures.latest is not None
    assert figures.latest.ttft is None
    for _ in range(100):
        metrics.time_to_first_token.observe(0.2)
    figures.on_stats(stats())
    assert figures.latest.ttft is not None
    assert 0.1 < figures.latest.ttft.p50 < figures.latest.ttft.p95 <= 0.25
    for _ in range(11):
        clock.forward(1)
        figures.on_stats(stats())
    assert figures.latest.ttft is None


def test_quantiles_lie_in_the_bucket_of_their_rank() -> None:
    upper = (1.0, 2.0, 4.0, float("inf"))
    half_and_half = quantiles(upper, (0, 0, 0, 0), (0, 50, 100, 100))
    assert half_and_half is not None
    assert half_and_half.p50 == 2.0
    assert half_and_half.p95 == pytest.approx(3.8)
    beyond = quantiles(upper, (7, 7, 7, 7), (7, 7, 7, 9))
    assert beyond is not None
    assert (beyond.p50, beyond.p95) == (4.0, 4.0)
    assert quantiles(upper, (3, 3, 3, 3), (3, 3, 3, 3)) is None


def test_experts_are_summed_over_ranks_and_judged_by_the_worst_layer(clock: Clock) -> None:
    figures = LiveStats(Metrics(), clock)
    before = {"moeserve_expert_hits": [[0, 10], [1, 10]], "moeserve_expert_misses": [[0, 1], [1, 0]]}
    after = {
        "moeserve_expert_hits": [[0, 13], [1, 13]],
        "moeserve_expert_misses": [[0, 2], [1, 1]],
        "moeserve_expert_resident": [[0, 12], [1, 20]],
        "moeserve_expert_balancedness": [[0, "experts", 0.2], [0, "ranks", 0.9], [1, "ranks", 0.7]],
        "moeserve_expert_migrations": [[4]],
    }
    figures.on_stats(stats(features=before))
    clock.forward(1)
    figures.on_stats(stats(features=after))
    assert figures.latest is not None
    experts = figures.latest.experts
    assert (experts.balance, experts.resident, experts.migrations) == (0.7, 32, 4)
    assert experts.hit_rate == 0.75
    assert experts.stall_seconds is None


def test_who_waits_gets_the_next_sample_and_none_when_the_service_ends(clock: Clock) -> None:
    async def watch() -> None:
        figures = LiveStats(Metrics(), clock)
        waiting = [asyncio.create_task(figures.next(None, 30)) for _ in range(3)]
        await asyncio.sleep(0)
        for _ in range(2):
            figures.on_stats(stats())
            clock.forward(1)
        assert await asyncio.gather(*waiting) == [figures.latest] * 3
        assert await figures.next(None, 30) is figures.latest
        assert await figures.next(figures.latest, 0.001) is None
        late = asyncio.create_task(figures.next(figures.latest, 30))
        await asyncio.sleep(0)
        figures.close()
        assert await late is None
        assert await figures.next(None, 30) is None

    asyncio.run(watch())
