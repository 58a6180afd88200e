"""Live figures: a sample a second of the engine's stats and of the latencies that frontends measured.

Rates and quantiles are derived here, so that the dashboard and `moeserve top` show the same figures.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import date
from typing import NamedTuple

import msgspec

from moeserve.frontend.metrics import Measured, Metrics
from moeserve.wire import FeatureSamples, Stats

_INTERVAL_S = 1.0
# Stats come at least twice a second. One that is this much early counts: otherwise every other one would be lost.
_EARLY_S = 0.1
_KEPT_SAMPLES = 300
# s; the samples of the latest hour are so far apart.
_COARSE_S = 12.0
_QUANTILE_WINDOW = 10


class Quantiles(msgspec.Struct, frozen=True):
    """Seconds, as exact as the histogram's buckets are."""

    p50: float
    p95: float


class KvBlocks(msgspec.Struct, frozen=True):
    free: int
    cached: int
    leased: int


class KvBelow(msgspec.Struct, frozen=True):
    """The KV in a tier below memory, `host` or `disk`.

    unused_for_s: seconds since the last use of the block that is unused for longest. hit_share: the share of this tier
    in the cached tokens that requests have found since the start."""

    tier: str
    blocks: int
    bytes: int
    unused_for_s: float
    hit_share: float | None


class ExpertsNow(msgspec.Struct, frozen=True):
    """balance: mean over maximum of the recent load in the worst layer, over ranks where there are several, else over
    experts. resident: experts in memory, where not all are. hit_rate: the share of wanted experts that were in memory,
    since the sample before. stall_seconds, migrations: since the start."""

    balance: float | None = None
    resident: int | None = None
    hit_rate: float | None = None
    stall_seconds: float | None = None
    migrations: int | None = None


class DraftsNow(msgspec.Struct, frozen=True):
    """Draft tokens per second since the previous sample: the verified ones, and the right ones among them."""

    verified_rate: float
    accepted_rate: float


class PromptsNow(msgspec.Struct, frozen=True):
    """The prompts that are being computed: `tokens` in total, `cached` of them found in the prefix cache, `left` not
    computed yet, which are predicted to take `seconds_left`."""

    requests: int
    tokens: int
    cached: int
    left: int
    seconds_left: float


class LatestPrompt(msgspec.Struct, frozen=True):
    """seconds: from the request's arrival until its prompt was computed."""

    tokens: int
    cached: int
    seconds: float


class Sample(msgspec.Struct, frozen=True):
    """`time` is in seconds since 1970. Rates are tokens per second since the sample before: `prompt_rate` of admitted
    prompts, `cached_rate` of these the ones found in the prefix cache. `step_seconds` is the mean of a step. Latencies
    and `hit_rate` are of the latest ten samples; None where nothing was measured. `rejections` and `preemptions` count
    since the start. `below`: the tiers, highest first; none where KV is in memory alone. `drafts`: None where no drafts
    are made. `prompts`: None where none is being computed. `latest_prompt`: None before the first. `saved_seconds`: the
    time that steps would have taken today for prompt tokens that were cached. `queue`: from admission to the first
    step. `refused_rate` and `failed_rate` are requests per minute since the sample before. `memory_bytes`: of the model
    process, shared pages of files included. `restarts`: of the engine, since the start."""

    time: float
    running: int
    waiting: int
    generation_rate: float
    prompt_rate: float
    cached_rate: float
    step_seconds: float | None
    ttft: Quantiles | None
    inter_token: Quantiles | None
    hit_rate: float | None
    kv: KvBlocks
    rejections: int
    preemptions: int
    experts: ExpertsNow
    below: Sequence[KvBelow] = ()
    drafts: DraftsNow | None = None
    prompts: PromptsNow | None = None
    latest_prompt: LatestPrompt | None = None
    saved_seconds: float = 0.0
    queue: Quantiles | None = None
    refused_rate: float = 0.0
    failed_rate: float = 0.0
    memory_bytes: int | None = None
    restarts: int = 0


class _Point(msgspec.Struct, frozen=True):
    """The cumulative counts behind a sample. at: on the clock."""

    at: float
    stats: Stats
    measured: Measured
    process: Process
    saved_seconds: float

    @property
    def refused(self) -> int:
        return self.measured.refused + sum(self.stats.rejections.values())


class Process(NamedTuple):
    """The model process: its memory, None while there is none, and the engines before it that were restarted."""

    memory_bytes: int | None = None
    restarts: int = 0


