"""Shards of every layer over ranks: logits as of one rank, and one set of bits whatever chunks, batch and cache do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from benchmarks.token_engine import Completion, TokenEngine
from benchmarks.ways import MODELS
from experts.placement.placement import contiguous
from moeserve.engine.memory_plan import check_shard, plan_model
from moeserve.engine.weight_bytes import shard_bytes, weights_bytes
from moeserve.model.checkpoint import read_index
from moeserve.model.families import build_spec, load_config
from moeserve.model.kv_pool import kv_block_bytes
from moeserve.model.sizes import expected_index
from moeserve.model.spec import ModelError, UnsupportedModel
from moeserve.plan import SamplingParams
from tests.support.llm_prompts import BASE, PROMPTS, SAMPLINGS, assert_same
from tests.support.sharded_engine import ShardedEngine
from tests.support.slot_bytes import slots_on_cpu
from tests.support.tiny_models import CASES, build, save

UNSHARED = ("gemma4", "nemotron_h", "granitemoehybrid", "lfm2_moe")
TWO = replace(BASE, tensor_parallel_size=2)


def assert_close(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith(UNSHARED)])
def test_every_family_has_the_logits_of_one_rank_and_its_own_bits_in_any_batch(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    one = TokenEngine(tmp_path, replace(BASE, enable_prefix_caching=False))
    sharded = ShardedEngine(tmp_path, replace(TWO, enable_prefix_caching=False))
    pairs = list(zip(PROMPTS[:6], SAMPLINGS[:6], strict=True))
    expected = [one.generate([prompt], sampling)[0] for prompt, sampling in pairs]
    alone = [sharded.generate([prompt], sampling)[0] for prompt, sampling in pairs]
    assert_close(alone, expected)
    many = ShardedEngine(tmp_path, replace(TWO, max_num_batched_tokens=24, max_num_seqs=5))
    for _ in range(2):
        assert_same(many.generate(PROMPTS[:6], SAMPLINGS[:6]), alone)
    many.scheduler.check_idle()
    assert many.scheduler.counters.prefix_hit_tokens > 0
    for engine in (sharded, many):
        engine.close()


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3_next", "gpt_oss", "qwen3", "llama", "deepseek_v3-yarn"])
def test_random_batches_have_the_bits_of_each_prompt_alone(case: str, tmp_path: Path) -> None:
    """Batches of prompts that share beginnings, with little memory, drafts and cached prefixes."""
    save(case, tmp_path)
    random, kept = Random(case), dict[int, Completion]()
    alone = ShardedEngine(tmp_path, replace(TWO, enable_prefix_caching=False))
    block_bytes = kv_block_bytes(build_spec(load_config(tmp_path)).kv_layers, BASE.block_size, torch.float32)
    for _ in range(2):
        config = replace(
            TWO,
            max_num_seqs=random.choice((2, 3, 5, 9)),
            max_num_batched_tokens=random.choice((9, 16, 40, 256)),
            # On each of two ranks; little more than a longest request needs.
            kv_cache_memory=random.choice((30, 50)) * block_bytes // 2,
            max_model_len=92,
            speculative_config=random.choice(("none", "suffix", "ngram")),
        )
        sharded = ShardedEngine(tmp_path, config)
        for _ in range(3):
            places = random.sample(range(len(PROMPTS)), random.randint(2, 7))
            found = sharded.generate([PROMPTS[n] for n in places], [SAMPLINGS[n] for n in places])
            for n in places:
                if n not in kept:
                    (kept[n],) = alone.generate([PROMPTS[n]], SAMPLINGS[n])
            assert_same(found, [kept[n] for n in places])
        sharded.scheduler.check_idle()
        sharded.close()
    alone.close()


def test_norms_over_all_heads_need_equally_many_on_each_rank(tmp_path: Path) -> None:
    build("olmoe", num_attention_heads=3, num_key_value_heads=3, head_dim=24).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="3 KV heads of this olmoe model cannot be shared equally"):
        plan_model(tmp_path, TWO)


@pytest.mark.parametrize(
    ("case", "count", "fields"),
    [
        ("qwen3", 4, {}),
        ("llama", 2, {"num_key_value_heads": 1, "vocab_size": 129, "tie_word_embeddings": True}),
        ("olmoe", 2, {"num_key_value_heads": 1}),
        ("phimoe", 4, {"num_key_value_heads": 1, "vocab_size": 131}),
        ("qwen3", 2, {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 97}),
        ("gpt_oss", 2, {"num_attention_heads": 6, "num_key_value_heads": 3}),
        ("mixtral-mha-odd", 3, {"num_local_experts": 9}),
        ("qwen2_moe", 2, {"shared_expert_intermediate_size": 49}),
        ("deepseek_v3-yarn", 2, {"num_attention_heads": 3, "num_key_value_heads": 3, "moe_intermediate_size": 33}),
        ("qwen3_next", 2, {"linear_num_key_heads": 3}),
    ],
)
def test_ranks_share_kv_heads_and_parts_that_do_not_come_out_even(
    case: str, count: int, fields: dict[str, int], tmp_path: Path
) -> None:
    build(case, **fields).save_pretrained(tmp_path)
    one = TokenEngine(tmp_path, BASE)
    sharded = ShardedEngine(tmp_path, replace(BASE, tensor_parallel_size=count, max_num_batched_tokens=64))
    alone = [sharded.generate([prompt], sampling)[0] for prompt, sampling in zip(PROMPTS[:4], SAMPLINGS, strict=False)]
    assert_close(alone, one.generate(PROMPTS[:4], SAMPLINGS[:4]))
    assert_same(sharded.generate(PROMPTS[:4], SAMPLINGS[:4]), alone)
    sharded.close()


def test_logprobs_of_prompts_are_those_of_one_rank(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path)
    one, sharded = TokenEngine(tmp_path, BASE), ShardedEngine(tmp_path, replace(TWO, max_num_batched_tokens=64))
    probed = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, prompt_logprobs=1)
    assert_close(sharded.generate(PROMPTS[:3], probed), one.generate(PROMPTS[:3], probed))
    sharded.close()


@pytest.mark.parametrize("prefetch", ["off", "gate"])
def test_few_slots_for_the_experts_of_each_rank_change_no_bit(prefetch: str, tmp_path: Path) -> None:
    model, store = tmp_path / "m", tmp_path / "s"
    save("qwen3_moe", model)
    whole = ShardedEngine(model, TWO)
    size = slots_on_cpu(model, 3)
    few = ShardedEngine(
        model, replace(TWO, expert_memory=size, expert_store_dir=str(store), expert_prefetch=prefetch, threads=1)
    )
    assert_same(few.generate(PROMPTS[:6], SAMPLINGS[:6]), whole.generate(PROMPTS[:6], SAMPLINGS[:6]))
    for rank in few.ranks:
        assert rank.memory is not None
        assert rank.memory.stats().counters.num_evictions > 0
    for engine in (whole, few):
        engine.close()


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3_next", "deepseek_v3-yarn"])
def test_the_plan_counts_what_ranks_hold(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    plan, spec = plan_model(tmp_path, TWO), build_spec(load_config(tmp_path))
    sharded = ShardedEngine(tmp_path, TWO)
    held = [sum(part.nbytes for parts in rank.block_tensors().values() for part in parts) for rank in sharded.ranks]
    assert held[0] == held[1]
    # The latents of latent attention are whole on each rank.
    share = 1 if case.startswith("deepseek") else 2
    kv = plan.kv.num_blocks * kv_block_bytes(spec.kv_layers, BASE.block_size, torch.float32)
    states = 0 if not spec.state_layers else plan.kv.num_state_rows * sharded.ranks[0].model.state_row_bytes
    assert sum(held) * share == 2 * (kv + states)
    sizes = shard_bytes(spec, torch.float32, read_index(tmp_path), plan.placement, 2)
    assert sum(sizes) == plan.weights_bytes
    # Another node looks at its own memory.
    for rank, size in enumerate(sizes):
        check_shard(tmp_path, plan, TWO, rank, size + held[rank])
        with pytest.raises(ModelError, match=f"The part of rank {rank}, with its KV memory, takes .* are free here"):
            check_shard(tmp_path, plan, TWO, rank, size + held[rank] - 1)
    sharded.close()


QWEN3 = MODELS["Qwen3-30B-A3B"]
LLAMA_8B = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}


@pytest.mark.parametrize(("config", "num_layers"), [(QWEN3, 4), (QWEN3, 48), (LLAMA_8B, 32)])
def test_two_ranks_hold_little_more_than_half_of_a_model_each(
    config: dict[str, object], num_layers: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = build_spec(load_config(tmp_path))
    cut = replace(spec, sparse_layers=spec.sparse_layers[:num_layers], windows=spec.windows[:num_layers])
    index, placement = expected_index(cut, "BF16"), None
    if cut.moe is not None:
        placement = contiguous(num_layers, cut.moe.num_experts, 2)
    sizes = shard_bytes(cut, torch.float32, index, placement, 2)
    assert max(sizes) <= 0.51 * weights_bytes(cut, torch.float32, index)
