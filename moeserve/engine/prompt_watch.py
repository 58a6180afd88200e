"""How far prompts are: told to clients that ask, summed up for log and metrics. No step depends on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from moeserve.plan import PromptProgress, Request
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.pacing import Pace
from moeserve.scheduling.parts import Part

_LONG_S = 5.0  # s; a prompt that is predicted to take as long gets a line in the log
# s; the prediction counts as much as a prompt's own pace over this time. Later the pace counts more: it knows of the
# other requests in the steps.
_TRUSTED_S = 2.0
_LEAST_PACE = 0.5  # a prompt is never predicted to be more than twice as fast as the steps' costs say

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Prompt:
    """A prompt under way. start: its tokens that were found cached when it began, at `begun`. told: the computed tokens
    that its client has heard of."""

    request: Request
    begun: float
    start: int
    told: int = -1

    @property
    def num_left(self) -> int:
        return max(0, self.request.num_prompt_tokens - self.request.num_computed_tokens)


class PromptWatch(Part):
    """Follows the prompts that are being computed, from their first step to their first token."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._now = 0.0
        self._under_way: dict[str, _Prompt] = {}
        self._ended: _Prompt | None = None  # with the step under way, whose time comes with the next `set_time`
        self._latest: tuple[int, int, float] | None = None  # tokens, cached tokens, seconds since the arrival
        self._num_spared, self._spared_positions = 0, 0.0

    def set_time(self, now: float) -> None:
        self._now = now
        if self._ended is not None:
            self._end(self._ended)
            self._ended = None

    def started(self, request: Request) -> None:
        if request.num_preemptions:
            return
        prompt = _Prompt(request, self._now, request.num_computed_tokens)
        self._under_way[request.request_id] = prompt
        seconds = self._left_s(prompt)
        if seconds >= _LONG_S:
            counts = {"tokens": request.num_prompt_tokens, "cached": prompt.start, "seconds": round(seconds, 1)}
            log.info("long_prompt", request_id=request.request_id, **counts)

    def hit(self, request: Request, num_tokens: int) -> None:
        if not request.num_preemptions:
            self._num_spared += num_tokens
            self._spared_positions += num_tokens * (request.num_computed_tokens - 0.5 * num_tokens)

    def left(self, output: RequestOutput) -> None:
        prompt = self._under_way.pop(output.request.request_id, None)
        if prompt is not None and not prompt.num_left:
            self._ended = prompt

    def prompts(self) -> Sequence[PromptProgress]:
        if not self._under_way:
            return ()
        news: list[PromptProgress] = []
        for request_id, prompt in list(self._under_way.items()):
            request = prompt.request
            if not prompt.num_left:
                del self._under_way[request_id]
                self._end(prompt)
            elif request.asked.progress and request.num_computed_tokens != prompt.told:
                prompt.told = request.num_computed_tokens
                news.append(self._progress(prompt))
        return news

    def samples(self) -> Mapping[str, list[list[str | int | float]]]:
        under_way = [prompt for prompt in self._under_way.values() if prompt.num_left]
        counts = {
            "total": sum(prompt.request.num_prompt_tokens for prompt in under_way),
            "cached": sum(prompt.request.num_cached_tokens for prompt in under_way),
            "left": sum(prompt.num_left for prompt in under_way),
        }
        found: dict[str, list[list[str | int | float]]] = {
            "moeserve_prompts_under_way": [[len(under_way)]],
            "moeserve_prompts_under_way_tokens": [[state, count] for state, count in counts.items()],
            "moeserve_prompts_seconds_left": [[max(map(self._left_s, under_way), default=0.0)]],
            "moeserve_prompt_seconds_saved": [[self._pace.bulk_s(self._num_spared, self._spared_positions)]],
        }
        if self._latest is not None:
            num_tokens, num_cached, seconds = self._latest
            found["moeserve_latest_prompt_tokens"] = [["total", num_tokens], ["cached", num_cached]]
            found["moeserve_latest_prompt_seconds"] = [[seconds]]
        return found

    def _progress(self, prompt: _Prompt) -> PromptProgress:
        request = prompt.request
        counts = request.num_prompt_tokens, request.num_cached_tokens, request.num_computed_tokens
        return PromptProgress(request.request_id, *counts, self._now - prompt.begun, self._left_s(prompt))

    def _left_s(self, prompt: _Prompt) -> float:
        """Return the seconds until the prompt is computed, as its own pace so far and the costs of steps foretell."""
        request, num_left = prompt.request, prompt.num_left
        if not num_left:
            return 0.0
        own_s = self._pace.compute_s(request.num_computed_tokens, request.num_prompt_tokens)
        done_s = self._pace.compute_s(prompt.start, request.num_computed_tokens)
        # Prompts share steps evenly, until the shorter one is computed.
        others = sum(min(other.num_left, num_left) for other in self._under_way.values() if other is not prompt)
        expected = 1 + others / num_left
        pace = (self._now - prompt.begun + expected * _TRUSTED_S) / (done_s + _TRUSTED_S) if done_s else expected
        return own_s * max(pace, _LEAST_PACE)

    def _end(self, prompt: _Prompt) -> None:
        request = prompt.request
        self._latest = request.num_prompt_tokens, request.num_cached_tokens, self._now - request.arrived_at
