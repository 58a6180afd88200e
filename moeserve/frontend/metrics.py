"""The metrics that Prometheus scrapes: the frontends' measurements, and the engine's newest counters.

Several frontends count in files of one folder (the multiprocess mode of prometheus_client), so that each of them
reports the sums of all when it is scraped, and no count is lost when one ends.

`VllmNames` shows the same values once more, under the names and labels of vLLM's V1 metrics that dashboards and routers
look for; metrics without a counterpart here, such as the time of prefills, are left out.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from moeserve.frontend.dialects.bodies import HARMLESS
from moeserve.wire import EngineReady, FeatureSamples, Stats

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
_ITL = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LONG = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
_TOKENS = (1.0, 10.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)
_REJECTIONS = "moeserve_rejections"
_FAULTS = frozenset({"500", "501", "502", "504", "507"})
_QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0)

# vLLM's names of a metric, by its name here without `_total`.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "moeserve_time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "moeserve_inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "moeserve_request_seconds": ("e2e_request_latency_seconds",),
    "moeserve_request_queue_seconds": ("request_queue_time_seconds",),
    "moeserve_request_decode_seconds": ("request_decode_time_seconds",),
    "moeserve_request_prompt_tokens": ("request_prompt_tokens",),
    "moeserve_request_generation_tokens": ("request_generation_tokens",),
    "moeserve_choices_ended": ("request_success",),
    "moeserve_requests_running": ("num_requests_running",),
    "moeserve_requests_waiting": ("num_requests_waiting",),
    "moeserve_prompt_tokens": ("prompt_tokens",),
    "moeserve_generation_tokens": ("generation_tokens",),
    "moeserve_prefix_cache_queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "moeserve_prefix_cache_hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "moeserve_preemptions": ("num_preemptions",),
    "moeserve_engine_sleep_state": ("engine_sleep_state",),
    "moeserve_draft_chunks": ("spec_decode_num_drafts",),
    "moeserve_draft_tokens": ("spec_decode_num_draft_tokens",),
    "moeserve_draft_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "moeserve_draft_accepted_tokens_per_pos": ("spec_decode_num_accepted_tokens_per_pos",),
}


class Buckets(NamedTuple):
    """A histogram: the upper bounds of its buckets, the last of them infinite, and the cumulative counts."""

    upper: tuple[float, ...]
    counts: tuple[float, ...]


class Measured(NamedTuple):
    """The counts of all frontends so far. refused: requests that never reached the engine. failed: answers that are the
    service's fault (5xx but 503)."""

    ttft: Buckets
    inter_token: Buckets
    queue: Buckets
    refused: int
    failed: int


