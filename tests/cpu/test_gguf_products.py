"""GGUF models compute from the blocks of their files: the same values, the same bits in any batch, fewer bytes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

import moeserve.device
from experts.errors import ExpertStoreError
from kernels.ops import CpuOps
from kernels.weight_formats import Q8_0, Arithmetic
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.memory_plan import plan_on_cpu, read_spec, rounding_of
from moeserve.engine.weight_bytes import weights_bytes
from moeserve.model.checkpoint import read_index
from moeserve.model.expert_store import ExpertPacker, layouts_in_store, stored_experts
from moeserve.model.families import build_spec, load_config
from moeserve.model.gguf.folder import gguf_folder
from moeserve.model.weights import load_decoder
from tests.support.gguf_export import write_gguf
from tests.support.llm_prompts import assert_same_alone_together_and_with_few_experts
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import build

_TOKENS = torch.randint(1, 128, (21,), generator=torch.Generator().manual_seed(2)).tolist()
BASE = ServeConfig(kv_cache_memory=2**20, max_num_seqs=4, max_model_len=64)
# As `Q4_K_M` files mix kinds: other ones for values than for queries, and for `down` of some layers.
_KINDS = {"attn_v": Kind.Q8_0, "attn_q": Kind.Q4_0, "attn_k": Kind.Q4_0, "attn_output": Kind.Q4_1}
_KINDS |= {"blk.0.ffn_down_exps": Kind.Q8_0, "ffn_down_exps": Kind.Q4_0, "ffn_gate_exps": Kind.Q4_1}
_KINDS |= {"ffn_up_exps": Kind.Q4_1, "token_embd": Kind.Q8_0, "output.weight": Kind.Q8_0, "ssm_out": Kind.Q4_0}


@pytest.fixture(scope="module", params=["llama", "qwen2moe", "qwen3next", "qwen35moe", "deepseek2", "gpt-oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tensors of many kinds."""
    fields = {
        "llama": ("mixtral", {}),
        "qwen2moe": ("qwen2_moe", {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 64}),
        "qwen3next": (
            "qwen3_next",
            {"mlp_only_layers": [], "shared_expert_intermediate_size": 64, "linear_value_head_dim": 32},
        ),
        "qwen35moe": (
            "qwen3_5_moe_text",
            {"shared_expert_intermediate_size": 64, "linear_value_head_dim": 32, "linear_key_head_dim": 32},
        ),
        "deepseek2": ("deepseek_v2", {}),
        "gpt-oss": (
            "gpt_oss",
            {"swiglu_limit": 7.0, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        ),
    }
    case, own = fields[request.param]
    tmp_path = tmp_path_factory.mktemp(request.param)
    path = tmp_path / "tiny.gguf"

    def kind_of(name: str, values: object) -> Kind:
        if values.shape[-1] % 32:  # type: ignore[attr-defined]
            return Kind.F32
        return next((kind for key, kind in _KINDS.items() if key in name), Kind.F32)

    write_gguf(path, request.param, build(case, **own), kind_of)
    return gguf_folder(path, tmp_path / "cache")


def logits_of(folder: Path, arithmetic: Arithmetic | None) -> torch.Tensor:
    """arithmetic: None widens all weights."""
    spec = build_spec(load_config(folder))
    if arithmetic is None:
        decoder = load_decoder(folder, spec, max_model_len=64)
    else:
        rounding = rounding_of(replace(BASE, arithmetic=arithmetic), spec, read_index(folder))
        assert rounding.keeps_stored
        decoder = load_decoder(folder, spec, ops=CpuOps(arithmetic), max_model_len=64, rounding=rounding)
    return PagedRunner(decoder, [_TOKENS]).step([(0, 0, len(_TOKENS))])


def test_exact_products_are_those_of_the_widened_weights(folder: Path) -> None:
    wide, found = logits_of(folder, None), logits_of(folder, "exact")
    assert (found - wide).abs().max() <= 2e-4 * wide.abs().max()


def test_with_activations_of_8_bits_logits_are_close(folder: Path) -> None:
    wide, found = logits_of(folder, None), logits_of(folder, "int8")
    assert 0 < (found - wide).std() <= 0.2 * wide.std()


def test_pages_leave_memory_behind_the_reader_where_they_do_not_fit_beside_the_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, dtype = read_spec(folder, BASE)
    index = read_index(folder)
    rounding = rounding_of(BASE, spec, index)
    plan = plan_on_cpu(spec, dtype, index, BASE, 2**30)
    assert not plan.forgets_files
    stored_bytes = sum(info.num_bytes for info in index.values())
    enough = plan.weights_bytes + stored_bytes - 1
    monkeypatch.setattr(moeserve.device, "RESERVE_BYTES", 0)
    small = replace(BASE, kv_cache_memory=2**16, max_model_len=16)
    assert plan_on_cpu(spec, dtype, index, small, enough).forgets_files
    dropped: set[tuple[int, int]] = set()
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, length, advice: dropped.add((offset, length)))
    decoders = [
        load_decoder(folder, spec, ops=CpuOps("int8"), max_model_len=64, rounding=rounding, forgets_files=forgets)
        for forgets in (False, True)
    ]
    plain, forgetful = (PagedRunner(one, [_TOKENS]).step([(0, 0, len(_TOKENS))]) for one in decoders)
    assert torch.equal(plain, forgetful)
    sources = [source for info in index.values() if info.gguf for source in info.gguf.sources]
    whole = {(one.offset, one.num_bytes) for one in sources}
    assert whole & dropped
    # Of tensors with several experts the first ones.
    assert dropped - whole
    assert all(any(one.offset == offset and length <= one.num_bytes for one in sources) for offset, length in dropped)


