"""The times of one answer: into the metrics as it goes, and into the log line at its end."""

from __future__ import annotations

import time
from typing import Any

from moeserve.frontend.answer import Answer
from moeserve.frontend.metrics import Metrics
from moeserve.messages import Output


class Progress:
    """`arrival` is when the request came, on `time.monotonic`."""

    def __init__(self, metrics: Metrics, arrival: float, num_choices: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._first: float | None = None
        self._latest: list[float | None] = [None] * num_choices

    def note(self, batch: list[tuple[int, Output]]) -> None:
        """Outputs that have just come."""
        now = time.monotonic()
        for choice, output in batch:
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
        """The answer is over, complete or not."""
        usage = answer.usage
        if not answer.num_open:
            self._metrics.end_to_end.observe(time.monotonic() - self._arrival)
        log_fields |= {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "complete": not answer.num_open,
        }
        if self._first is not None:
            log_fields["ttft_ms"] = round(1000 * (self._first - self._arrival), 1)
