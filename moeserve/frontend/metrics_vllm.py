"""The service's metrics once more, under the names that dashboards and routers for vLLM look for.

`metrics` counts every figure, so both names have the same value. Names and labels are taken from vLLM's V1 metrics;
metrics without a counterpart here, such as the time of prefills, are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from moeserve.wire import EngineReady, Stats

# By the name of a metric here, without `_total`: its names there.
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


class VllmNames:
    """Adds the other names to the metrics of one service. model: the label `model_name`; `engine` is always 0."""

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model, "engine": "0"}

    def add(self, families: Iterable[Metric], stats: Stats | None, ready: EngineReady | None) -> Iterator[Metric]:
        """Yield all families, each followed by its namesakes, and what vLLM tells of memory and adapters."""
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
