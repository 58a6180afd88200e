"""From the bytes that a rank hears to statistics, and the recording that brings them together."""

import json
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experts.placement.placement import contiguous
from experts.routing.choices import (
    NOT_COMPUTED,
    RoutingRecorder,
    RoutingShape,
    RoutingStatistics,
    StatisticsSpec,
    unpack,
)
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.experts.observe import (
    ExpertRecording,
    RecordingPlan,
    plan_recording,
    routing_shape,
)
from moeserve.model.families import build_spec
from moeserve.model.spec import DecoderSpec
from moeserve.plan import Chunk, ChunkResult, SamplingParams, StepPlan, StepResult

LAYERS, EXPERTS, TOP_K = 3, 6, 2
SPEC = StatisticsSpec(LAYERS, EXPERTS, TOP_K)
SHAPE = RoutingShape(LAYERS, EXPERTS, TOP_K)


def routing(num_tokens: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.random((LAYERS, num_tokens, EXPERTS)).argsort(axis=2)[..., :TOP_K].astype(np.int16)


def as_heard(ids: np.ndarray, logit_rows: list[int], dtype: type = np.uint8) -> bytes:
    """What a tap gives when the last layer computes only some rows."""
    return np.concatenate([ids[:-1].reshape(-1), ids[-1, logit_rows].reshape(-1)]).astype(dtype).tobytes()


def chunk(token_ids: list[int], *, draws: bool) -> Chunk:
    return Chunk("r", array("i", token_ids), 0, array("i", [0]), SamplingParams(max_tokens=4) if draws else None)


def test_rows_that_the_last_layer_left_out_are_marked():
    ids = routing(4)
    found = unpack(as_heard(ids, [1, 3]), SHAPE, 4, [1, 3])
    np.testing.assert_array_equal(found[:-1], ids[:-1])
    np.testing.assert_array_equal(found[-1, [1, 3]], ids[-1, [1, 3]])
    assert (found[-1, [0, 2]] == NOT_COMPUTED).all()


def test_many_experts_and_a_dense_last_layer():
    ids = np.array([[[299, 0]], [[3, 258]]], np.int16)
    found = unpack(ids.tobytes(), RoutingShape(2, 300, 2, last_is_sparse=False), 1, [])
    np.testing.assert_array_equal(found, ids)


def test_bytes_of_another_number_of_rows_are_refused():
    with pytest.raises(ValueError, match="20 expert ids where 18 belong"):
        unpack(bytes(20), SHAPE, 3, [0, 1, 2])


def test_steps_counted_together_are_counted_like_one_by_one():
    spec = replace(SPEC, max_rows_per_step=1000)
    recorder, plain = RoutingRecorder(RoutingStatistics(spec)), RoutingStatistics(spec)
    for step in range(50):
        ids, tokens = routing(3, step), [step % 5, 7, 8]
        recorder.add(ids, tokens)
        plain.update(ids, np.array(tokens))
    gathered = recorder.statistics()
    assert recorder.num_tokens == 150
    for name, table in plain.tables().items():
        if name != "token_ids":
            np.testing.assert_allclose(np.sort(gathered.tables()[name].ravel()), np.sort(table.ravel()), rtol=1e-2)
    np.testing.assert_allclose(gathered.load(), plain.load(), rtol=1e-2)


def test_a_row_that_a_layer_left_out_counts_in_the_other_layers_only():
    ids = routing(2)
    ids[-1, 0] = NOT_COMPUTED
    statistics = RoutingStatistics(StatisticsSpec(LAYERS, EXPERTS, TOP_K, half_life=10**12))
    statistics.update(ids, np.array([4, 5]))
    assert statistics.load().sum(axis=1).tolist() == [4, 4, 2]
    assert statistics.transitions(1).sum(axis=(1, 2)).tolist() == [8, 4]
    assert statistics.transitions(2).sum() == 4
    np.testing.assert_array_equal(statistics.recent()[:, 0], ids[:, 1])
    assert statistics.recent().shape[1] == 1


def new_recording(*listeners: object) -> ExpertRecording:
    return ExpertRecording(RecordingPlan(SHAPE, RoutingStatistics(SPEC), "key"), listeners=listeners)


def test_the_routing_of_all_ranks_is_counted_with_its_tokens():
    first, second = routing(3, 1), routing(1, 2)
    plans = [
        StepPlan(1, [chunk([4, 5], draws=False), chunk([6], draws=True)]),
        StepPlan(1, []),
        StepPlan(1, [chunk([9], draws=True)]),
    ]
    recording, heard = new_recording(), [as_heard(first, [2]), b"", as_heard(second, [0])]
    recording.begin(plans)
    results = [[ChunkResult(3) for _ in plan.chunks] for plan in plans]
    recording.end(plans, [StepResult(1, chunks, routing) for chunks, routing in zip(results, heard, strict=True)])
    statistics = recording.statistics()
    assert statistics.load().sum(axis=1) == pytest.approx([8, 8, 4], rel=1e-3)
    for token_id, chosen in ((4, first[0, 0]), (9, second[0, 0])):
        found = statistics.first_experts(token_id)
        assert found is not None
        assert sorted(np.flatnonzero(found)) == sorted(chosen)


def test_tokens_that_a_step_was_planned_without_are_those_that_the_one_before_drew():
    heard: list[list[int]] = []
    recording = new_recording(Hearing(heard))
    first = StepPlan(1, [chunk([4, 5], draws=False), chunk([6], draws=True), chunk([8], draws=True)])
    second = StepPlan(2, [chunk([0], draws=True), chunk([0], draws=True)])
    second.chunks[0].drawn_by, second.chunks[1].drawn_by = 1, 0
    for plan in (first, second):
        recording.begin([plan])
    for plan, drawn in ((first, [None, 7, 9]), (second, [3, 4])):
        routed = as_heard(routing(plan.num_tokens, plan.step), [plan.num_tokens - 2, plan.num_tokens - 1])
        recording.end([plan], [StepResult(plan.step, [ChunkResult(token) for token in drawn], routed)])
    recording.gather()
    assert heard == [[4, 5, 6, 8], [9, 7]]


def test_of_large_steps_some_are_recorded_of_all_ranks_alike_and_a_trace_gets_all():
    shape = RoutingShape(64, 4, 4, last_is_sparse=False)
    heard: list[list[int]] = []
    statistics = RoutingStatistics(StatisticsSpec(64, 4, 4))
    recording = ExpertRecording(RecordingPlan(shape, statistics, "key"), listeners=[Hearing(heard)])
    num_rows, num_steps, num_ranks = 64, 240, 3
    routed = np.tile(np.arange(4, dtype=np.uint8), 64 * num_rows).tobytes()
    for step in range(num_steps):
        plans = [StepPlan(step, [chunk([rank] * num_rows, draws=True)]) for rank in range(num_ranks)]
        recording.begin(plans)
        recording.end(plans, [StepResult(step, [ChunkResult(1)], routed) for _ in plans])
        if step == 200:
            recording.gather()
            before = len(heard)
            recording.start_trace(with_token_ids=False, max_tokens=10**4)
    recording.gather()
    assert before < 201 * num_ranks / 4
    sampled = [sum(tokens[0] == rank for tokens in heard[:before]) for rank in range(num_ranks)]
    assert max(sampled) - min(sampled) <= max(sampled) // 4
    assert len(heard) - before == (num_steps - 201) * num_ranks


def test_rows_are_counted_by_the_placement_with_which_their_step_began():
    placements = [contiguous(LAYERS, EXPERTS, 2), None]
    recording = ExpertRecording(RecordingPlan(SHAPE, RoutingStatistics(SPEC), "key"), lambda: placements.pop(0))
    plans = [[StepPlan(step, [chunk([4, 5], draws=True)])] for step in (1, 2)]
    for plan in plans:
        recording.begin(plan)
    for plan in plans:
        recording.end(plan, [StepResult(1, [ChunkResult(3)], as_heard(routing(2), [1]))])
    recording.gather()
    assert recording.remote_ranks.num_rows == 5


def test_the_rows_of_ranks_that_compute_a_plan_together_are_at_home_on_the_first_of_them():
    known, placement = RecordingPlan(SHAPE, RoutingStatistics(SPEC), "key"), contiguous(LAYERS, EXPERTS, 6)
    recording = ExpertRecording(known, lambda: placement, num_shards=3)
    # The second of two groups: its first rank, 3, has expert 3.
    plans = [StepPlan(1, []), StepPlan(1, [chunk([4], draws=True)])]
    ids = np.tile(np.array([3, 0], np.int16), (LAYERS, 1, 1))
    recording.begin(plans)
    recording.end(plans, [StepResult(1, [], b""), StepResult(1, [ChunkResult(3)], as_heard(ids, [0]))])
    recording.gather()
    assert (recording.remote_ranks.num_sent, recording.remote_ranks.num_rows) == (LAYERS, LAYERS)


class Hearing:
    """A listener that keeps the tokens it hears."""

    def __init__(self, heard: list[list[int]]) -> None:
        self._heard = heard

    def add(self, ids, token_ids):
        assert ids.shape[1] == len(token_ids)
        self._heard.append(list(token_ids))


MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def model(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(MIXTRAL | changes))
    return folder


def open_recording(config: ServeConfig, folder: Path, spec: DecoderSpec) -> ExpertRecording | None:
    plan = plan_recording(config, folder, spec)
    return None if plan is None else ExpertRecording(plan)


def test_a_file_is_saved_and_begun_with_again(tmp_path: Path):
    folder, spec = model(tmp_path), build_spec(MIXTRAL)
    config = ServeConfig(expert_statistics=str(tmp_path / "experts.safetensors"))
    recording = open_recording(config, folder, spec)
    assert recording is not None
    assert recording.shape == routing_shape(spec) == SHAPE
    recording.recorder.add(routing(5), [1, 2, 3, 4, 5])
    recording.save()
    again = open_recording(config, folder, spec)
    assert again is not None
    np.testing.assert_allclose(again.recorder.statistics().load(), recording.recorder.statistics().load(), rtol=1e-6)


def test_nothing_is_recorded_where_that_is_switched_off_or_there_are_no_experts(tmp_path: Path):
    dense = build_spec(MIXTRAL | {"model_type": "llama"})
    assert open_recording(ServeConfig(), model(tmp_path), dense) is None
    assert open_recording(ServeConfig(record_experts=False), tmp_path, build_spec(MIXTRAL)) is None


def test_a_file_of_statistics_that_nobody_would_write_or_go_by_is_refused(tmp_path: Path):
    folder, spec = model(tmp_path), build_spec(MIXTRAL)
    unrecorded = ServeConfig(record_experts=False, expert_statistics=str(tmp_path / "experts.safetensors"))
    with pytest.raises(ConfigError, match=r"^--expert-statistics needs --record-experts"):
        open_recording(unrecorded, folder, spec)
    for settings in ({"placement": "coactivation"}, {"expert_policy": "static"}, {"num_redundant_experts": 2}):
        assert open_recording(replace(unrecorded, **settings), folder, spec) is None


def test_statistics_that_cannot_serve_are_one_sentence(tmp_path: Path):
    path = tmp_path / "experts.safetensors"
    config = ServeConfig(expert_statistics=str(path))
    folder, spec = model(tmp_path), build_spec(MIXTRAL)
    with pytest.raises(ConfigError, match="this model has no experts"):
        open_recording(config, folder, build_spec(MIXTRAL | {"model_type": "llama"}))
    with pytest.raises(ConfigError, match="there is no folder"):
        open_recording(ServeConfig(expert_statistics=str(tmp_path / "no" / "x")), folder, spec)
    recording = open_recording(config, folder, spec)
    assert recording is not None
    recording.save()
    with pytest.raises(ConfigError, match="belongs to another model"):
        open_recording(config, model(tmp_path, hidden_size=128), spec)
    path.write_bytes(b"torn")
    with pytest.raises(ConfigError, match="torn"):
        open_recording(replace(config, expert_policy="static"), folder, spec)
    # A file that only goes on to be filled ends no start.
    assert open_recording(config, folder, spec) is not None
    assert not path.exists()
    assert path.with_name(f"{path.name}.broken").read_bytes() == b"torn"
