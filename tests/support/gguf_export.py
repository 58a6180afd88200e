"""Tiny models of transformers as GGUF files, written by the `gguf` package under the names of its own table.

What llama.cpp's conversion does to tensors is done here once more, apart from the reader: experts are stacked by
projection, rotary pairs of some architectures stand side by side, latent attention is split by head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES

from kernels.cpu.library import native_kernels
from kernels.cpu.quantised import quantise
from kernels.weight_formats import FORMATS
from tests.support.tiny_models import YARN

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
# Architecture -> (case of `tiny_models`, fields of its configuration that every file of the architecture has).
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("mixtral", {}),
    "llama-frequencies": ("mixtral", {"rope_parameters": LLAMA3}),
    "qwen2moe": ("qwen2_moe", {"decoder_sparse_step": 1, "norm_topk_prob": False}),
    "qwen3moe": ("qwen3_moe", {"mlp_only_layers": [], "norm_topk_prob": True}),
    "qwen3vlmoe": ("qwen3_moe", {"mlp_only_layers": [], "norm_topk_prob": True}),
    "qwen3next": ("qwen3_next", {"mlp_only_layers": []}),
    "qwen35": ("qwen3_5_text", {}),
    "qwen35moe": ("qwen3_5_moe_text", {}),
    "olmoe": ("olmoe", {}),
    "granitemoe": ("granitemoe", {}),
    "phimoe": ("phimoe", {"router_jitter_noise": 0.01}),
    "gpt-oss": (
        "gpt_oss",
        {"swiglu_limit": 7.0, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "mistral3": ("mixtral", {}),
    "glm4moe": ("glm4_moe", {}),
    "bailingmoe2": ("glm4_moe", {"attention_bias": False}),
    "ernie4_5-moe": ("ernie4_5_moe", {"moe_layer_end_index": -1}),
    "dots1": ("dots1", {"sliding_window": None, "layer_types": None}),
    "minimax-m2": ("minimax_m2", {}),
    "deepseek2": ("deepseek_v2", {}),
    "deepseek2-v3": (
        "deepseek_v3-yarn",
        {"attention_bias": False, "rope_parameters": {**YARN, "mscale": 1.1, "mscale_all_dim": 1.1}},
    ),
}

_HYBRID = ("qwen3next", "qwen35", "qwen35moe")

Quantise = Callable[[str, np.ndarray], Kind]


def in_float32(name: str, values: np.ndarray) -> Kind:
    return Kind.F32


def in_blocks(name: str, values: np.ndarray) -> Kind:
    """Quantise matrices whose rows are whole blocks, but for gates."""
    return Kind.F32 if "gate_inp" in name or values.shape[-1] % 32 else Kind.Q5_0


def write_gguf(
    path: Path, architecture: str, model: Any, quantise: Quantise = in_float32, latent: str = "split"
) -> None:
    """Write the model. latent: `split` by head, as files are written now, or `whole` as in older ones."""
    config, name = model.config, architecture.removesuffix("-v3").removesuffix("-frequencies")
    writer = gguf.GGUFWriter(path, name)
    _write_fields(writer, name, config, latent)
    if config.rope_parameters["rope_type"] == "llama3":
        stretched, dim = (
            model.model.rotary_emb.inv_freq,
            config.head_dim or config.hidden_size // config.num_attention_heads,
        )
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        writer.add_tensor("rope_freqs.weight", (plain / stretched).numpy())
    write_tensors(writer, _tensors(name, config, model.state_dict(), latent), quantise)


def write_tensors(writer: gguf.GGUFWriter, tensors: Iterable[tuple[str, torch.Tensor]], kind_of: Quantise) -> None:
    """Write tensors as the last part of a file."""
    for tensor_name, tensor in tensors:
        values = np.ascontiguousarray(tensor.float().numpy())
        kind = kind_of(tensor_name, values) if values.ndim > 1 else Kind.F32
        if kind is Kind.F32:
            writer.add_tensor(tensor_name, values)
        else:
            writer.add_tensor(tensor_name, _in_blocks(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_blocks(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Round [..., K] to blocks of a kind, those of which gguf writes none by our own kernels."""
    form = FORMATS.get(kind.name.lower())
    if form is None or form.block == 32:
        return np.asarray(gguf.quantize(values, kind))
    kernels = native_kernels()
    assert kernels is not None
    rows = quantise(torch.from_numpy(values).flatten(0, -2), form, kernels)
    return rows.data.reshape(*values.shape[:-1], -1).numpy()


# Turns a tensor of a file, by its name, into those that are written in its place.
Change = Callable[[str, gguf.ReaderTensor], Iterable[tuple[str, np.ndarray, Kind]]]


def as_it_is(name: str, tensor: gguf.ReaderTensor) -> Iterable[tuple[str, np.ndarray, Kind]]:
    return [(name, np.array(tensor.data), tensor.tensor_type)]


