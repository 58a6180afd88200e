"""Synthetic traces, their controls, and the figures they are tuned to."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.experts.lab_traces import (
    GateGuesses,
    LabTrace,
    load_lab_trace,
    save_lab_trace,
    shuffled_control,
    uniform_control,
)
from benchmarks.experts.synthetic_traces import MIXTRAL_LIKE, QWEN3_LIKE, SPARSE, SyntheticSpec, synthetic_trace
from experts.routing.files import Tap, TraceError, load_trace, save_trace
from tests.support.trace_figures import (
    adjacent_jaccard,
    adjacent_overlap,
    first_choice_repeats,
    hit_rate,
    load_exponent,
    transition_lookup,
    union_size,
)


def trace_of(*tokens, requests=None, num_experts=8):
    ids = np.array([tokens], np.uint16)
    requests = np.zeros(len(tokens)) if requests is None else np.array(requests)
    none = np.zeros(len(tokens), np.int32)
    return LabTrace(num_experts, ids, requests.astype(np.int32), none)


@pytest.mark.parametrize("spec", [MIXTRAL_LIKE, SPARSE], ids=["mixtral", "sparse"])
def test_a_trace_follows_from_its_seed_and_chooses_distinct_experts(spec):
    trace, again, other = (synthetic_trace(spec, 3, 10, seed) for seed in (1, 1, 2))
    assert (trace.ids == again.ids).all()
    assert (trace.token_ids == again.token_ids).all()
    assert (trace.ids != other.ids).any()
    for made in (trace, uniform_control(trace, 0), shuffled_control(trace, 0)):
        assert made.ids.shape == (spec.num_layers, 30, spec.top_k)
        assert (np.diff(np.sort(made.ids.astype(int), axis=2), axis=2) > 0).all()
        assert made.ids.max() < spec.num_experts


def test_shuffling_keeps_every_load():
    trace = synthetic_trace(SyntheticSpec(4, 8, 3, popularity=1.0), 10, 50, 0)
    shuffled = shuffled_control(trace, 0)
    assert (shuffled.load() == trace.load()).all()
    assert transition_lookup(shuffled, 2) < transition_lookup(trace, 2)
    assert adjacent_overlap(shuffled) < adjacent_overlap(trace)


def test_requests_are_split_whole():
    learnt, held_out = synthetic_trace(SyntheticSpec(2, 8, 2), 6, 5, 0).split()
    assert set(learnt.requests.tolist()) == {0, 2, 4}
    assert set(held_out.requests.tolist()) == {1, 3, 5}
    assert held_out.homes(2).tolist() == [0] * 5 + [1] * 5 + [0] * 5


def test_overlaps_do_not_cross_requests():
    trace = trace_of([0, 1], [1, 2], [1, 2], [4, 5], requests=[0, 0, 1, 1])
    assert adjacent_overlap(trace) == pytest.approx((1 + 0) / 4)
    assert adjacent_jaccard(trace) == pytest.approx((1 / 3 + 0) / 2)
    assert first_choice_repeats(trace_of([0, 1], [0, 2], [1, 2])).tolist() == [0.5]


def test_the_union_counts_each_expert_of_a_step_once():
    trace = trace_of([0, 1], [2, 3], [0, 2], [2, 3], requests=[0, 0, 1, 1])
    assert union_size(trace, 1) == 2
    assert union_size(trace, 2) == (3 + 2) / 2


def test_a_token_that_needs_its_whole_cache_evicts_only_what_it_does_not_need():
    trace = trace_of([0, 1], [1, 2], [0, 1], [1, 3], [0, 1])
    # Hits by hand with 2 slots: 1; 1; 1; 1. With 3 slots the least recent leaves: 0 stays until 3 pushes 2 out.
    assert hit_rate(trace, 2) == 4 / 10
    assert hit_rate(trace, 3) == 6 / 10
    assert hit_rate(trace, 3, clairvoyant=True) == 6 / 10


def test_foresight_never_hits_less():
    trace = synthetic_trace(SyntheticSpec(3, 16, 2), 2, 60, 0)
    for slots in (2, 4, 8, 16):
        assert hit_rate(trace, slots, clairvoyant=True) >= hit_rate(trace, slots)


def test_the_fitted_exponent_is_that_of_the_loads():
    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, 9) ** 0.7
    ids = random.choice(8, (1, 50_000, 1), p=weights / weights.sum()).astype(np.uint16)
    trace = LabTrace(8, ids, *[np.zeros(50_000, np.int32)] * 2)
    assert load_exponent(trace) == pytest.approx(0.7, abs=0.02)


def guessed(trace):
    logits = np.random.default_rng(0).standard_normal((len(trace.ids) - 2, trace.ids.shape[1], trace.num_experts))
    return replace(trace, guesses=(GateGuesses(Tap.SHARED, 2, logits.astype(np.float16)),))


def test_what_gates_guessed_stays_with_its_token():
    trace = guessed(synthetic_trace(SyntheticSpec(4, 8, 2), 2, 3, 0))
    held_out = trace.split()[1]
    assert (held_out.guesses[0].logits == trace.guesses[0].logits[:, 3:]).all()
    with pytest.raises(ValueError, match="gate logits"):
        replace(trace, guesses=(replace(trace.guesses[0], distance=1),))


def test_a_trace_comes_back_from_its_file(tmp_path):
    trace = guessed(synthetic_trace(SyntheticSpec(4, 8, 2), 2, 3, 0))
    save_lab_trace(tmp_path / "trace", trace)
    again = load_lab_trace(tmp_path / "trace")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace", "trace.guesses"]
    assert again.num_experts == 8
    for name in ("ids", "requests", "token_ids"):
        assert (getattr(again, name) == getattr(trace, name)).all()
    assert (again.guesses[0].tap, again.guesses[0].distance) == (Tap.SHARED, 2)
    assert (again.guesses[0].logits == trace.guesses[0].logits).all()


def test_a_file_that_is_no_trace_is_named(tmp_path):
    path = tmp_path / "trace"
    with pytest.raises(TraceError, match="There is no trace file"):
        load_trace(path)
    save_trace(path, trace_of([0, 1], [2, 2]))
    with pytest.raises(TraceError, match="chooses an expert twice"):
        load_trace(path)
    save_trace(path, trace_of([0, 9]))
    with pytest.raises(TraceError, match="outside 0 … 7"):
        load_trace(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(TraceError, match="is torn"):
        load_trace(path)
    save_file({"ids": np.zeros(1)}, path)
    with pytest.raises(TraceError, match="is no trace file that this version reads"):
        load_trace(path)


def test_many_small_experts_are_chosen_as_those_of_qwen3_are():
    trace = synthetic_trace(replace(QWEN3_LIKE, num_layers=24), 16, 60, 0)
    assert adjacent_jaccard(trace) == pytest.approx(0.293, abs=0.03)
    for num_streams, published in ((2, 15.0), (4, 26.6), (8, 42.6)):
        assert union_size(trace, num_streams) == pytest.approx(published, rel=0.1)
    assert 0.3 <= load_exponent(trace) <= 1.0


def test_few_large_experts_are_chosen_as_those_of_mixtral_are():
    trace = synthetic_trace(MIXTRAL_LIKE, 32, 100, 0)
    repeats = first_choice_repeats(trace)
    assert 1 / 8 < repeats[0] < 0.18
    assert repeats[12:20].mean() == pytest.approx(2 / 8, abs=0.03)
    assert transition_lookup(trace, 2) == pytest.approx(0.562, abs=0.02)
