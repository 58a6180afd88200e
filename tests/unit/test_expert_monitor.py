"""Reports about experts: counters, the description, and commands that cannot be carried out."""

from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from experts.memory.residency import ComputeCosts, ExpertMemoryStats, ResidencyCounters
from experts.placement.placement import Placement, contiguous
from experts.placement.rebalance import RebalanceStats
from experts.routing.choices import RoutingShape, RoutingStatistics, StatisticsSpec
from experts.routing.files import load_trace
from experts.routing.predictors import SourceRecall
from moeserve.config import ServeConfig
from moeserve.engine.experts.monitor import (
    ExpertCommandError,
    ExpertFacts,
    ExpertMonitor,
    ExpertSources,
    expert_strategy,
    file_failure,
)
from moeserve.engine.experts.observe import ExpertRecording, RecordingPlan
from moeserve.engine.file_writer import FileJob
from moeserve.frontend.metrics import feature_metrics
from moeserve.wire import FeatureSamples

FACTS = ExpertFacts((1, 2), 4, 1)
IDS = np.array([[[0], [1], [1], [2]], [[3], [3], [3], [3]]], np.int16)
PLACEMENT = contiguous(2, 4, 2)


def recording(path: Path | None = None, placement: Placement | None = PLACEMENT) -> ExpertRecording:
    statistics = RoutingStatistics(StatisticsSpec(2, 4, 1, half_life=10**12))
    made = ExpertRecording(RecordingPlan(RoutingShape(2, 4, 1, last_is_sparse=False), statistics, "key", path))
    made.add(0, IDS, [5, 6, 7, 8], placement)
    return made


def monitor(folder: Path, made: ExpertRecording | None, placement: Placement | None = PLACEMENT) -> ExpertMonitor:
    return ExpertMonitor(FACTS, made, ExpertSources(placement=lambda: placement), folder)


def samples(features: FeatureSamples) -> dict[tuple[str, ...], float]:
    class Newest(Collector):
        def collect(self):
            return feature_metrics(features)

    registry = CollectorRegistry()
    registry.register(Newest())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def test_counters_of_two_ranks(tmp_path: Path):
    found = samples(monitor(tmp_path, recording()).samples())
    assert found["moeserve_expert_recorded_tokens_total",] == 4
    balance = {key[1:]: value for key, value in found.items() if key[0] == "moeserve_expert_balancedness"}
    assert balance == pytest.approx(
        {("0", "experts"): 0.5, ("1", "experts"): 0.25, ("0", "ranks"): 2 / 3, ("1", "ranks"): 0.5}
    )
    assert found["moeserve_expert_remote_rows_total",] == 5
    assert found["moeserve_expert_rows_total",] == 8


def test_what_is_not_there_is_not_exported(tmp_path: Path):
    assert samples(monitor(tmp_path, None).samples()) == {}
    alone = samples(monitor(tmp_path, recording(placement=None), None).samples())
    assert {name for name, *_ in alone} == {"moeserve_expert_recorded_tokens_total", "moeserve_expert_balancedness"}
    assert all("ranks" not in labels for _, *labels in alone)


def test_the_description_of_two_ranks(tmp_path: Path):
    described = monitor(tmp_path, recording()).command("experts", {})
    assert described["layers"] == [1, 2]
    assert described["load"] == [[1, 2, 1, 0], [0, 0, 0, 4]]
    assert described["placement"]["version"] == 0
    assert described["placement"]["ranks"] == [[[0], [0], [1], [1]]] * 2
    assert described["balancedness"]["ranks"] == pytest.approx([2 / 3, 0.5])
    assert described["recording"] == {"tokens": 4, "half_life": 10**12, "saved_to_file": False, "trace": None}


def test_the_description_without_recording_and_with_one_rank(tmp_path: Path):
    described = monitor(tmp_path, None, None).command("experts", {})
    assert described == {"layers": [1, 2], "num_experts": 4, "top_k": 1, "num_ranks": 1}


def test_the_description_counts_the_ranks_that_the_placement_names(tmp_path: Path):
    # Four ranks, as two groups of two that share each layer.
    described = monitor(tmp_path, None, contiguous(2, 4, 4)).command("experts", {})
    assert (described["num_ranks"], described["placement"]["ranks"]) == (4, [[[0], [1], [2], [3]]] * 2)


def test_statistics_asked_for_are_saved_by_a_file_job(tmp_path: Path):
    path = tmp_path / "experts.safetensors"
    job = monitor(tmp_path, recording(path)).command("save_expert_statistics", {})
    assert isinstance(job, FileJob)
    assert job.result == {"tokens": 4}
    assert not path.exists()
    job.write()
    assert path.exists()


