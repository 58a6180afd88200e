"""Layers over ranks: how they are split, and the settings that do not go together with it."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from moeserve.config import ConfigError, ServeConfig, load_config
from moeserve.engine.ranks.settings import check_pipeline, layers_of_ranks
from moeserve.model.stages import Stage, split_layers, stages_of


def largest(sizes: list[int], counts: tuple[int, ...]) -> int:
    return max(sum(sizes[stage.first : stage.end]) for stage in stages_of(counts))


def test_no_other_split_has_a_smaller_largest_part() -> None:
    random = Random(1)
    for _ in range(200):
        sizes = [random.choice((0, 1, 3, 10, 50)) for _ in range(random.randint(1, 9))]
        num_ranks = random.randint(1, len(sizes))
        counts = split_layers(sizes, num_ranks)
        assert len(counts) == num_ranks
        assert min(counts) > 0
        assert sum(counts) == len(sizes)
        others = [
            tuple(end - first for first, end in zip((0, *cuts), (*cuts, len(sizes)), strict=True))
            for cuts in combinations(range(1, len(sizes)), num_ranks - 1)
        ]
        assert largest(sizes, counts) == min(largest(sizes, other) for other in others)


def test_equal_layers_are_shared_equally_and_the_odd_one_is_on_an_early_rank() -> None:
    assert split_layers([7] * 48, 4) == (12, 12, 12, 12)
    assert split_layers([7] * 5, 3) == (2, 2, 1)


def test_a_layer_that_needs_the_one_before_is_on_the_same_rank() -> None:
    assert split_layers([1] * 6, 3, joined=(1, 3, 5)) == (2, 2, 2)
    assert split_layers([1, 1, 1, 1, 9, 9], 2, joined=(5,)) == (4, 2)
    random = Random(2)
    for _ in range(100):
        sizes = [random.choice((0, 1, 3, 10, 50)) for _ in range(random.randint(2, 9))]
        joined = set(random.sample(range(1, len(sizes)), random.randint(0, len(sizes) - 1)))
        num_ranks = random.randint(1, len(sizes) - len(joined))
        stages = stages_of(split_layers(sizes, num_ranks, joined))
        assert len(stages) == num_ranks
        assert not joined & {stage.first for stage in stages}


def test_a_large_output_projection_takes_layers_off_the_last_rank() -> None:
    assert split_layers([10] * 7 + [30], 2) == (5, 3)


def test_stages_follow_each_other_and_the_ends_know_that_they_are_ends() -> None:
    stages = stages_of((2, 1, 3))
    assert stages == [Stage(0, 2, 6), Stage(2, 3, 6), Stage(3, 6, 6)]
    assert [(stage.is_first, stage.is_last) for stage in stages] == [(True, False), (False, False), (False, True)]


def pipeline(**changes: object) -> ServeConfig:
    return ServeConfig(pipeline_parallel_size=2, **changes)  # type: ignore[arg-type]


def test_the_layers_that_the_settings_name_are_taken() -> None:
    assert layers_of_ranks(pipeline(), [1, 1, 1, 9]) == (3, 1)
    assert layers_of_ranks(pipeline(layers_per_rank="1, 3"), [1, 1, 1, 9]) == (1, 3)


@pytest.mark.parametrize("layers", ["2,3", "4", "1,1,2"])
def test_numbers_of_layers_that_do_not_add_up_are_refused(layers: str) -> None:
    with pytest.raises(ConfigError, match=f"--layers-per-rank {layers} .* 4 layers"):
        layers_of_ranks(pipeline(layers_per_rank=layers), [1] * 4)


@pytest.mark.parametrize("layers", ["", "0,4", "2,two", "-1,5", "2,"])
def test_what_is_no_list_of_numbers_is_refused(layers: str) -> None:
    with pytest.raises(ConfigError):
        load_config({"layers_per_rank": layers}, {})


def test_more_ranks_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 2 .* 1 layers of the model"):
        layers_of_ranks(pipeline(), [1])
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 2 .* 1 parts of the layers that ranks can share"):
        layers_of_ranks(pipeline(), [1, 1], joined=[1])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"expert_parallel_size": 2, "rebalance_interval": 9.0}, "^--rebalance-interval "),
        ({"expert_parallel_size": 2, "nnodes": 4}, "4 nodes cannot have equally many of its stages"),
        ({"expert_memory": 2**30}, "^--expert-memory "),
        ({"expert_store_dir": "x"}, "^--expert-store-dir "),
        ({"kv_transfer_config": "{}"}, "^--kv-transfer-config "),
        ({"speculative_config": "mtp"}, "^--speculative-config mtp "),
        ({"device": "cuda", "expert_parallel_size": 2}, "^--pipeline-parallel-size with --expert-parallel-size "),
    ],
)
def test_what_is_not_built_for_layers_over_ranks_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_pipeline(pipeline(**changes))


def test_layers_per_rank_without_a_pipeline_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--layers-per-rank .*--pipeline-parallel-size"):
        check_pipeline(ServeConfig(layers_per_rank="2,2"))