def test_tokens_of_gguf_files_do_not_depend_on_chunks_memory_of_experts_or_what_else_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    assert_same_alone_together_and_with_few_experts(folder, BASE, _TOKENS, (None, tmp_path / "store"))
    # Experts were packed out of the file, and out of an expert file only where one was asked for.
    assert not (tmp_path / "cache" / "experts").exists()
    assert list((tmp_path / "store").glob("*/experts.bin"))


def test_gate_and_up_of_several_kinds_are_rounded_to_one_format(tmp_path: Path) -> None:
    kinds = {"ffn_gate_exps": Kind.Q5_1, "blk.0.ffn_up_exps": Kind.Q8_0, "ffn_up_exps": Kind.Q4_0}
    kinds["ffn_down_exps"] = Kind.Q4_1
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", build("mixtral"), lambda name, _: next((kinds[k] for k in kinds if k in name), Kind.F32))
    folder = gguf_folder(path, tmp_path / "cache")
    spec, index = build_spec(load_config(folder)), read_index(folder)
    rounding = rounding_of(BASE, spec, index)
    assert rounding.name == "q4_1 and q8_0 (rounded from Q4_0+Q5_1) and q8_0 (rounded from Q5_1+Q8_0)"
    decoder = load_decoder(folder, spec, max_model_len=64, rounding=rounding)
    assert all(experts._layout.shape.formats[0] is Q8_0 for experts in decoder.experts)
    wide, found = logits_of(folder, None), logits_of(folder, "exact")
    # Some tokens may get other experts, and those after them see that.
    assert 0 < ((found - wide).std(1) / wide.std(1)).quantile(0.25) <= 0.02


def test_a_file_that_changes_while_experts_are_read_from_it_gets_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", build("mixtral"), lambda name, _: Kind.Q8_0 if "_exps" in name else Kind.F32)
    folder = gguf_folder(path, tmp_path / "cache")
    spec, dtype = read_spec(folder, BASE)
    rounding = rounding_of(BASE, spec, read_index(folder))
    layouts = layouts_in_store(folder, spec, dtype, rounding)
    packer = ExpertPacker(stored_experts(folder, spec, dtype, rounding), layouts)
    out = torch.empty(layouts.num_bytes, dtype=torch.uint8)
    packer(0, 1, out)
    path.touch()
    with pytest.raises(ExpertStoreError, match=r"tiny.gguf was changed"):
        packer(0, 1, out)
    path.unlink()
    with pytest.raises(ExpertStoreError, match=r"tiny.gguf was changed"):
        packer(1, 2, out)


def test_weights_take_the_bytes_of_the_file(folder: Path) -> None:
    spec, dtype = read_spec(folder, BASE)
    index = read_index(folder)
    planned = weights_bytes(spec, dtype, index, rounding=rounding_of(BASE, spec, index))
    stored = sum(info.num_bytes for info in index.values())
    # Vectors and small tensors are the same; panels are padded to 32 columns, and a tied embedding counts twice.
    assert planned < 2 * stored
    assert planned < weights_bytes(spec, dtype, index) / 2


def test_a_quantised_file_is_not_rounded_once_more(folder: Path) -> None:
    spec, _ = read_spec(folder, BASE)
    with pytest.raises(ConfigError, match=r"--quantization .*q4_0, q4_1, q8_0"):
        rounding_of(replace(BASE, quantization="int8"), spec, read_index(folder))
