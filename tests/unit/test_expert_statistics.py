"""Routing statistics against plain counting, and their file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.routing.choices import RoutingStatistics, StatisticsSpec
from experts.routing.files import StatisticsError, load_statistics, model_key, save_statistics
from tests.support.examples import examples

LAYERS, EXPERTS, TOP_K = 4, 6, 2
SPEC = StatisticsSpec(LAYERS, EXPERTS, TOP_K, num_tokens=8, num_recent=16)
KEY = model_key({"model_type": "mixtral", "num_local_experts": EXPERTS})


def routing(num_tokens, seed=0, spec=SPEC):
    random = np.random.default_rng(seed)
    return random.random((spec.num_layers, num_tokens, spec.num_experts)).argsort(axis=2)[..., : spec.top_k]


def gathered(num_steps=5, seed=0):
    statistics = RoutingStatistics(SPEC)
    for step in range(num_steps):
        statistics.update(routing(3, seed + step), np.array([step, step + 1, 7]))
    return statistics


def test_counts_equal_plain_counting_while_nothing_decays():
    statistics = RoutingStatistics(StatisticsSpec(LAYERS, EXPERTS, TOP_K, half_life=10**12))
    steps = [routing(tokens, seed) for seed, tokens in enumerate((1, 16, 5))]
    for step in steps:
        statistics.update(step)
    load = np.zeros((LAYERS, EXPERTS))
    following = {distance: np.zeros((LAYERS - distance, EXPERTS, EXPERTS)) for distance in (1, 2, 3)}
    for step in steps:
        for layer in range(LAYERS):
            for token in range(step.shape[1]):
                for expert in step[layer, token]:
                    load[layer, expert] += 1
                    for distance, table in following.items():
                        if layer + distance < LAYERS:
                            table[layer, expert, step[layer + distance, token]] += 1
    np.testing.assert_allclose(statistics.load(), load, rtol=1e-6)
    for distance, table in following.items():
        np.testing.assert_allclose(statistics.transitions(distance), table, rtol=1e-6)


def test_an_observation_counts_half_after_the_half_life():
    statistics = RoutingStatistics(StatisticsSpec(1, 4, 1, half_life=100, max_distance=0))
    statistics.update(np.array([[[3]]]))
    statistics.update(np.zeros((1, 100, 1), np.int64))
    assert statistics.load()[0, 3] == pytest.approx(0.5)


def test_rescaling_after_many_half_lives_changes_nothing_else():
    often, rarely = (RoutingStatistics(StatisticsSpec(LAYERS, EXPERTS, TOP_K, half_life=life)) for life in (1, 2))
    for step in range(60):
        often.update(routing(1, step))
        rarely.update(routing(2, step)[:, :1])
    assert np.isfinite(often.load()).all()
    # Every token doubles the weight: the sum is a geometric series.
    assert often.load().sum(axis=1) == pytest.approx([2 * TOP_K] * LAYERS, rel=1e-5)


def test_a_long_step_is_sampled_for_pairs_without_bias_in_their_sum():
    statistics = RoutingStatistics(StatisticsSpec(LAYERS, EXPERTS, TOP_K, half_life=10**12, max_rows_per_step=10))
    statistics.update(routing(1000))
    assert statistics.load().sum(axis=1) == pytest.approx([1000 * TOP_K] * LAYERS)
    assert statistics.transitions(2).sum(axis=(1, 2)) == pytest.approx([1000 * TOP_K**2] * (LAYERS - 2))
    assert statistics.recent().shape == (LAYERS, 10, TOP_K)


def test_recent_routing_is_a_ring_of_whole_tokens():
    statistics = RoutingStatistics(SPEC)
    steps = [routing(7, seed) for seed in range(4)]
    for step in steps:
        statistics.update(step)
    last = np.concatenate(steps, axis=1)[:, -16:]
    kept = statistics.recent()
    assert sorted(map(bytes, kept.transpose(1, 0, 2).copy())) == sorted(
        map(bytes, last.astype(np.uint16).transpose(1, 0, 2).copy())
    )


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=12), max_size=30))
@examples(0.5)
def test_the_table_of_first_experts_is_bounded_and_knows_the_last_step(steps):
    statistics = RoutingStatistics(SPEC)
    for seed, tokens in enumerate(steps):
        step = routing(len(tokens), seed)
        statistics.update(step, np.array(tokens))
        for token in set(tokens[: SPEC.num_tokens]):
            counts = statistics.first_experts(token)
            assert counts is not None
            assert all(counts[step[0, tokens.index(token)]] > 0)
    assert sum(statistics.first_experts(token) is not None for token in range(31)) <= SPEC.num_tokens


def test_a_frequent_token_outlives_rare_ones():
    statistics = RoutingStatistics(SPEC)
    for step in range(50):
        statistics.update(routing(3, step), np.array([7, 100 + step, 7]))
    counts = statistics.first_experts(7)
    assert counts is not None
    assert counts.sum() == pytest.approx(100 * TOP_K, rel=0.01)


@pytest.mark.parametrize(
    ("ids", "tokens"),
    [
        (np.zeros((3, 2, TOP_K), np.int64), None),
        (np.zeros((LAYERS, 2, 3), np.int64), None),
        (np.full((LAYERS, 2, TOP_K), EXPERTS), None),
        (np.full((LAYERS, 2, TOP_K), -2), None),
        (routing(2), np.array([1])),
    ],
)
def test_a_step_that_does_not_fit_is_refused_and_changes_nothing(ids, tokens):
    statistics = gathered()
    before = statistics.tables()
    with pytest.raises(ValueError, match=r"expected|outside"):
        statistics.update(ids, tokens)
    assert all((statistics.tables()[name] == table).all() for name, table in before.items())


def test_an_empty_step_changes_nothing():
    statistics = gathered()
    before = statistics.load()
    statistics.update(np.zeros((LAYERS, 0, TOP_K), np.int64), np.zeros(0, np.int64))
    assert (statistics.load() == before).all()


def test_a_saved_file_loads_to_the_same_statistics_that_go_on_counting(tmp_path):
    statistics = gathered(9)
    save_statistics(tmp_path / "statistics.safetensors", statistics, KEY)
    loaded = load_statistics(tmp_path / "statistics.safetensors", KEY)
    assert loaded.spec == statistics.spec
    for _ in range(2):
        tables = loaded.tables()
        for name, table in statistics.tables().items():
            if name not in ("token_ids", "token_counts", "recent"):
                np.testing.assert_allclose(tables[name], table, rtol=1e-5)
        for token in range(20):
            np.testing.assert_allclose(
                *(np.array(found.first_experts(token), np.float32) for found in (loaded, statistics)), rtol=1e-5
            )
        for found in (statistics, loaded):
            found.update(routing(3, 99), np.array([1, 2, 3]))
    assert [path.name for path in tmp_path.iterdir()] == ["statistics.safetensors"]


def test_the_key_depends_on_values_and_not_on_their_order():
    assert model_key({"a": 1, "b": [2]}) == model_key({"b": [2], "a": 1}) != model_key({"a": 1, "b": [3]})


def test_a_file_that_cannot_serve_is_one_sentence(tmp_path):
    path = tmp_path / "statistics.safetensors"
    with pytest.raises(StatisticsError, match="There is no statistics file"):
        load_statistics(path, KEY)
    save_statistics(path, gathered(), KEY)
    with pytest.raises(StatisticsError, match="another model"):
        load_statistics(path, model_key({"model_type": "olmoe"}))
    whole = path.read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(StatisticsError, match="torn or is none"):
            load_statistics(path, KEY)
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(StatisticsError, match="checksum"):
        load_statistics(path, KEY)


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "statistics.safetensors"
    save_statistics(path, gathered(), KEY)
    before = path.read_bytes()
    with pytest.raises(AttributeError):
        save_statistics(path, None, KEY)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
