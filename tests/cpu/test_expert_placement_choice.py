"""Placements by name: each one's parameters, and refusals in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.experts.synthetic_traces import SyntheticSpec, synthetic_trace
from experts.placement.placement import PlacementError, refilled
from experts.placement.search import LEARNT, PLAIN, choose_placement
from experts.routing.choices import RoutingStatistics, StatisticsSpec
from experts.routing.files import save_statistics
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.experts.settings import plan_placement, statistics_key
from moeserve.model.families import build_spec, load_config

SIZES = (3, 8, 4)


def gathered(num_layers: int = 3, num_experts: int = 8) -> RoutingStatistics:
    trace = synthetic_trace(SyntheticSpec(num_layers, num_experts, 2, popularity=0.8), 8, 40, seed=0)
    statistics = RoutingStatistics(StatisticsSpec(num_layers, num_experts, 2))
    statistics.update(trace.ids)
    return statistics


@pytest.mark.parametrize("num_redundant", [0, 4])
@pytest.mark.parametrize("name", [*PLAIN, *LEARNT])
def test_every_name_gives_a_placement_of_the_sizes_asked_for(name: str, num_redundant: int) -> None:
    statistics = gathered()
    placement = choose_placement(name, SIZES, num_redundant=num_redundant, statistics=statistics)
    assert (placement.num_layers, placement.num_experts, placement.num_ranks) == SIZES
    assert [placement.slots_per_rank(layer) for layer in range(3)] == [(8 + num_redundant) // 4] * 3
    assert placement == choose_placement(name, SIZES, num_redundant=num_redundant, statistics=statistics)
    if num_redundant:
        busiest = np.argmax(statistics.load(), axis=1)
        assert all(len(placement.ranks[layer][expert]) > 1 for layer, expert in enumerate(busiest))


@pytest.mark.parametrize("name", LEARNT)
def test_what_is_learnt_needs_statistics_of_the_same_sizes_that_are_not_empty(name: str) -> None:
    with pytest.raises(PlacementError, match="there are none"):
        choose_placement(name, SIZES)
    with pytest.raises(PlacementError, match="of 2 layers with 8 experts, but the model has 3 with 8"):
        choose_placement(name, SIZES, statistics=gathered(num_layers=2))
    with pytest.raises(PlacementError, match="these are empty"):
        choose_placement(name, SIZES, statistics=RoutingStatistics(StatisticsSpec(3, 8, 2)))


def test_replicas_go_anywhere_where_nothing_is_known() -> None:
    placement = choose_placement("contiguous", SIZES, num_redundant=4)
    assert sum(map(len, placement.ranks[0])) == 12


def test_who_stays_on_a_rank_keeps_its_slot() -> None:
    assert refilled((4, 1, 7, 2), {1, 2, 9, 3}) == (3, 1, 9, 2)
    assert refilled((4, 1), {1, 4}) == (4, 1)


def model(folder: Path, **changes: object) -> Path:
    """A folder with the configuration of a model with 3 layers of experts."""
    config = {
        "model_type": "mixtral",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def plan(folder: Path, **settings: object) -> object:
    config = ServeConfig(expert_parallel_size=4, **settings)  # type: ignore[arg-type]
    return plan_placement(folder, build_spec(load_config(folder)), config)


@pytest.mark.slow
def test_a_service_learns_from_the_file_of_its_own_model_only(tmp_path: Path) -> None:
    folder, file = model(tmp_path / "m"), tmp_path / "statistics.safetensors"
    named = {"expert_statistics": str(file)}
    with pytest.raises(ConfigError, match="There is no statistics file"):
        plan(folder, placement="balanced", **named)
    assert plan(folder, **named) == choose_placement("contiguous", SIZES)
    save_statistics(file, gathered(), statistics_key(folder))
    expected = choose_placement("balanced", SIZES, num_redundant=4, statistics=gathered())
    assert plan(folder, placement="balanced", num_redundant_experts=4, **named) == expected
    model(tmp_path / "m", rms_norm_eps=1e-4)
    for name in (*PLAIN, *LEARNT):
        with pytest.raises(ConfigError, match="another model"):
            plan(folder, placement=name, **named)


def test_experts_that_cannot_be_shared_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"6 experts .* 4 ranks"):
        plan(model(tmp_path / "m", num_local_experts=6))
    with pytest.raises(ConfigError, match=r"3 redundant experts .* 4 ranks"):
        plan(model(tmp_path / "m"), num_redundant_experts=3)


def test_balanced_keeps_groups_of_experts_within_a_node() -> None:
    statistics = gathered()
    placement = choose_placement("balanced", SIZES, num_nodes=2, num_groups=4, statistics=statistics)
    for layer in placement.ranks:
        nodes = [{rank // 2 for rank in ranks} for ranks in layer]
        assert all(nodes[2 * group] == nodes[2 * group + 1] for group in range(4))
