"""What the engine counts of itself, for metrics and for `Retry-After`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from moeserve.messages import ExpertStats, Stats
from moeserve.request import Request
from moeserve.scheduler import Scheduler
from radix_cache import PrefixCache

_SECONDS_BETWEEN_STATS = 0.5
_SMOOTHING = 0.1


class EngineStats:
    """Counters of the engine's loop; times are `time.monotonic` seconds given by the caller."""

    def __init__(self, scheduler: Scheduler, caches: Sequence[PrefixCache]) -> None:
        self._scheduler = scheduler
        self._caches = caches
        self._rejections: dict[str, int] = {}
        self._step_seconds = 0.0
        self._arrived: dict[str, float] = {}
        self._queue_seconds: list[float] = []
        self._last_sent = 0.0
        self._last_end: float | None = None
        self._end_interval = 1.0

    def count_arrival(self, request: Request, now: float) -> None:
        self._arrived[request.request_id] = now

    def count_started(self, requests: list[Request], now: float) -> None:
        for request in requests:
            self._queue_seconds.append(now - self._arrived.pop(request.request_id, now))

    def count_end(self, request: Request, now: float) -> None:
        self._arrived.pop(request.request_id, None)
        if self._last_end is not None:
            self._end_interval += _SMOOTHING * (now - self._last_end - self._end_interval)
        self._last_end = now

    def count_step(self, seconds: float) -> None:
        self._step_seconds += seconds

    def count_rejection(self, code: str) -> None:
        self._rejections[code] = self._rejections.get(code, 0) + 1

    def seconds_per_request(self) -> float:
        """How long until a place is likely to be free: the smoothed interval between ends of requests, at least 1."""
        return max(1.0, self._end_interval)

    def due(self) -> bool:
        return time.monotonic() - self._last_sent >= _SECONDS_BETWEEN_STATS

    def snapshot(self, step: int, experts: ExpertStats | None = None) -> Stats:
        """The message for the frontends; queue times are told once."""
        self._last_sent = time.monotonic()
        queue_seconds, self._queue_seconds = self._queue_seconds, []
        counters = self._scheduler.counters
        return Stats(
            step=step,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            blocks_free=sum(cache.num_free for cache in self._caches),
            blocks_cached=sum(cache.num_cached for cache in self._caches),
            blocks_leased=sum(cache.num_leased for cache in self._caches),
            slots_empty=self._scheduler.num_empty_slots,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            preemptions=counters.preemptions,
            rejections=dict(self._rejections),
            step_seconds=self._step_seconds,
            queue_seconds=queue_seconds,
            experts=experts,
        )
