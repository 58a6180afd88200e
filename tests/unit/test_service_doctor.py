"""`moeserve doctor --url`: sentences from the figures of a running service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from launcher.cli import main
from launcher.service_doctor import Figures, advice
from moeserve.frontend.metrics import Metrics
from tests.support.local_http import Handler, local_server

WELL = {
    "moeserve_kv_blocks": {("free",): 10.0, ("cached",): 80.0, ("leased",): 10.0},
    "moeserve_prefix_cache_queries_total": {(): 100_000.0},
    "moeserve_prefix_cache_hits_total": {(): 90_000.0},
    "moeserve_request_queue_seconds_count": {(): 10.0},
    "moeserve_request_queue_seconds_sum": {(): 0.1},
    "moeserve_preemptions_total": {(): 0.0},
}


def test_a_service_that_is_well_gets_no_advice() -> None:
    assert advice(Figures(WELL, 65_536)) == []


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        (
            {"preemptions_total": {(): 3.0}, "kv_overflow_total": {("swap",): 2.0}},
            "3 times .*2 swap.*--kv-cache-memory",
        ),
        ({"kv_blocks": {("free",): 1.0, ("leased",): 99.0}}, "nearly all KV.*--kv-cache-dtype int8"),
        ({"request_queue_seconds_sum": {(): 50.0}}, "waits 5.0 s.*--max-num-seqs"),
        ({"rejections_total": {("queue_full",): 4.0}}, "4 requests were refused .queue_full.*--max-num-queued-reqs"),
        ({"prefix_cache_hits_total": {(): 12_000.0}}, "Only 12% of the prompt tokens.*cache_report"),
        ({"engine_restarts_total": {(): 1.0}}, "started again 1 times"),
        (
            {"expert_misses_total": {("0",): 50.0}, "expert_hits_total": {("0",): 50.0}},
            "50% of the experts.*--expert-mem",
        ),
    ],
)
def test_each_fault_is_a_sentence_with_the_flag_that_mends_it(
    samples: dict[str, dict[tuple[str, ...], float]], says: str
) -> None:
    named = {f"moeserve_{name}": values for name, values in samples.items()}
    (sentence,) = advice(Figures(WELL | named, 65_536))
    assert re.search(says, sentence)


def test_a_short_context_is_said() -> None:
    (sentence,) = advice(Figures(WELL, 4096))
    assert "4,096 tokens and terminal agents need 32,000" in sentence


@pytest.fixture
def url() -> Iterator[str]:
    class Service(Handler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.answer(200, Metrics().render())
            else:
                self.answer(200, json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}).encode())

    with local_server(Service) as address:
        yield address


def test_the_command_reads_a_services_own_metrics(url: str) -> None:
    result = CliRunner().invoke(main, ["doctor", "--url", url])
    assert (result.exit_code, result.output.startswith("- The context has 4,096")) == (0, True)
    shown = json.loads(CliRunner().invoke(main, ["doctor", "--url", url, "--json"]).output)
    assert len(shown["advice"]) == 1


def test_a_model_beside_a_running_service_is_refused(url: str) -> None:
    assert CliRunner().invoke(main, ["doctor", "demo", "--url", url]).exit_code == 2
