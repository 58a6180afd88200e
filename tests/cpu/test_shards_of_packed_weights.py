"""Shards of quantised weights: cut at the borders of blocks, and the logits of one rank; else refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from benchmarks.token_engine import TokenEngine
from kernels.cpu.library import native_kernels
from moeserve.config import ServeConfig
from moeserve.engine.memory_plan import plan_model
from moeserve.model.gguf.folder import gguf_folder
from moeserve.model.spec import CheckpointError
from moeserve.plan import SamplingParams
from tests.cpu.test_shards import assert_close
from tests.support.gguf_export import ARCHITECTURES, write_gguf
from tests.support.llm_prompts import BASE, PROMPTS, assert_same
from tests.support.quantised_files import Quantise, awq, compressed, deepseek, gptq, quantise_checkpoint
from tests.support.sharded_engine import ShardedEngine
from tests.support.tiny_models import build, save

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels.")
# Weights are the same in one rank and in two; rows are not rounded, as two ranks round other blocks of them.
ONE = replace(BASE, arithmetic="exact", enable_prefix_caching=False)
TWO = replace(ONE, tensor_parallel_size=2)
SAMPLING = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
LAYOUTS: dict[str, tuple[dict[str, Any], Quantise]] = {
    "gptq-4": gptq(4, 32),
    "gptq-8": gptq(8, 32),
    "awq": awq(32),
    "codes": compressed("int-quantized", 8, 32, symmetric=False),
    "fp8": deepseek(32, 32),
}
WIDE: dict[str, Any] = {
    "shared_expert_intermediate_size": 64,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
    "hidden_size": 128,
}


def compare(folder: Path, one: ServeConfig = ONE, two: ServeConfig = TWO) -> None:
    """Two ranks have the logits of one, and the same bits alone and together in small chunks."""
    engine = TokenEngine(folder, one)
    expected = [engine.generate([prompt], SAMPLING)[0] for prompt in PROMPTS[:3]]
    sharded = ShardedEngine(folder, two)
    alone = [sharded.generate([prompt], SAMPLING)[0] for prompt in PROMPTS[:3]]
    assert_close(alone, expected)
    many = ShardedEngine(folder, replace(two, max_num_batched_tokens=24, max_num_seqs=5, enable_prefix_caching=True))
    for _ in range(2):
        assert_same(many.generate(PROMPTS[:3], SAMPLING), alone)
    sharded.close()
    many.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantised_checkpoints_have_the_logits_of_one_rank(layout: str, tmp_path: Path) -> None:
    model = build("qwen2_moe", **WIDE)
    model.save_pretrained(tmp_path)
    quantise_checkpoint(tmp_path, *LAYOUTS[layout])
    compare(tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe", "gpt-oss"])
def test_gguf_files_have_the_logits_of_one_rank(architecture: str, tmp_path: Path) -> None:
    case, fields = ARCHITECTURES[architecture]
    model = build(case, **fields)
    write_gguf(tmp_path / "m.gguf", architecture, model, lambda name, values: Kind.Q8_0)
    compare(gguf_folder(tmp_path / "m.gguf", tmp_path / "cache"))


@pytest.mark.parametrize("width", ["int8", "int4"])
def test_weights_that_are_rounded_at_load_have_nearly_the_logits_of_one_rank(width: str, tmp_path: Path) -> None:
    model = build("qwen2_moe", **WIDE)
    model.save_pretrained(tmp_path)
    compare(tmp_path, replace(ONE, quantization=width), replace(TWO, quantization=width))


def test_columns_that_are_no_whole_blocks_are_refused_by_name(tmp_path: Path) -> None:
    model = build("qwen2_moe", **{**WIDE, "shared_expert_intermediate_size": 96})
    model.save_pretrained(tmp_path)
    quantise_checkpoint(tmp_path, *LAYOUTS["gptq-4"])
    with pytest.raises(CheckpointError, match=r"shared_expert.down_proj.* cannot be shared .* whole blocks of 32"):
        plan_model(tmp_path, TWO)


def test_columns_in_an_order_of_their_own_are_refused_by_name(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    quantise_checkpoint(tmp_path, *gptq(4, 32, desc_act=True))
    with pytest.raises(CheckpointError, match=r"o_proj.* in the order of the file"):
        plan_model(tmp_path, TWO)