class _OfToday:
    """Adds up the gain of a counter over today. The counter begins anew with each engine."""

    def __init__(self, today: Callable[[], date]) -> None:
        self._today = today
        self._day = today()
        self._last: float | None = None
        self.gained = 0.0

    def take(self, value: float) -> float:
        """Return the sum with this value of the counter; what it had counted before the first call is left out."""
        if (day := self._today()) != self._day:
            self._day, self.gained = day, 0.0
        if self._last is not None:
            self.gained += value - self._last if value >= self._last else value
        self._last = value
        return self.gained


class LiveStats:
    """Keeps the samples of the latest minutes, and fewer of the latest hour (`hour`); wakes who waits for the next one.

    `clock` gives seconds, monotonic. Where another engine has taken the place of one, whose counters begin anew, a
    sample is left out.
    """

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        process: Callable[[], Process] = Process,
        today: Callable[[], date] = date.today,
    ) -> None:
        """process: tells of the model process as it is now."""
        self.samples: deque[Sample] = deque(maxlen=_KEPT_SAMPLES)
        self.hour: deque[Sample] = deque(maxlen=_KEPT_SAMPLES)
        self._process = process
        self._saved = _OfToday(today)
        self._coarse: _Point | None = None
        self.closed = False
        self._metrics = metrics
        self._clock = clock
        self._points: deque[_Point] = deque(maxlen=_QUANTILE_WINDOW + 1)
        self._news = asyncio.Event()

    def on_stats(self, stats: Stats) -> None:
        """Take a sample, unless there was one within the last second."""
        now = self._clock()
        if self._points and now - self._points[-1].at < _INTERVAL_S - _EARLY_S:
            return
        if self._points and _is_new_engine(self._points[-1].stats, stats):
            self._points.clear()
            self._coarse = None
        saved = self._saved.take(_total(stats.features, "moeserve_prompt_seconds_saved") or 0.0)
        point = _Point(now, stats, self._metrics.measured(), self._process(), saved)
        if self._points:
            self.samples.append(_sample(self._points, point))
        self._points.append(point)
        if self._coarse is None:
            self._coarse = point
        elif now - self._coarse.at >= _COARSE_S - _EARLY_S:
            self.hour.append(_sample([self._coarse], point))
            self._coarse = point
        self._wake()

    def close(self) -> None:
        """End all waiting, now and later."""
        self.closed = True
        self._wake()

    @property
    def latest(self) -> Sample | None:
        return self.samples[-1] if self.samples else None

    @property
    def latest_of_hour(self) -> Sample | None:
        return self.hour[-1] if self.hour else None

    async def next(self, after: Sample | None, patience_s: float) -> Sample | None:
        """Return the latest sample; wait while that is `after`. None if none comes in time or the service ends."""
        try:
            async with asyncio.timeout(patience_s):
                while not self.closed and self.latest is after:
                    await self._news.wait()
        except TimeoutError:
            return None
        return None if self.closed else self.latest

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _is_new_engine(before: Stats, now: Stats) -> bool:
    """Return whether counters began anew."""
    counters = ("step", "step_seconds", "generation_tokens", "prompt_tokens", "prefix_query_tokens")
    return any(getattr(now, name) < getattr(before, name) for name in counters)


def _sample(points: Sequence[_Point], now: _Point) -> Sample:
    """Return the sample of `now`. points: before it; quantiles are since the first one, rates since the last one."""
    oldest, last, stats = points[0], points[-1], now.stats
    before, measured = oldest.measured, now.measured
    seconds = now.at - last.at
    steps = stats.step - last.stats.step
    queries = stats.prefix_query_tokens - oldest.stats.prefix_query_tokens
    hits = stats.prefix_hit_tokens - oldest.stats.prefix_hit_tokens
    return Sample(
        time=round(time.time(), 3),
        running=stats.num_running,
        waiting=stats.num_waiting,
        generation_rate=round((stats.generation_tokens - last.stats.generation_tokens) / seconds, 2),
        prompt_rate=round((stats.prompt_tokens - last.stats.prompt_tokens) / seconds, 2),
        cached_rate=round((stats.prefix_hit_tokens - last.stats.prefix_hit_tokens) / seconds, 2),
        step_seconds=round((stats.step_seconds - last.stats.step_seconds) / steps, 6) if steps else None,
        ttft=quantiles(measured.ttft.upper, before.ttft.counts, measured.ttft.counts),
        inter_token=quantiles(measured.inter_token.upper, before.inter_token.counts, measured.inter_token.counts),
        # A request that waited for a prefix hits it later than it queried it, maybe after the oldest sample.
        hit_rate=min(1.0, round(hits / queries, 4)) if queries else None,
        kv=KvBlocks(stats.blocks_free, stats.blocks_cached, stats.blocks_leased),
        rejections=now.refused,
        preemptions=stats.preemptions,
        experts=_experts(last.stats.features, stats.features),
        below=_below(stats.features),
        drafts=_drafts(last.stats.features, stats.features, seconds),
        prompts=_prompts(stats.features),
        latest_prompt=_latest_prompt(stats.features),
        saved_seconds=round(now.saved_seconds, 1),
        queue=quantiles(measured.queue.upper, before.queue.counts, measured.queue.counts),
        refused_rate=round(60 * max(0, now.refused - last.refused) / seconds, 2),
        failed_rate=round(60 * max(0, measured.failed - last.measured.failed) / seconds, 2),
        memory_bytes=now.process.memory_bytes,
        restarts=now.process.restarts,
    )