def test_a_trace_from_start_to_file(tmp_path: Path):
    made = recording()
    operator = monitor(tmp_path, made)
    assert operator.command("start_expert_trace", {"max_tokens": 3, "token_ids": True}) == {"max_tokens": 3}
    assert made.trace is not None
    made.trace.add(IDS, [5, 6, 7, 8], [("a", 4)])
    assert operator.command("experts", {})["recording"]["trace"] == {"tokens": 3, "max_tokens": 3}
    with pytest.raises(ExpertCommandError, match="already"):
        operator.command("start_expert_trace", {})
    job = operator.command("stop_expert_trace", {})
    assert isinstance(job, FileJob)
    assert job.result["tokens"] == 3
    job.write()
    assert load_trace(Path(job.result["file"])).token_ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("save_expert_statistics", "without --expert-statistics"),
        ("stop_expert_trace", "No trace is being recorded"),
        ("format_disk", "unknown command"),
    ],
)
def test_commands_that_cannot_be_carried_out(tmp_path: Path, command: str, sentence: str):
    with pytest.raises(ExpertCommandError, match=sentence):
        monitor(tmp_path, recording()).command(command, {})


def test_an_empty_trace_and_a_full_disk_are_said(tmp_path: Path):
    operator = monitor(tmp_path, recording())
    operator.command("start_expert_trace", {})
    with pytest.raises(ExpertCommandError, match="empty"):
        operator.command("stop_expert_trace", {})
    job = monitor(tmp_path, recording(tmp_path / "gone" / "file")).command("save_expert_statistics", {})
    assert isinstance(job, FileJob)
    with pytest.raises(OSError, match="No such file") as caught:
        job.write()
    assert file_failure(caught.value) == "The file cannot be written (No such file or directory)."
    with pytest.raises(ExpertCommandError, match="--no-record-experts"):
        monitor(tmp_path, None).command("start_expert_trace", {})


def memory(resident: list[list[int]], num_hits: int = 9) -> ExpertMemoryStats:
    """What a bounded expert memory tells."""
    counters = ResidencyCounters(
        num_hits=num_hits, num_late=1, num_misses=2, num_evictions=3, demand_bytes=40, useful_bytes=7
    )
    return ExpertMemoryStats(counters, 0.5, 0.25, 0, resident)


def test_a_bounded_memory_tells_of_stalls_and_of_prefetches_only_where_there_are_any(tmp_path: Path):
    for prefetches in (False, True):
        sources = ExpertSources(memory=lambda: [memory([[0, 2], [1]])], prefetches=prefetches)
        operator = ExpertMonitor(FACTS, None, sources, tmp_path)
        found = samples(operator.samples())
        assert found["moeserve_expert_stall_seconds_total", "0"] == 0.5
        assert found["moeserve_expert_misses_total", "0"] == 2
        assert found["moeserve_expert_resident", "0"] == 3
        outcomes = {key[2] for key in found if key[0] == "moeserve_expert_prefetch_bytes_total"}
        assert outcomes == ({"useful", "late", "wasted", "cancelled"} if prefetches else set())
        assert (("moeserve_expert_late_total", "0") in found) == prefetches
        assert operator.command("experts", {})["residency"]["resident"] == [[[0, 2], [1]]]


def test_the_memories_of_two_ranks_are_told_apart(tmp_path: Path):
    ranks = [memory([[0], [1]]), memory([[2, 3], [2]], num_hits=4)]
    operator = ExpertMonitor(FACTS, None, ExpertSources(memory=lambda: ranks), tmp_path)
    found = samples(operator.samples())
    assert [found["moeserve_expert_hits_total", rank] for rank in "01"] == [9, 4]
    assert [found["moeserve_expert_resident", rank] for rank in "01"] == [2, 3]
    assert operator.command("experts", {})["residency"]["resident"] == [[[0], [1]], [[2, 3], [2]]]


def test_links_and_rebalancing_are_told(tmp_path: Path):
    stats = RebalanceStats(num_migrations=2, num_experts_loaded=5, seconds_since_success=8.0, last_gain=(0.5, 0.75))
    sources = ExpertSources(
        placement=lambda: PLACEMENT,
        placement_version=lambda: 2,
        links=lambda: [[0, 1, 10, 1000], [1, 0, 20, 2000]],
        rebalancing=lambda: stats,
    )
    operator = ExpertMonitor(FACTS, None, sources, tmp_path)
    found = samples(operator.samples())
    assert found["moeserve_expert_link_rows_total", "1", "0"] == 20
    assert found["moeserve_expert_link_bytes_total", "0", "1"] == 1000
    assert found["moeserve_expert_placement_version",] == 2
    assert found["moeserve_expert_migration_age_seconds",] == 8.0
    described = operator.command("experts", {})
    assert described["placement"]["version"] == 2
    assert described["rebalancing"]["last_gain"] == (0.5, 0.75)


