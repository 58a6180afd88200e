"""How an answer comes along, for the metrics and for the log line."""

from __future__ import annotations

import time
from typing import Any

from moeserve.frontend.metrics import Metrics
from moeserve.frontend.relay.answer import Answer
from moeserve.plan import FinishReason
from moeserve.wire import Output


class Progress:
    """Times of one answer, for the metrics and for the log line. `arrival` is the request's, on `time.monotonic`."""

    def __init__(self, metrics: Metrics, arrival: float, num_choices: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._first: float | None = None
        self._latest: list[float | None] = [None] * num_choices
        self._num_admitted = self._num_ended = 0

    def admit(self) -> None:
        """Note that the engine has admitted every choice."""
        self._num_admitted = len(self._latest)

    def note(self, batch: list[tuple[int, Output]]) -> None:
        """Observe outputs that have just arrived."""
        now = time.monotonic()
        for choice, output in batch:
            if output.finish_reason is not None:
                self._num_ended += 1
                self._metrics.count_ended(output.finish_reason)
            if not output.token_ids:
                continue
            latest = self._latest[choice]
            self._latest[choice] = now
            if latest is not None:
                self._metrics.inter_token.observe((now - latest) / len(output.token_ids))
            elif self._first is None:
                self._first = now
                self._metrics.time_to_first_token.observe(now - self._arrival)

    def end(self, answer: Answer, log_fields: dict[str, Any]) -> None:
        """Observe the end of the answer, complete or not, and add its counts to the log line."""
        usage = answer.usage
        now = time.monotonic()
        if not answer.num_open:
            self._metrics.end_to_end.observe(now - self._arrival)
            self._metrics.prompt_tokens.observe(usage.prompt_tokens)
            self._metrics.generation_tokens.observe(usage.completion_tokens)
            if self._first is not None:
                self._metrics.decode_time.observe(now - self._first)
        if left := self._num_admitted - self._num_ended:
            self._metrics.count_ended(FinishReason.ABORT, left)
        log_fields |= {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "complete": not answer.num_open,
        }
        if self._first is not None:
            log_fields["ttft_ms"] = round(1000 * (self._first - self._arrival), 1)
