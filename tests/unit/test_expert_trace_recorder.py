"""Traces recorded step by step, and the rows that go to other ranks."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.experts.lab_traces import remote_ranks
from experts.placement.placement import contiguous
from experts.placement.rebalance import RemoteRanks
from experts.routing.choices import NOT_COMPUTED, RoutingShape, RoutingStatistics, StatisticsSpec
from experts.routing.files import UNKNOWN_TOKEN, TraceRecorder, load_trace
from moeserve.engine.experts.observe import ExpertRecording, RecordingPlan

LAYERS, EXPERTS, TOP_K = 3, 8, 2
SHAPE = RoutingShape(LAYERS, EXPERTS, TOP_K)


def routing(num_tokens: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.random((LAYERS, num_tokens, EXPERTS)).argsort(axis=2)[..., :TOP_K].astype(np.int16)


def recording(path: Path | None = None) -> ExpertRecording:
    statistics = RoutingStatistics(StatisticsSpec(LAYERS, EXPERTS, TOP_K))
    return ExpertRecording(RecordingPlan(SHAPE, statistics, "key", trace_path=path))


def test_a_trace_names_requests_and_leaves_the_last_layer_out():
    recorder = TraceRecorder(SHAPE, 100, with_token_ids=True)
    first, second = routing(5, 1), routing(2, 2)
    first[-1, :4] = NOT_COMPUTED
    recorder.add(first, [10, 11, 12, 13, 14], [("a", 3), ("b", 2)])
    recorder.add(second, [15, 16], [("b", 1), ("a", 1)])
    trace = recorder.trace()
    assert trace is not None
    np.testing.assert_array_equal(trace.ids, np.concatenate((first, second), axis=1)[:-1])
    assert trace.requests.tolist() == [0, 0, 0, 1, 1, 1, 0]
    assert trace.token_ids.tolist() == list(range(10, 17))


def test_all_layers_are_kept_where_the_last_one_is_dense():
    recorder = TraceRecorder(RoutingShape(LAYERS, EXPERTS, TOP_K, last_is_sparse=False), 9, with_token_ids=False)
    recorder.add(routing(2), [1, 2], [("a", 2)])
    trace = recorder.trace()
    assert trace is not None
    assert trace.ids.shape == (LAYERS, 2, TOP_K)


def test_tokens_are_not_told_unless_asked_for_and_no_more_are_kept_than_there_is_room_for():
    recorder = TraceRecorder(SHAPE, 4, with_token_ids=False)
    for step in range(3):
        recorder.add(routing(3, step), [7, 8, 9], [("a", 3)])
    trace = recorder.trace()
    assert trace is not None
    assert recorder.is_full
    assert trace.token_ids.tolist() == [UNKNOWN_TOKEN] * 4


def test_a_trace_of_nothing_is_none():
    assert TraceRecorder(SHAPE, 4, with_token_ids=False).trace() is None
    one_layer = TraceRecorder(RoutingShape(1, EXPERTS, TOP_K), 4, with_token_ids=False)
    one_layer.add(routing(1)[:1], [1], [("a", 1)])
    assert one_layer.trace() is None


def test_a_trace_that_the_settings_name_begins_at_once_and_is_written_at_the_end(tmp_path: Path):
    path = tmp_path / "trace.safetensors"
    running = recording(path)
    assert running.trace is not None
    running.trace.add(routing(3), [1, 2, 3], [("a", 3)])
    running.close()
    assert load_trace(path).requests.tolist() == [0, 0, 0]
    assert running.trace is None


def test_an_ended_trace_is_a_file_of_the_usual_format(tmp_path: Path):
    running = recording()
    started = running.start_trace(with_token_ids=True, max_tokens=10**12)
    assert started.max_tokens < 10**8
    started.add(routing(3), [1, 2, 3], [("a", 3)])
    assert running.end_trace(tmp_path / "t") == 3
    assert load_trace(tmp_path / "t").token_ids.tolist() == [1, 2, 3]
    assert running.end_trace(tmp_path / "t") == 0


def test_remote_ranks_are_counted_like_the_metric_of_placements():
    placement = contiguous(LAYERS, EXPERTS, 4)
    counter = RemoteRanks()
    for home in range(4):
        counter.add(routing(50, home), home, placement)
    ids = np.concatenate([routing(50, home) for home in range(4)], axis=1)
    expected = remote_ranks(ids, np.repeat(np.arange(4), 50), placement)
    assert counter.num_sent / counter.num_rows == pytest.approx(expected.mean())


def test_rows_that_a_layer_left_out_are_not_sent():
    ids = routing(2)
    ids[-1] = NOT_COMPUTED
    counter = RemoteRanks()
    counter.add(ids, 0, contiguous(LAYERS, EXPERTS, 2))
    assert counter.num_rows == 4
    assert counter.num_sent <= 4