def test_bytes_read_ahead_and_what_was_foreseen_have_plain_labels(tmp_path: Path):
    counters = ResidencyCounters(
        prefetch_bytes=10,
        useful_bytes=4,
        late_bytes=3,
        wasted_bytes=2,
        cancelled_bytes=1,
        num_foreseeable=(8, 4, 0),
        num_foreseen=(6, 1, 0),
    )
    of_rank = ExpertMemoryStats(counters, 0.0, 0.5, 0, [[]], [SourceRecall("affinity", 2, 50, 30)])
    sources = ExpertSources(memory=lambda: [of_rank], prefetches=True)
    metrics = feature_metrics(ExpertMonitor(FACTS, None, sources, tmp_path).samples())
    text = "".join(f"{sample.name} {sample.labels} {sample.value}\n" for metric in metrics for sample in metric.samples)
    for outcome, num_bytes in (("useful", 4), ("late", 3), ("wasted", 2), ("cancelled", 1)):
        assert f"moeserve_expert_prefetch_bytes_total {{'rank': '0', 'outcome': '{outcome}'}} {num_bytes}.0\n" in text
    assert "moeserve_expert_foreseen_total {'rank': '0', 'distance': '2'} 1.0\n" in text
    assert "moeserve_expert_foreseeable_total {'rank': '0', 'distance': '1'} 8.0\n" in text
    labels = {"rank": "0", "source": "affinity", "distance": "2"}
    assert f"moeserve_expert_ranked_choices_total {labels} 50.0\n" in text
    assert f"moeserve_expert_recalled_choices_total {labels} 30.0\n" in text


def test_recall_is_told_in_all_and_by_source_where_there_are_prefetches(tmp_path: Path):
    counters = ResidencyCounters(num_foreseeable=(8, 4, 0), num_foreseen=(6, 1, 0))
    recall = [
        SourceRecall("affinity", 1, 40, 10),
        SourceRecall("affinity", 2, 40, 9),
        SourceRecall("gate-early", 1, 4, 3),
    ]
    of_rank = ExpertMemoryStats(counters, 0.5, 0.25, 0, [[0]], recall)
    operator = ExpertMonitor(FACTS, None, ExpertSources(memory=lambda: [of_rank], prefetches=True), tmp_path)
    assert operator.command("experts", {})["recall"] == [
        {
            "asked_for": [0.75, 0.25, None],
            "sources": {"affinity": {"1": 0.25, "2": 0.225}, "gate-early": {"1": 0.75}},
        }
    ]
    assert samples(operator.samples())["moeserve_expert_recalled_choices_total", "0", "affinity", "2"] == 9
    silent = ExpertMonitor(FACTS, None, ExpertSources(memory=lambda: [of_rank]), tmp_path)
    assert "recall" not in silent.command("experts", {})


def test_experts_that_the_host_computes_are_told_with_the_times_that_decide_only_where_it_computes_any(tmp_path: Path):
    counters = ResidencyCounters(num_misses=5, num_elsewhere=3)
    costs = ComputeCosts(0.002, 0.0001, [(1, 0.0005), (64, 0.01)])
    sharing = ExpertMemoryStats(counters, 0.5, 0.25, 0, [[0]], host_seconds=1.5, costs=costs)
    operator = ExpertMonitor(FACTS, None, ExpertSources(memory=lambda: [sharing]), tmp_path)
    assert operator.command("experts", {})["compute"] == [
        {
            "on_host": 3,
            "host_seconds": 1.5,
            "ms": {"copy": 2.0, "host_call": 0.1, "host_expert": {"1": 0.5, "64": 10.0}},
        }
    ]
    assert samples(operator.samples())["moeserve_expert_computed_on_host_total", "0"] == 3
    assert samples(operator.samples())["moeserve_expert_host_seconds_total", "0"] == 1.5
    copying = ExpertMonitor(FACTS, None, ExpertSources(memory=lambda: [memory([[0]])]), tmp_path)
    assert "compute" not in copying.command("experts", {})
    assert not any("host" in name for name, *_ in samples(copying.samples()))


def test_the_strategy_says_whether_prefetching_is_on():
    class Resting:
        is_on = False
        gains = ((4, True, -0.03125),)

    config = ServeConfig(expert_memory=1, expert_policy="lru")
    prefetch = {"source": "auto", "is_on": False, "saved": [{"rows": 4, "free_core": True, "share": -0.0312}]}
    assert expert_strategy(config, Resting()) == {"eviction": "lru", "prefetch": prefetch}
    assert expert_strategy(config, None)["prefetch"] == {"source": "off", "is_on": False}
    assert expert_strategy(ServeConfig(), None, "alltoall") == {"placement": "contiguous", "dispatch": "alltoall"}


def test_the_strategy_does_not_speak_of_evictions_where_all_experts_fit():
    told = expert_strategy(ServeConfig(expert_memory=1 << 40), None, "allgather", all_fit=True)
    assert told == {"placement": "contiguous", "dispatch": "allgather"}


def test_experts_that_always_come_in_the_same_groups_are_called_tied(tmp_path):
    def tied(pairs: np.ndarray) -> bool:
        statistics = RoutingStatistics(StatisticsSpec(1, 6, 2))
        statistics.update(pairs[None].astype(np.int16))
        recording = ExpertRecording(RecordingPlan(RoutingShape(1, 6, 2, last_is_sparse=False), statistics, "key"))
        return ExpertMonitor(FACTS, recording, ExpertSources(), tmp_path).command("experts", {})["tied"]

    random = np.random.default_rng(0)
    assert tied(np.array([[0, 3], [1, 4], [2, 5]])[random.integers(3, size=200)])
    assert not tied(random.random((200, 6)).argsort(axis=1)[:, :2])
    assert not tied(np.array([[0, 3]]))
