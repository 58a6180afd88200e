"""`moeserve doctor --url`: advice on a running service, by its own figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from launcher.auto_model import TOKENS_OF_AGENTS
from launcher.server_client import open_url

_LEAST_TOKENS = 20_000  # prompt tokens that were looked up before the share of cached ones says anything
_FEW_HITS = 0.5
_LONG_QUEUE_S = 1.0  # of a mean request
_FULL = 0.9  # share of the KV blocks that requests hold
_SHORT_MEMORY_S = 600.0  # a prefix that is evicted sooner after its last use is gone before a person's next turn
_LATE_EXPERTS = 0.2  # share of the wanted experts that were not in memory


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a service. samples: values of its metrics by name and labels."""

    samples: Mapping[str, Mapping[tuple[str, ...], float]]
    max_model_len: int | None

    def total(self, name: str, *labels: str) -> float:
        """Return the sum of a metric, of the samples that have these values of labels."""
        found = self.samples.get(f"moeserve_{name}", {})
        return sum(value for given, value in found.items() if set(labels) <= set(given))

    def by_label(self, name: str) -> Mapping[tuple[str, ...], float]:
        return self.samples.get(f"moeserve_{name}", {})


def read_figures(url: str, api_key: str | None) -> Figures:
    """Return the figures of the service at `url`. Raise ServerError, as for a key without the role metrics."""
    with open_url(f"{url}/metrics", None, api_key) as response:
        text = response.read().decode()
    with open_url(f"{url}/v1/models", None, api_key) as response:
        model = json.load(response)["data"][0]
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return Figures(samples, model.get("max_model_len"))


def advice(figures: Figures) -> list[str]:
    """Return a sentence for each change that would help, the most urgent first."""
    return [*_failures(figures), *_refusals(figures), *_memory(figures), *_cache(figures), *_experts(figures)]


def _failures(figures: Figures) -> Iterator[str]:
    if restarts := figures.total("engine_restarts_total"):
        yield f"The engine was started again {restarts:.0f} times: its log says why (`engine_gone`)."
    if failures := figures.total("kv_disk_failures_total", "not_written"):
        yield f"{failures:.0f} writes of KV to disk have failed: see how full the disk of --kv-disk-path is."
    if dropped := figures.total("log_lines_dropped_total"):
        yield f"{dropped:.0f} lines of the log were dropped: what reads the log is too slow."


def _refusals(figures: Figures) -> Iterator[str]:
    remedies = {
        "queue_full": "--max-num-queued-reqs lets more wait, --max-num-seqs lets more run",
        "key_queue_full": "a key has more requests open than its share; give it more weight in --api-key-file",
        "overloaded": "requests would miss --slo; a larger `ttft` or a second replica takes more",
        "too_many_connections": "--max-connections, or the limit of open files (ulimit -n), takes more",
    }
    for (reason,), count in sorted(figures.by_label("rejections_total").items()):
        if count:
            yield f"{count:.0f} requests were refused ({reason}): {remedies.get(reason, 'docs/reliability.md')}."


def _memory(figures: Figures) -> Iterator[str]:
    blocks = figures.by_label("kv_blocks")
    if preempted := figures.total("preemptions_total"):
        fates = ", ".join(f"{int(n)} {fate}" for (fate,), n in figures.by_label("kv_overflow_total").items() if n)
        ways = f" ({fates})" if fates else ""
        yield f"KV was too small {preempted:.0f} times and took a request's memory back{ways}: give --kv-cache-memory."
    elif sum(blocks.values()) and figures.total("kv_blocks", "leased") > _FULL * sum(blocks.values()):
        yield "Requests hold nearly all KV now: more --kv-cache-memory, or --kv-cache-dtype int8, has room for more."
    count = figures.total("request_queue_seconds_count")
    queued = figures.total("request_queue_seconds_sum") / count if count else 0.0
    if queued > _LONG_QUEUE_S:
        yield f"A request waits {queued:.1f} s for its first step: --max-num-seqs, KV or cores are too few."
    if figures.max_model_len is not None and figures.max_model_len < TOKENS_OF_AGENTS:
        yield (
            f"The context has {figures.max_model_len:,} tokens and terminal agents need {TOKENS_OF_AGENTS:,}: "
            "--max-model-len, or more --kv-cache-memory, where the model allows it."
        )


def _cache(figures: Figures) -> Iterator[str]:
    asked, found = figures.total("prefix_cache_queries_total"), figures.total("prefix_cache_hits_total")
    if asked > _LEAST_TOKENS and found < _FEW_HITS * asked:
        yield (
            f"Only {found / asked:.0%} of the prompt tokens were cached: often a time of day or an id at the head of a "
            'system prompt; `"cache_report": true` in a request says at which token its prompt differs.'
        )
    age = figures.by_label("kv_tier_age_seconds").get(("device",))
    if age is not None and 0 < age < _SHORT_MEMORY_S and not figures.total("kv_blocks", "free"):
        yield f"Prefixes are evicted from memory {age:.0f} s after their last use: more --kv-cache-memory keeps them."


def _experts(figures: Figures) -> Iterator[str]:
    missed, hit = figures.total("expert_misses_total"), figures.total("expert_hits_total")
    if missed > _LATE_EXPERTS * (missed + hit):
        stall = figures.total("expert_stall_seconds_total")
        yield (
            f"{missed / (missed + hit):.0%} of the experts were not in memory when they were wanted ({stall:.0f} s of "
            "waiting): more --expert-memory."
        )
