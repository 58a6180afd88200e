"""Layers over ranks: every family has the bits of a single rank, whatever chunks, batch, cache and preemption do."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from benchmarks.token_engine import Completion, TokenEngine
from benchmarks.ways import MODELS
from moeserve.config import ConfigError
from moeserve.engine.assemble import load_rank
from moeserve.engine.memory_plan import check_stage, plan_model, read_spec
from moeserve.engine.ranks.settings import layers_of_ranks
from moeserve.engine.weight_bytes import stage_bytes, weights_bytes
from moeserve.frontend.beam_search import BeamParams
from moeserve.model.checkpoint import read_index
from moeserve.model.families import build_spec, load_config
from moeserve.model.kv_pool import kv_block_bytes
from moeserve.model.sizes import expected_index
from moeserve.model.spec import ModelError
from moeserve.model.stages import stages_of
from moeserve.plan import Chunk, SamplingParams, StepPlan
from tests.support.llm_prompts import BASE, GREEDY, PROMPTS, SAMPLINGS, assert_same, assert_same_cold_and_cached
from tests.support.model_searches import searched
from tests.support.staged_engine import StagedEngine
from tests.support.tiny_models import CASES, build, save

TWO = replace(BASE, pipeline_parallel_size=2)
# Stages with attention alone and with recurrent layers alone; a layer each.
SPLITS = {"qwen3_next-recurrent-end": "1,3", "gpt_oss": "1,1,1", "llama": "1,1,1"}


def split(case: str) -> dict[str, object]:
    layers = SPLITS.get(case)
    return {} if layers is None else {"layers_per_rank": layers, "pipeline_parallel_size": layers.count(",") + 1}


@pytest.mark.parametrize("case", [case for case in CASES if case != "gemma4_text-layer-inputs"])
def test_every_family_has_the_bits_of_one_rank(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    one = TokenEngine(tmp_path, replace(BASE, max_num_batched_tokens=64))
    expected = one.generate(PROMPTS[:6], SAMPLINGS[:6])
    staged = StagedEngine(tmp_path, replace(TWO, max_num_batched_tokens=48, max_num_seqs=5, **split(case)))  # type: ignore[arg-type]
    for _ in range(2):
        assert_same(staged.generate(PROMPTS[:6], SAMPLINGS[:6]), expected)
    staged.scheduler.check_idle()
    assert staged.executor.most_in_flight == len(staged.ranks)
    assert staged.scheduler.counters.prefix_hit_tokens > 0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("m")
    save("qwen3_moe", directory)
    return directory


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[Completion]:
    llm = TokenEngine(model_dir, replace(BASE, enable_prefix_caching=False))
    return [llm.generate([prompt], sampling)[0] for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]


def test_tiny_chunks_cold_and_cached_have_the_bits_of_one_rank(model_dir: Path, alone: list[Completion]) -> None:
    staged = StagedEngine(model_dir, replace(TWO, max_num_seqs=3, max_num_batched_tokens=5))
    assert_same_cold_and_cached(staged, alone)
    # Chunks of one prompt follow each other through the ranks.
    assert staged.executor.most_of_request == 2


def random_config(random: Random, case: str, folder: Path) -> dict[str, object]:
    """Settings under which chunks, batches, preemptions, drafts and cached prefixes differ."""
    block_bytes = kv_block_bytes(build_spec(load_config(folder)).kv_layers, BASE.block_size, torch.float32)
    return {
        "max_num_seqs": random.choice((1, 2, 3, 5, 9)),
        "max_num_batched_tokens": random.choice((9, 16, 40, 256)),
        # Little more than a longest request needs, or more, of which each rank gives its part.
        "kv_cache_memory": random.choice((30, 50, 600)) * block_bytes // (SPLITS.get(case, "1,1").count(",") + 1),
        "max_model_len": 92,
        "speculative_config": random.choice(("none", "suffix", "ngram")),
        "enable_prefix_caching": random.random() < 0.8,
        **split(case),
    }


def check_random_batches(case: str, folder: Path, num_engines: int, num_batches: int) -> None:
    """Batches of prompts that share beginnings, again and again, have the bits of each prompt computed alone."""
    save(case, folder)
    random = Random(case)
    alone = TokenEngine(folder, replace(BASE, enable_prefix_caching=False))
    kept: dict[int, Completion] = {}
    num_preempted = 0
    for _ in range(num_engines):
        staged = StagedEngine(folder, replace(TWO, **random_config(random, case, folder)))  # type: ignore[arg-type]
        for _ in range(num_batches):
            places = random.sample(range(len(PROMPTS)), random.randint(1, 7))
            found = staged.generate([PROMPTS[n] for n in places], [SAMPLINGS[n] for n in places])
            for n in places:
                if n not in kept:
                    (kept[n],) = alone.generate([PROMPTS[n]], SAMPLINGS[n])
            assert_same(found, [kept[n] for n in places])
        staged.scheduler.check_idle()
        num_preempted += staged.scheduler.counters.preemptions
        staged.close()
    # Where layers have window blocks, requests that are admitted have room to go on.
    assert num_preempted > 0 or num_engines < 20 or case == "gpt_oss"


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3_next", "gpt_oss", "qwen3"])
def test_random_batches_have_the_bits_of_one_rank(case: str, tmp_path: Path) -> None:
    check_random_batches(case, tmp_path, num_engines=2, num_batches=4)


@pytest.mark.long
@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3_next", "gpt_oss", "qwen3", "deepseek_v3-yarn"])
def test_a_thousand_random_batches_have_the_bits_of_one_rank(case: str, tmp_path: Path) -> None:
    check_random_batches(case, tmp_path, num_engines=25, num_batches=8)


def test_beams_have_the_answers_of_one_rank(model_dir: Path) -> None:
    sampling, beams = SamplingParams(max_tokens=6), BeamParams(3, 2, logprobs=2)
    expected = searched(TokenEngine(model_dir, BASE), PROMPTS[:3], sampling, beams)
    staged = StagedEngine(model_dir, replace(TWO, max_num_batched_tokens=64))
    assert searched(staged, PROMPTS[:3], sampling, beams) == expected


def test_one_request_has_one_step_in_flight_and_two_have_two(model_dir: Path) -> None:
    for num_requests in (1, 2):
        staged = StagedEngine(model_dir, replace(TWO, enable_prefix_caching=False))
        staged.generate([prompt[:3] for prompt in PROMPTS[:num_requests]], GREEDY)
        assert staged.executor.most_in_flight == num_requests


@pytest.mark.parametrize("layers", ["1,2", "2,1", "1,1,1"])
def test_the_recorded_choices_of_experts_are_those_of_one_rank(model_dir: Path, layers: str) -> None:
    # Its second layer has no experts, so a rank may record nothing; its last one computes the rows that need logits.
    config = replace(TWO, layers_per_rank=layers, pipeline_parallel_size=layers.count(",") + 1)
    one = load_rank(model_dir, plan_model(model_dir, BASE), BASE, lambda _: None).start()
    staged = StagedEngine(model_dir, config)
    for step, (start, stop) in enumerate([(0, 9), (9, 10)], 1):
        chunk = Chunk("a", array("i", PROMPTS[0][start:stop]), start, array("i", range(4)), GREEDY)
        plan = StepPlan(step, [chunk])
        (found,) = staged.executor.launch([plan]).result()
        expected = one.runner.launch(plan).result()
        assert found.chunks == expected.chunks
        assert bytes(found.routing) == bytes(expected.routing) != b""


def test_a_stage_that_does_not_fit_into_the_memory_of_its_own_machine_is_refused(model_dir: Path) -> None:
    config = replace(TWO, layers_per_rank="1,2")
    plan = plan_model(model_dir, config)
    staged = StagedEngine(model_dir, config)
    needed = [
        sum(tensor.nbytes for tensors in rank.block_tensors().values() for tensor in tensors) for rank in staged.ranks
    ]
    for rank, kv_bytes in enumerate(needed):
        check_stage(model_dir, plan, config, rank, kv_bytes + plan.weights_bytes)
        with pytest.raises(ModelError, match="are free here"):
            check_stage(model_dir, plan, config, rank, kv_bytes)
    # The parts are the parts of the whole, but for the norm at the border.
    whole = stages_of([1, 2])
    spec, dtype = read_spec(model_dir, config)
    parts = stage_bytes(spec, dtype, read_index(model_dir), whole)
    assert sum(parts) == plan.weights_bytes + spec.hidden_size * dtype.itemsize


def test_layers_that_share_a_choice_of_positions_are_on_one_rank(tmp_path: Path) -> None:
    kinds = ["full", "shared", "shared", "shared", "full"]
    model = build("glm_moe_dsa", num_hidden_layers=5, indexer_types=kinds, mlp_layer_types=["sparse"] * 5)
    model.save_pretrained(tmp_path)
    assert plan_model(tmp_path, TWO).layers == (4, 1)
    with pytest.raises(ConfigError, match="3 is more than the 2 parts of the layers that ranks can share"):
        plan_model(tmp_path, replace(TWO, pipeline_parallel_size=3))


def test_node_0_needs_a_layer_of_each_kind_by_which_it_divides_memory(tmp_path: Path) -> None:
    save("qwen3_next-recurrent-end", tmp_path)
    config = replace(TWO, nnodes=2, layers_per_rank="1,3")
    with pytest.raises(ConfigError, match=r"node 0, 1, .* attention and one with recurrent states"):
        plan_model(tmp_path, config)
    # A recurrent layer, and then one with attention.
    save("qwen3_5_text", tmp_path)
    with pytest.raises(ConfigError, match=r"node 0, 1, .* attention and one with recurrent states"):
        plan_model(tmp_path, config)
    assert plan_model(tmp_path, replace(config, layers_per_rank="2,2")).kv.num_state_rows > 0


def test_memory_for_snapshots_is_that_of_each_rank(tmp_path: Path) -> None:
    save("qwen3_5_text", tmp_path)
    one, two = (plan_model(tmp_path, replace(config, state_cache_memory=2**20)).kv for config in (BASE, TWO))
    # Half of each state is on each rank.
    assert two.num_snapshots // 2 == one.num_snapshots > 0


def test_two_ranks_hold_little_more_than_half_of_qwen3_30b_a3b_each(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-30B-A3B"]))
    spec = build_spec(load_config(tmp_path))
    for num_layers in (4, 48):
        cut = replace(spec, sparse_layers=spec.sparse_layers[:num_layers], windows=spec.windows[:num_layers])
        index = expected_index(cut, "BF16")
        sizes = stage_bytes(cut, torch.float32, index, stages_of([1] * num_layers))
        stages = stages_of(layers_of_ranks(TWO, sizes))
        assert max(stage_bytes(cut, torch.float32, index, stages)) <= 0.55 * weights_bytes(cut, torch.float32, index)
