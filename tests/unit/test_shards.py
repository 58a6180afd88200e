"""Shards of every layer: how matrices are cut, what cannot be, and the settings that do not go together with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import pytest

from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.ranks.settings import check_tensor
from moeserve.engine.ranks.together import StepRows
from moeserve.model.families import build_spec, load_config
from moeserve.model.shards import Cut, Shard, check_shards, layer_cuts, outer_cuts, sharded
from moeserve.model.spec import DecoderSpec, UnsupportedModel

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_position_embeddings": 128,
}
NEXT = {
    **QWEN3,
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


def spec_of(config: dict[str, object]) -> DecoderSpec:
    folder = Path(mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return build_spec(load_config(folder))


@pytest.mark.parametrize(("config", "count"), [(QWEN3, 2), (NEXT, 2), (NEXT, 4), (NEXT, 3)])
def test_the_shards_of_a_matrix_are_all_of_it_and_no_row_or_column_is_in_two(config: dict, count: int) -> None:  # type: ignore[type-arg]
    spec, whole = spec_of(config), dict[tuple[int, str], list[int]]()
    sizes: dict[tuple[int, str], int] = {}
    for number in range(count):
        for layer in range(spec.num_layers):
            for key, cut in layer_cuts(spec, layer, Shard(number, count)).items():
                if cut is None or key.partition(".")[0] in "kv":
                    continue
                whole.setdefault((layer, key), []).extend(place for part in cut.ranges for place in part)
                sizes[layer, key] = cut.size
    assert {key: sorted(places) for key, places in whole.items()} == {
        key: list(range(size)) for key, size in sizes.items()
    }
    embedding = [outer_cuts(spec, Shard(number, count))["embedding"] for number in range(count)]
    assert [place for cut in embedding if cut for part in cut.ranges for place in part] == list(range(101))


def test_the_bias_of_a_sum_is_in_the_first_part_alone() -> None:
    first, second = (layer_cuts(spec_of(QWEN3), 0, Shard(number, 2)) for number in range(2))
    assert "o.bias" not in first
    assert (second["o.bias"], second["down.bias"]) == (None, None)


def test_all_ranks_give_equally_many_logits_where_the_vocabulary_is_odd() -> None:
    parts = [Shard(number, 4).of_equal(101) for number in range(4)]
    assert {len(part) for part in parts} == {26}
    assert {place for part in parts for place in part} == set(range(101))


def test_ranks_share_a_kv_head_where_there_are_fewer_than_ranks() -> None:
    spec = spec_of(QWEN3)
    assert [Shard(number, 4).kv_heads(2) for number in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert sharded(spec, Shard(3, 4)).kv_layers[0].num_heads == 1
    assert sharded(spec, Shard(0, 2)).kv_layers[0].num_heads == 1


def test_heads_that_do_not_come_out_even_stay_with_their_kv_heads() -> None:
    spec = spec_of({**QWEN3, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 97})
    check_shards(spec, 2)
    parts = [sharded(spec, Shard(number, 2)) for number in range(2)]
    assert [(part.kv_layers[0].num_heads, part.attention.num_heads) for part in parts] == [(1, 3), (2, 6)]
    assert [part.intermediate_size for part in parts] == [48, 49]


def test_values_of_recurrent_layers_are_cut_behind_queries_and_keys() -> None:
    cut = layer_cuts(spec_of(NEXT), 0, Shard(1, 2))["conv"]
    # Queries of 4 x 24 channels, as many keys, and 8 x 16 values.
    assert cut == Cut(0, 320, (range(48, 96), range(144, 192), range(256, 320)))


@pytest.mark.parametrize(
    ("changes", "count", "named"),
    [
        ({}, 3, "2 KV heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 8, "3 KV heads"),
        ({"intermediate_size": 3}, 4, "3 channels of dense blocks"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_by_name(changes: dict[str, int], count: int, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"--tensor-parallel-size {count}: {named} of this qwen3 model"):
        check_shards(spec_of({**QWEN3, **changes}), count)


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline_parallel_size": 2, "expert_parallel_size": 2},
        {"pipeline_parallel_size": 2, "device": "cuda"},
        {"kv_transfer_config": "{}"},
        {"device": "cuda", "expert_parallel_size": 2},
        {"speculative_config": '{"method": "mtp"}'},
        {"num_redundant_experts": 2},
        {"rebalance_interval": 100},
    ],
)
def test_settings_that_do_not_go_together_with_shards_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        check_tensor(replace(ServeConfig(tensor_parallel_size=2), **changes))  # type: ignore[arg-type]
    check_tensor(replace(ServeConfig(), **changes))  # type: ignore[arg-type]


def test_the_first_rank_of_a_group_brings_its_rows_to_their_experts() -> None:
    rows = StepRows([5, 0], [1, 0], only_decodes=False)
    assert rows.of_first_ranks(2) == StepRows([5, 0, 0, 0], [1, 0, 0, 0], only_decodes=False)
    assert rows.of_first_ranks(1) == rows


def test_two_groups_of_two_are_four_ranks() -> None:
    assert ServeConfig(tensor_parallel_size=2, expert_parallel_size=2, nnodes=2).num_ranks_here == 2