class Metrics(Collector):
    """The counts of this frontend and, where several count together, the sums of all. Latencies are in seconds."""

    def __init__(
        self,
        num_dropped_lines: Callable[[], int] = lambda: 0,
        num_restarts: Callable[[], int] = lambda: 0,
        shared: Path | None = None,
        *,
        is_awake: Callable[[], bool] = lambda: True,
    ) -> None:
        """num_dropped_lines: log lines of this process that were dropped so far. num_restarts: of the engine.
        is_awake: whether the service does not sleep.

        shared: the folder of the frontends' files, which the environment variable PROMETHEUS_MULTIPROC_DIR names too.
        """
        self.rejections: Tally[str] = Tally()
        self._num_dropped_lines, self._num_restarts, self._is_awake = num_dropped_lines, num_restarts, is_awake
        self._stats: Stats | None = None
        self._registry = CollectorRegistry()
        self._counted: Collector = self._registry if shared is None else _SharedFiles(shared)
        histogram, counter = self._histogram, self._counter
        self.time_to_first_token = histogram(
            "moeserve_time_to_first_token_seconds", "From the request's arrival to its first token", _TTFT
        )
        self.inter_token = histogram(
            "moeserve_inter_token_latency_seconds", "Between two outputs of a choice, per token", _ITL
        )
        self.end_to_end = histogram(
            "moeserve_request_seconds", "From the request's arrival to the end of its answer", _LONG
        )
        self.queue_time = histogram(
            "moeserve_request_queue_seconds", "From admission to the first scheduled token", _QUEUE
        )
        self.decode_time = histogram(
            "moeserve_request_decode_seconds", "From the first token of a request to the end of its answer", _LONG
        )
        self.prompt_tokens = histogram("moeserve_request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.generation_tokens = histogram(
            "moeserve_request_generation_tokens", "Tokens of a request's answer", _TOKENS
        )
        self._ended = counter(
            "moeserve_choices_ended", "Choices that ended, by reason: stop, length, abort, error or late", "reason"
        )
        self._responses = counter("moeserve_http_responses", "Responses by route and status", "route", "status")
        self._ignored = counter("moeserve_ignored_fields", "Request fields that were not understood", "field")
        self._disconnects = counter("moeserve_client_disconnects", "Clients that left before their answer was complete")
        self._rejected = counter(_REJECTIONS, "Requests that were refused, by reason", "reason")
        self._dropped_lines = counter(
            "moeserve_log_lines_dropped", "Log lines of HTTP processes that nobody read in time"
        )
        self._settled: Tally[str] = Tally()
        self._num_settled_lines = 0

    def on_stats(self, stats: Stats) -> None:
        """Keep the engine's newest counters and observe its queue times."""
        self._stats = stats
        for seconds in stats.queue_seconds:
            self.queue_time.observe(seconds)
        self._settle()

    def count_response(self, route: str, status: int) -> None:
        self._responses.labels(route, str(status)).inc()

    def count_ended(self, reason: str, count: int = 1) -> None:
        self._ended.labels(reason).inc(count)

    def count_disconnect(self) -> None:
        self._disconnects.inc()

    def count_ignored(self, names: Iterable[str]) -> None:
        """Count ignored fields. Names that clients made up share one label, or labels would be without bound."""
        for name in names:
            self._ignored.labels(name if name in HARMLESS else "other").inc()

    def render(
        self, ready: EngineReady | None = None, names: VllmNames | None = None, more: Iterable[Metric] = ()
    ) -> bytes:
        """Return the text that Prometheus scrapes; with `names`, of an engine that is `ready`, under these as well.
        more: others' metrics."""
        families: Iterable[Metric] = self.collect()
        if names is not None:
            families = names.add(families, self._stats if self._is_awake() else None, ready)
        return generate_latest(_Families([*families, *more]))

    def measured(self) -> Measured:
        families = {family.name: family for family in self._counted.collect()}
        first, between, queue = (
            _buckets([sample for sample in families[metric.name].samples if sample.name.endswith("_bucket")])
            for histogram in (self.time_to_first_token, self.inter_token, self.queue_time)
            for metric in histogram.describe()
        )
        refused = failed = 0
        for counter in (self._rejected, self._responses):
            for metric in counter.describe():
                for sample in families[metric.name].samples if metric.name in families else ():
                    if sample.name == f"{_REJECTIONS}_total":
                        refused += int(sample.value)
                    elif sample.name.endswith("_total") and sample.labels["status"] in _FAULTS:
                        failed += int(sample.value)
        return Measured(first, between, queue, refused, failed)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield this process's counts, and the engine's newest `Stats`, if there are any yet."""
        self._settle()
        stats = self._stats
        reasons = Tally[str](stats.rejections if stats else {})
        for family in self._counted.collect():
            if family.name != _REJECTIONS:
                yield family
                continue
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    reasons[sample.labels["reason"]] += int(sample.value)
        rejected = CounterMetricFamily(_REJECTIONS, "Requests that were refused, by reason", labels=["reason"])
        for reason, count in sorted(reasons.items()):
            rejected.add_metric([reason], count)
        yield rejected
        yield CounterMetricFamily(
            "moeserve_engine_restarts", "Engines that took the place of one that ended", value=self._num_restarts()
        )
        is_awake = self._is_awake()
        yield _sleep_state(is_awake)
        if stats is not None:
            for family in (*_engine_metrics(stats), *feature_metrics(stats.features)):
                # An engine's gauges end with it; its counters stay until the next engine counts.
                if is_awake or family.type != "gauge":
                    yield family

    def _settle(self) -> None:
        """Add the tallies of other parts of this process to the counters."""
        for reason, count in self.rejections.items():
            if new := count - self._settled[reason]:
                self._rejected.labels(reason).inc(new)
        self._settled.update(self.rejections - self._settled)
        num_lines = self._num_dropped_lines()
        self._dropped_lines.inc(num_lines - self._num_settled_lines)
        self._num_settled_lines = num_lines

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self._registry)


class _SharedFiles(Collector):
    """The counts of all frontends, in the files of a folder.

    A process makes a file empty and sizes it afterwards; prometheus_client's own reader fails at one in between.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        files = [str(file) for file in self._folder.glob("*.db") if file.stat().st_size]
        found: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        return found