def _prompts(now: FeatureSamples) -> PromptsNow | None:
    num_requests = int(_total(now, "moeserve_prompts_under_way") or 0)
    if not num_requests:
        return None
    tokens = _by_label(now, "moeserve_prompts_under_way_tokens")
    seconds = round(_total(now, "moeserve_prompts_seconds_left") or 0.0, 1)
    return PromptsNow(num_requests, int(tokens["total"]), int(tokens["cached"]), int(tokens["left"]), seconds)


def _latest_prompt(now: FeatureSamples) -> LatestPrompt | None:
    seconds = _total(now, "moeserve_latest_prompt_seconds")
    if seconds is None:
        return None
    tokens = _by_label(now, "moeserve_latest_prompt_tokens")
    return LatestPrompt(int(tokens["total"]), int(tokens["cached"]), round(seconds, 3))


def _by_label(features: FeatureSamples, name: str) -> dict[str, float]:
    return {str(label): float(value) for label, value in features[name]}


def _below(now: FeatureSamples) -> list[KvBelow]:
    if "moeserve_kv_tier_blocks" not in now:
        return []
    blocks, size, age, tokens = (
        _by_label(now, f"moeserve_kv_tier_{name}") for name in ("blocks", "bytes", "age_seconds", "hit_tokens")
    )
    found = sum(tokens.values())
    return [
        KvBelow(tier, int(blocks[tier]), int(size[tier]), age[tier], round(hits / found, 4) if found else None)
        for tier, hits in tokens.items()
        if tier != "device"
    ]


def _drafts(before: FeatureSamples, now: FeatureSamples, seconds: float) -> DraftsNow | None:
    if "moeserve_draft_tokens" not in now:
        return None
    names = ("moeserve_draft_tokens", "moeserve_draft_accepted_tokens")
    return DraftsNow(*(round(_gain(before, now, name) / seconds, 2) for name in names))


def _experts(before: FeatureSamples, now: FeatureSamples) -> ExpertsNow:
    balance: dict[str, list[float]] = {}
    for _, of, value in now.get("moeserve_expert_balancedness", ()):
        balance.setdefault(str(of), []).append(float(value))
    worst = balance.get("ranks") or balance.get("experts")
    hits, misses = (_gain(before, now, f"moeserve_expert_{name}") for name in ("hits", "misses"))
    resident = _total(now, "moeserve_expert_resident")
    migrations = _total(now, "moeserve_expert_migrations")
    return ExpertsNow(
        balance=round(min(worst), 4) if worst else None,
        resident=None if resident is None else int(resident),
        hit_rate=round(hits / (hits + misses), 4) if hits + misses else None,
        stall_seconds=_total(now, "moeserve_expert_stall_seconds"),
        migrations=None if migrations is None else int(migrations),
    )


def _total(features: FeatureSamples, name: str) -> float | None:
    """Return the sum over all labels, None for a metric that is not there."""
    return sum(float(row[-1]) for row in features[name]) if name in features else None


def _gain(before: FeatureSamples, now: FeatureSamples, name: str) -> float:
    return (_total(now, name) or 0.0) - (_total(before, name) or 0.0)


def quantiles(upper: Sequence[float], before: Sequence[float], now: Sequence[float]) -> Quantiles | None:
    """Return the quantiles of the observations between two cumulative counts, None without any."""
    counts = [later - earlier for earlier, later in zip(before, now, strict=True)]
    if not counts or counts[-1] <= 0:
        return None
    return Quantiles(_quantile(upper, counts, 0.5), _quantile(upper, counts, 0.95))


def _quantile(upper: Sequence[float], counts: Sequence[float], share: float) -> float:
    """Return a quantile, linear within its bucket; the largest finite bound for what lies beyond it."""
    wanted = share * counts[-1]
    index = next(place for place, count in enumerate(counts) if count >= wanted)
    if index == len(upper) - 1:
        return upper[-2]
    low, below = (upper[index - 1], counts[index - 1]) if index else (0.0, 0.0)
    return round(low + (upper[index] - low) * (wanted - below) / (counts[index] - below), 6)
