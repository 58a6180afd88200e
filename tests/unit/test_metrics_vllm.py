"""The names of vLLM's metrics tell what the service's own names tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moeserve.frontend.metrics import Metrics, VllmNames
from moeserve.plan import FinishReason
from moeserve.wire import EngineReady, Stats

READY = EngineReady(1, "h", 512, 260, [1], {}, 4, 8, 40, 16, "cpu", "float32", 1, 1)
LABELS = {"model_name": 'a "model"', "engine": "0"}
# What dashboards and routers for vLLM ask for, with the labels beside model_name and engine.
ASKED: dict[str, tuple[Mapping[str, str], float]] = {
    "vllm:num_requests_running": ({}, 3),
    "vllm:num_requests_waiting": ({}, 2),
    "vllm:kv_cache_usage_perc": ({}, 0.25),
    "vllm:gpu_cache_usage_perc": ({}, 0.25),
    "vllm:gpu_prefix_cache_hit_rate": ({}, 30 / 70),
    "vllm:num_requests_swapped": ({}, 0),
    "vllm:prompt_tokens_total": ({}, 70),
    "vllm:generation_tokens_total": ({}, 50),
    "vllm:prefix_cache_queries_total": ({}, 70),
    "vllm:prefix_cache_hits_total": ({}, 30),
    "vllm:num_preemptions_total": ({}, 1),
    "vllm:time_to_first_token_seconds_bucket": ({"le": "0.25"}, 1),
    "vllm:time_to_first_token_seconds_sum": ({}, 0.2),
    "vllm:inter_token_latency_seconds_count": ({}, 2),
    "vllm:time_per_output_token_seconds_bucket": ({"le": "+Inf"}, 2),
    "vllm:e2e_request_latency_seconds_count": ({}, 1),
    "vllm:request_queue_time_seconds_sum": ({}, 0.5),
    "vllm:request_decode_time_seconds_sum": ({}, 0.75),
    "vllm:request_prompt_tokens_sum": ({}, 70),
    "vllm:request_generation_tokens_bucket": ({"le": "50.0"}, 1),
    "vllm:request_success_total": ({"finished_reason": "stop"}, 1),
    "vllm:spec_decode_num_drafts_total": ({}, 4),
    "vllm:spec_decode_num_draft_tokens_total": ({}, 9),
    "vllm:spec_decode_num_accepted_tokens_total": ({}, 5),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": ({"position": "1"}, 2),
    "vllm:cache_config_info": ({"block_size": "16", "num_gpu_blocks": "40"}, 1),
}


def measured() -> Metrics:
    """Metrics in which each figure of `ASKED` has its value."""
    metrics = Metrics()
    metrics.time_to_first_token.observe(0.2)
    for seconds in (0.01, 0.02):
        metrics.inter_token.observe(seconds)
    metrics.end_to_end.observe(1.0)
    metrics.decode_time.observe(0.75)
    metrics.prompt_tokens.observe(70)
    metrics.generation_tokens.observe(50)
    metrics.count_ended(FinishReason.STOP)
    counts: dict[str, Any] = dict.fromkeys(Stats.__struct_fields__, 0)
    counts |= {"num_running": 3, "num_waiting": 2, "blocks_free": 20, "blocks_cached": 10, "blocks_leased": 10}
    counts |= {"prompt_tokens": 70, "generation_tokens": 50, "prefix_query_tokens": 70, "prefix_hit_tokens": 30}
    counts |= {"preemptions": 1, "rejections": {}, "queue_seconds": [0.5], "load": None}
    counts["features"] = {
        "moeserve_draft_chunks": [[4]],
        "moeserve_draft_tokens": [[9]],
        "moeserve_draft_accepted_tokens": [[5]],
        "moeserve_draft_accepted_tokens_per_pos": [["0", 3], ["1", 2]],
    }
    metrics.on_stats(Stats(**counts))
    return metrics


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize("name", ASKED)
def test_what_dashboards_ask_for_is_told(name: str) -> None:
    told = samples(measured().render(READY, VllmNames('a "model"')))
    labels, value = ASKED[name]
    assert told[name, frozenset({**LABELS, **labels}.items())] == pytest.approx(value)


def test_the_other_names_add_to_the_own_ones_and_can_be_left_out() -> None:
    metrics = measured()
    plain, both = samples(metrics.render()), samples(metrics.render(READY, VllmNames("m")))
    assert {key: value for key, value in both.items() if not key[0].startswith("vllm:")} == plain
    assert not any(name.startswith("vllm:") for name, _ in plain)


def test_before_the_engine_is_ready_only_what_was_counted_is_told() -> None:
    told = {name for name, _ in samples(Metrics().render(None, VllmNames("m")))}
    assert "vllm:time_to_first_token_seconds_count" in told
    assert not told & {"vllm:kv_cache_usage_perc", "vllm:cache_config_info", "vllm:num_requests_running"}