def copy_gguf(
    source: Path, target: Path, change: Change = as_it_is, keeps_field: Callable[[str], bool] = lambda _: True
) -> None:
    """Write a file anew with other tensors, and without some of its fields."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")) and keeps_field(key):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        for name, values, kind in change(tensor.name, tensor):
            writer.add_tensor(name, values, raw_dtype=None if kind is Kind.F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_fields(writer: gguf.GGUFWriter, name: str, c: Any, latent: str) -> None:
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    rope = c.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    if name == "deepseek2":
        wide = c.qk_nope_head_dim + c.qk_rope_head_dim
        writer.add_kv_lora_rank(c.kv_lora_rank)
        writer.add_rope_dimension_count(c.qk_rope_head_dim)
        if c.q_lora_rank is not None:
            writer.add_q_lora_rank(c.q_lora_rank)
        if latent == "split":
            writer.add_head_count_kv(1)
            writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
            writer.add_value_length(c.kv_lora_rank)
            writer.add_key_length_mla(wide)
            writer.add_value_length_mla(c.v_head_dim)
        else:
            writer.add_key_length(wide)
            writer.add_value_length(c.v_head_dim)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1.0)))
    _write_experts(writer, c)
    if name == "granitemoe":
        writer.add_attention_scale(c.attention_multiplier)
        writer.add_embedding_scale(c.embedding_multiplier)
        writer.add_residual_scale(c.residual_multiplier)
        writer.add_logit_scale(c.logits_scaling)
    if name in _HYBRID:
        writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
        writer.add_ssm_state_size(c.linear_key_head_dim)
        writer.add_ssm_group_count(c.linear_num_key_heads)
        writer.add_ssm_time_step_rank(c.linear_num_value_heads)
        writer.add_ssm_inner_size(c.linear_num_value_heads * c.linear_value_head_dim)
    if name in ("qwen3vlmoe", "qwen35", "qwen35moe"):  # Without images all parts of a head have the same positions.
        writer.add_rope_dimension_sections([1, 1, 1, 0])
    if name == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(c.moe_layer_interval)
        writer.add_expert_shared_feed_forward_length(c.moe_num_shared_experts * c.moe_intermediate_size)
    if name == "minimax-m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if name == "gpt-oss":
        writer.add_sliding_window(c.sliding_window)
    if getattr(c, "clip_qkv", None):
        writer.add_clamp_kqv(c.clip_qkv)
    write_vocabulary(writer, c.vocab_size)


def _write_experts(writer: gguf.GGUFWriter, c: Any) -> None:
    def first(*names: str) -> Any:
        return next((value for name in names if (value := getattr(c, name, None)) is not None), None)

    writer.add_expert_count(first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
    writer.add_expert_used_count(first("num_experts_per_tok", "moe_k"))
    writer.add_expert_feed_forward_length(first("moe_intermediate_size", "intermediate_size"))
    if (width := first("shared_expert_intermediate_size")) is not None:
        writer.add_expert_shared_feed_forward_length(width)
    if (shared := first("n_shared_experts", "moe_num_shared_experts")) is not None:
        writer.add_expert_shared_count(shared)
    if (dense := first("first_k_dense_replace", "moe_layer_start_index")) is not None:
        writer.add_leading_dense_block_count(dense)
    if first("routed_scaling_factor") is not None:
        writer.add_expert_weights_scale(c.routed_scaling_factor)
        writer.add_expert_weights_norm(bool(c.norm_topk_prob))
        writer.add_expert_group_count(c.n_group)
        writer.add_expert_group_used_count(c.topk_group)
        sigmoid = c.model_type != "deepseek_v2"
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID if sigmoid else kinds.SOFTMAX)


def write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    letters = ["!!", *(chr(33 + i) if i < 94 else chr(0x100 + i) for i in range(size - 3))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<|end|>", "<|start|>", *letters])
    writer.add_token_types([3, 3] + [1] * (size - 2))
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)


def _tensors(name: str, config: Any, state: dict[str, torch.Tensor], latent: str) -> Iterator[tuple[str, torch.Tensor]]:
    arch = next(arch for arch, own in MODEL_ARCH_NAMES.items() if own == name)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)

    def named(tensor: str) -> str:
        found = table.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert found is not None, tensor
        return found

    for tensor, values in state.items():
        own = tensor.rpartition(".")[2]
        if tensor.endswith(("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias", "moe.experts.gate_up_proj")):
            layer = tensor.split(".")[2]
            suffix = "bias" if own.endswith("bias") else "weight"
            for part, half in zip(("gate", "up"), _gate_and_up(arch, values), strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.{suffix}", half
        elif "experts.down_proj" in tensor and "shared" not in tensor:
            layer = tensor.split(".")[2]
            if own.endswith("bias"):
                yield f"blk.{layer}.ffn_down_exps.bias", values
            else:
                yield f"blk.{layer}.ffn_down_exps.weight", values.mT if arch is MODEL_ARCH.GPT_OSS else values
        elif tensor.endswith("e_score_correction_bias"):
            yield f"blk.{tensor.split('.')[2]}.exp_probs_b.bias", values.flatten()
        elif tensor.endswith("sinks"):
            yield named(f"{tensor}.weight"), values
        elif tensor.endswith("kv_b_proj.weight") and latent == "split":
            yield from _split_latent(config, tensor.split(".")[2], values)
        elif ".linear_attn." in tensor:
            export = _delta_net if name == "qwen3next" else _delta_net_in_turns
            yield from export(config, tensor.split(".")[2], own if own != "weight" else tensor.split(".")[-2], values)
        elif name in _HYBRID and tensor.endswith("norm.weight"):
            yield named(tensor), values + 1
        elif tensor.endswith("block_sparse_moe.router.weight"):
            yield named(tensor.replace("router.weight", "router.layer.weight")), values
        elif tensor.endswith("shared_expert_gate.weight"):
            yield named(tensor), values.flatten()
        elif name == "bailingmoe2" and tensor.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            if "q_proj" in tensor:
                projections = [state[tensor.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                yield f"blk.{tensor.split('.')[2]}.attn_qkv.weight", torch.cat(projections)
        elif name in ("llama", "mistral3", "granitemoe") and ("q_proj" in tensor or "k_proj" in tensor):
            heads = config.num_attention_heads if "q_proj" in tensor else config.num_key_value_heads
            yield named(tensor), _side_by_side(values, heads)
        else:
            yield named(tensor), values


def _gate_and_up(arch: MODEL_ARCH, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if arch is MODEL_ARCH.GPT_OSS:
        # [E, H, 2I] with alternating channels, and biases [E, 2I].
        turned = values.mT if values.dim() == 3 else values
        return turned[:, ::2], turned[:, 1::2]
    gate, up = values.chunk(2, 1)
    return gate, up


def _split_latent(c: Any, layer: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    keys, value = values.view(c.num_attention_heads, -1, c.kv_lora_rank).split([c.qk_nope_head_dim, c.v_head_dim], 1)
    yield f"blk.{layer}.attn_k_b.weight", keys.mT
    yield f"blk.{layer}.attn_v_b.weight", value


def _side_by_side(values: torch.Tensor, heads: int) -> torch.Tensor:
    return values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _delta_net(c: Any, layer: str, own: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    block = f"blk.{layer}"
    if own == "in_proj_qkvz":
        wide = c.linear_num_value_heads // c.linear_num_key_heads * c.linear_value_head_dim
        by_head = values.view(c.linear_num_key_heads, -1, values.shape[1])
        parts = by_head.split([c.linear_key_head_dim, c.linear_key_head_dim, wide, wide], 1)
        query, key, value, gate = (part.flatten(0, 1) for part in parts)
        yield f"{block}.attn_qkv.weight", torch.cat([query, key, value])
        yield f"{block}.attn_gate.weight", gate
    elif own == "A_log":
        yield f"{block}.ssm_a", -values.exp()
    elif own == "dt_bias":
        yield f"{block}.ssm_dt.bias", values
    else:
        names = {"in_proj_ba": "ssm_ba", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}
        yield f"{block}.{names[own]}.weight", values.squeeze()


def _delta_net_in_turns(c: Any, layer: str, own: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Put the value heads in turns: the first of each key head, then the second ones."""
    group, wide = c.linear_num_value_heads // c.linear_num_key_heads, c.linear_value_head_dim

    def turned(part: torch.Tensor, width: int) -> torch.Tensor:
        return part.unflatten(0, (c.linear_num_key_heads, group, width)).transpose(0, 1).flatten(0, 2)

    names = {"in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_b": "ssm_beta", "in_proj_a": "ssm_alpha"}
    names |= {"conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}
    values = values.squeeze(1) if own == "conv1d" else values
    if own in ("in_proj_qkv", "conv1d"):
        first, last = values.tensor_split([len(values) - c.linear_num_value_heads * wide])
        values = torch.cat([first, turned(last, wide)])
    elif own in ("in_proj_b", "in_proj_a", "A_log", "dt_bias"):
        values = turned(values, 1)
    elif own == "in_proj_z":
        values = turned(values, wide)
    elif own == "out_proj":
        values = turned(values.mT, wide).mT
    if own == "A_log":
        yield f"blk.{layer}.ssm_a", -values.exp()
    else:
        yield f"blk.{layer}.{'ssm_dt.bias' if own == 'dt_bias' else names[own] + '.weight'}", values