class _Families(Collector):
    """Metrics that were collected."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _buckets(samples: Sequence[Sample]) -> Buckets:
    return Buckets(tuple(float(sample.labels["le"]) for sample in samples), tuple(sample.value for sample in samples))


def _sleep_state(is_awake: bool) -> Metric:
    """Return a gauge by the states that vLLM has; here sleep keeps neither weights nor KV in memory."""
    family = GaugeMetricFamily(
        "moeserve_engine_sleep_state", "1 for the state that the service is in", labels=["sleep_state"]
    )
    for state, holds in (("awake", is_awake), ("weights_offloaded", False), ("discard_all", not is_awake)):
        family.add_metric([state], int(holds))
    return family


def _engine_metrics(stats: Stats) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("moeserve_kv_blocks", "KV blocks by state", labels=["state"])
    for state, count in (("free", stats.blocks_free), ("cached", stats.blocks_cached), ("leased", stats.blocks_leased)):
        blocks.add_metric([state], count)
    yield blocks
    for name, documentation, gauge in (
        ("requests_running", "Requests that take part in steps", stats.num_running),
        ("requests_waiting", "Requests that wait to run", stats.num_waiting),
        ("kv_slots_empty", "Slots in leased blocks that hold no token", stats.slots_empty),
    ):
        yield GaugeMetricFamily(f"moeserve_{name}", documentation, value=gauge)
    for name, documentation, total in (
        ("steps", "Steps that ran", stats.step),
        ("step_seconds", "Time spent in steps", stats.step_seconds),
        ("prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens),
        ("generation_tokens", "Tokens drawn", stats.generation_tokens),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_query_tokens),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hit_tokens),
        ("preemptions", "Requests whose memory was taken back", stats.preemptions),
    ):
        yield CounterMetricFamily(f"moeserve_{name}", documentation, value=total)


# The metrics of features by name in `Stats.features`: documentation, then labels. Layers are numbered among the layers
# that have experts. A metric that the engine leaves out is not exported: a zero would mean that the feature is in use.
_GAUGES: Mapping[str, tuple[str, ...]] = {
    "moeserve_prompts_under_way": ("Requests whose prompts are being computed",),
    "moeserve_prompts_under_way_tokens": (
        "Tokens of these prompts: all, those found in the prefix cache, those that are not computed yet",
        "state",
    ),
    "moeserve_prompts_seconds_left": ("Time until the last of these prompts is computed, as predicted",),
    "moeserve_latest_prompt_tokens": ("Tokens of the latest computed prompt: all, those found cached", "state"),
    "moeserve_latest_prompt_seconds": ("From the arrival of the latest computed prompt to its end",),
    "moeserve_kv_retained_blocks": ("KV blocks that clients have retained or pinned",),
    "moeserve_kv_pinned_prefixes": ("Pinned prefixes",),
    "moeserve_kv_tier_blocks": ("KV blocks with content, in memory and in the tier below it", "tier"),
    "moeserve_kv_tier_bytes": ("Bytes of this model's KV blocks with content", "tier"),
    "moeserve_kv_tier_age_seconds": (
        "Time since the last use of the KV that would be evicted next from memory, and was used longest ago below it",
        "tier",
    ),
    "moeserve_kv_host_bytes": ("Bytes of the host's memory that hold KV of a GPU",),
    "moeserve_kv_disk_bytes": ("Bytes of files of KV blocks on disk, of other models too",),
    "moeserve_kv_transfer_held_blocks": ("KV blocks that are held for other services",),
    "moeserve_kv_window_blocks": (
        "Blocks of layers with a sliding window by state, where they have some of their own",
        "state",
    ),
    "moeserve_state_snapshots": ("Snapshots of recurrent states that are cached",),
    "moeserve_state_snapshots_max": ("Snapshots of recurrent states that memory has room for",),
    "moeserve_expert_balancedness": (
        "Mean over maximum of the recent load, of the experts of a layer or of the ranks that hold them",
        "layer",
        "of",
    ),
    "moeserve_expert_resident": ("Experts in memory, all layers", "rank"),
    "moeserve_expert_placement_version": ("Number of the placement in use",),
    "moeserve_expert_migration_age_seconds": ("Time since a layer was last placed anew",),
}
_COUNTERS: Mapping[str, tuple[str, ...]] = {
    "moeserve_prompt_seconds_saved": ("Time that steps would have taken for the prompt tokens found cached",),
    "moeserve_kv_retained_evictions": ("Retained KV blocks that were evicted because no other block was left",),
    "moeserve_kv_tier_hits": ("Times that a request found cached tokens there", "tier"),
    "moeserve_kv_tier_hit_tokens": ("Cached tokens by where requests found them", "tier"),
    "moeserve_kv_host_copied_bytes": ("Bytes of KV copied from a GPU to the host's memory and back", "direction"),
    "moeserve_kv_host_seconds": ("Time that copies from and to the host's memory took", "direction"),
    "moeserve_kv_host_evictions": ("KV blocks removed from the host's memory by size",),
    "moeserve_kv_host_failures": (
        "KV blocks that were gone from the host's memory, copies that failed, reads that took too long",
        "kind",
    ),
    "moeserve_kv_host_slower": ("Prefixes in the host's memory that were computed because that was sooner",),
    "moeserve_kv_disk_copied_bytes": ("Bytes of KV copied from and to disk", "direction"),
    "moeserve_kv_disk_seconds": ("Time that copies from and to disk took", "direction"),
    "moeserve_kv_disk_evictions": ("KV blocks removed from disk by size or age",),
    "moeserve_kv_disk_failures": (
        "Files of KV that were gone or damaged, writes that failed, reads that took too long",
        "kind",
    ),
    "moeserve_kv_disk_slower": ("Prefixes on disk that were computed because that was sooner",),
    "moeserve_kv_overflow": (
        "Preempted requests by the planned way of their KV: keep it in memory, swap it to the tier below, recompute it",
        "fate",
    ),
    "moeserve_kv_transfer_offers": ("Prompts that were held for other services",),
    "moeserve_kv_transfer_expired": ("Prompts held that nobody fetched in time",),
    "moeserve_kv_transfer_tokens": ("Tokens whose KV was fetched from other services",),
    "moeserve_kv_transfer_bytes": ("Bytes of KV fetched from other services",),
    "moeserve_kv_transfer_seconds": ("Time that fetches from other services took",),
    "moeserve_kv_transfer_failed": (
        "Prompts that were computed, wholly or in part, because their KV could not be fetched",
        "reason",
    ),
    "moeserve_kv_window_evictions": ("Cached window blocks that gave way to others",),
    "moeserve_state_snapshots_saved": ("Snapshots of recurrent states that were saved",),
    "moeserve_state_snapshots_used": ("Times that a request went on from a snapshot of recurrent states",),
    "moeserve_state_snapshots_evicted": ("Snapshots of recurrent states that gave way to others",),
    "moeserve_device_wait_seconds": ("Time that the engine waited for a GPU to end steps",),
    "moeserve_draft_chunks": ("Chunks with draft tokens",),
    "moeserve_draft_tokens": ("Draft tokens that steps verified",),
    "moeserve_draft_accepted_tokens": ("Draft tokens that were right",),
    "moeserve_draft_accepted_tokens_per_pos": ("Draft tokens that were right by their place in the chunk", "position"),
    "moeserve_expert_recorded_tokens": ("Tokens whose routing was recorded",),
    "moeserve_expert_remote_rows": ("Rows times the other ranks that hold experts of theirs",),
    "moeserve_expert_rows": ("Rows: tokens times layers with experts",),
    "moeserve_expert_link_rows": ("Rows that a rank sent to another, padding included", "from", "to"),
    "moeserve_expert_link_bytes": ("Bytes that a rank handed over for another, both ways", "from", "to"),
    "moeserve_expert_stall_seconds": ("Time that the computation waited for experts", "rank"),
    "moeserve_expert_misses": ("Experts that were not in memory when they were wanted", "rank"),
    "moeserve_expert_computed_on_host": ("Of these, experts that a GPU's host computed where they lie", "rank"),
    "moeserve_expert_host_seconds": ("Time that a GPU's host computed experts", "rank"),
    "moeserve_expert_hits": ("Experts that were in memory when they were wanted", "rank"),
    "moeserve_expert_evictions": ("Experts that left memory for others", "rank"),
    "moeserve_expert_demand_bytes": ("Bytes read because they were wanted at once", "rank"),
    "moeserve_expert_predictor_seconds": ("Time spent on predictions", "rank"),
    "moeserve_expert_late": ("Experts that were wanted while their prefetch was under way", "rank"),
    "moeserve_expert_prefetched_bytes": ("Bytes read ahead", "rank"),
    "moeserve_expert_prefetch_bytes": ("Bytes read ahead, by what became of them", "rank", "outcome"),
    "moeserve_expert_foreseeable": (
        "Experts that layers needed for which some had been named, by how many layers ahead",
        "rank",
        "distance",
    ),
    "moeserve_expert_foreseen": (
        "Foreseeable experts that had been named: the ratio to all foreseeable ones is the recall of predictions",
        "rank",
        "distance",
    ),
    "moeserve_expert_ranked_choices": (
        "Experts chosen in layers that a source had ranked `distance` layers before, of a sample of the steps",
        "rank",
        "source",
        "distance",
    ),
    "moeserve_expert_recalled_choices": (
        "Of the ranked choices, those among the source's first k: their ratio is its recall",
        "rank",
        "source",
        "distance",
    ),
    "moeserve_expert_migrations": ("Layers placed anew",),
    "moeserve_expert_migration_failures": ("Layers that could not be",),
    "moeserve_expert_migrated": ("Experts read for that, by all ranks",),
}


def feature_metrics(features: FeatureSamples) -> Iterator[Metric]:
    kinds: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], Mapping[str, tuple[str, ...]]], ...]
    kinds = ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS))
    for kind, known in kinds:
        for name, (documentation, *labels) in known.items():
            if name in features:
                metric = kind(name, documentation, labels=labels)
                for *values, value in features[name]:
                    metric.add_metric([str(label) for label in values], float(value))
                yield metric


class VllmNames:
    """Adds the other names to the metrics of one service. model: the label `model_name`; `engine` is always 0."""

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model, "engine": "0"}

    def add(self, families: Iterable[Metric], stats: Stats | None, ready: EngineReady | None) -> Iterator[Metric]:
        """Yield all families, each followed by its namesakes, and vLLM's metrics of memory and adapters."""
        for family in families:
            yield family
            for name in _NAMES.get(family.name, ()):
                yield self._renamed(family, f"vllm:{name}")
        if stats is not None:
            yield from self._usage(stats)
        if ready is not None:
            config = {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.num_blocks)}
            yield self._gauge("cache_config_info", "Configuration of the KV memory", 1, config)
            adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
            yield self._gauge("lora_requests_info", "There are no adapters", time.time(), adapters)

    def _usage(self, stats: Stats) -> Iterator[Metric]:
        blocks = stats.blocks_free + stats.blocks_cached + stats.blocks_leased
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
            yield self._gauge(name, "Share of the KV blocks that requests hold", stats.blocks_leased / max(1, blocks))
        hit_rate = stats.prefix_hit_tokens / max(1, stats.prefix_query_tokens)
        yield self._gauge("gpu_prefix_cache_hit_rate", "Share of prompt tokens found in the prefix cache", hit_rate)
        yield self._gauge("num_requests_swapped", "No request is ever swapped out", 0)

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {**self._labels, **sample.labels}
            if "reason" in labels:
                labels["finished_reason"] = labels.pop("reason")
            renamed.samples.append(Sample(name + sample.name.removeprefix(family.name), labels, sample.value))
        return renamed

    def _gauge(self, name: str, documentation: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
        all_labels = {**self._labels, **(labels or {})}
        family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=list(all_labels))
        family.add_metric(list(all_labels.values()), value)
        return family
