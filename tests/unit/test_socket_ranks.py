"""Machines with several NUMA nodes, made up: which services get a rank on each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.socket_ranks import rank_per_node
from moeserve.config import ServeConfig
from moeserve.engine.ranks.cores import own_cores
from moeserve.machine import num_usable_nodes, numa_nodes

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 128,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_each_node_gets_a_rank_with_its_cores_and_its_part_of_the_layers(model: Path) -> None:
    config = rank_per_node(ServeConfig(), model, 2)
    assert config == ServeConfig(pipeline_parallel_size=2)
    nodes = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert [own_cores(rank, 2, 8, range(16), nodes) for rank in range(2)] == nodes


def test_on_one_node_nothing_changes(model: Path) -> None:
    config = ServeConfig()
    assert rank_per_node(config, model, 1) is config


@pytest.mark.parametrize(
    "settings",
    [
        {"expert_parallel_size": 2},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 3},
        {"nnodes": 2},
        {"threads": 8},
        {"bind_cores": False},
        {"expert_memory": 2**30},
        {"engine_timeout": 1.0},
        {"kv_transfer_config": "{}"},
        {"speculative_config": "mtp"},
        {"model_impl": "transformers"},
    ],
)
def test_settings_that_say_otherwise_stay(model: Path, settings: dict[str, Any]) -> None:
    config = ServeConfig(**settings)
    assert rank_per_node(config, model, 2) is config


def test_a_model_whose_layers_cannot_be_shared_has_one_rank(model: Path) -> None:
    config = ServeConfig()
    assert rank_per_node(config, model, 4) is config
    (model / "config.json").write_text(json.dumps(LLAMA | {"model_type": "gpt2"}))
    assert rank_per_node(config, model, 2) is config
    assert rank_per_node(config, model / "absent", 2) is config


def test_a_model_with_inputs_of_each_layer_has_one_rank(model: Path) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 5}
    gemma = LLAMA | kinds | {"model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 16}
    config, path = ServeConfig(), model / "config.json"
    path.write_text(json.dumps(gemma | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 99}))
    assert rank_per_node(config, model, 2) is config
    path.write_text(json.dumps(gemma | {"hidden_size_per_layer_input": 0}))
    assert rank_per_node(config, model, 2).pipeline_parallel_size == 2


def test_nodes_without_cores_for_this_process_do_not_count(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    for number, cores in enumerate((",".join(map(str, usable)), "9998-9999", "")):
        folder = tmp_path / f"node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cores}\n")
    assert len(numa_nodes(tmp_path)) == 2
    assert num_usable_nodes(numa_nodes(tmp_path)) == 1
    assert num_usable_nodes([]) == 1
