"""The Triton kernels of vLLM and SGLang at our shapes, called where those are installed. They read our pools in place.

Nothing of theirs is part of this package. A peer that is not there, or refuses a call, is told of by its reason.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.kernel_attention import PreparedAttention, scale_of
from moeserve.bench.kernel_case import Call, Peers
from moeserve.bench.moe_case import MoeCase

NOT_INSTALLED = "not installed"
_VLLM_ATTENTION = ("vllm.v1.attention.ops.triton_unified_attention", "vllm.attention.ops.triton_unified_attention")
_SGLANG_DECODE = (
    "sglang.kernels.ops.attention.decode_attention",
    "sglang.srt.layers.attention.triton_ops.decode_attention",
)
_SGLANG_EXTEND = tuple(name.replace("decode", "extend") for name in _SGLANG_DECODE)
_SGLANG_EXPERTS = (
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe",
    "sglang.srt.layers.moe.fused_moe_triton.fused_moe",
)
_VLLM_EXPERTS = ("vllm.model_executor.layers.fused_moe.fused_moe", "vllm.model_executor.layers.fused_moe")
# What vLLM gives its kernel: parts of a context, and up to how many programs it splits contexts at all.
_VLLM_SEGMENTS, _VLLM_PROGRAMS = 16, 128
_SGLANG_SPLITS = 8


def server_attention(prepared: PreparedAttention) -> Peers:
    """vLLM's unified kernel, and SGLang's: one for decodes, one for extends and prefills."""
    peers, case = Peers(), prepared.case
    if case.latent:
        return peers
    _add(peers, "vLLM Triton", _VLLM_ATTENTION, "unified_attention", partial(_vllm_calls, prepared))
    if case.kind == "decode":
        _add(peers, "SGLang Triton", _SGLANG_DECODE, "decode_attention_fwd", partial(_sglang_calls, prepared))
    else:
        _add(peers, "SGLang Triton", _SGLANG_EXTEND, "extend_attention_fwd", partial(_sglang_extend_calls, prepared))
    return peers


def server_experts(sets: list[MoeCase]) -> Peers:
    """vLLM's fused experts and SGLang's."""
    peers = Peers()
    _add(peers, "vLLM Triton", _VLLM_EXPERTS, "fused_experts", partial(_vllm_expert_calls, sets))
    _add(peers, "SGLang Triton", _SGLANG_EXPERTS, "fused_experts", partial(_sglang_expert_calls, sets))
    return peers


def _add(
    peers: Peers,
    name: str,
    modules: tuple[str, ...],
    function: str,
    calls_of: Callable[[Callable[..., Any]], list[Call]],
) -> None:
    """The calls of the first module that has the function, if they run."""
    kernel = next((found for module in modules if (found := _find(module, function)) is not None), None)
    if kernel is None:
        peers.absent[name] = NOT_INSTALLED
        return
    try:
        calls = calls_of(kernel)
        calls[0]()
    except Exception as error:  # Whatever another project's version of the day says to these arguments.
        peers.absent[name] = f"refuses: {type(error).__name__}"
    else:
        peers.calls[name] = calls


def _find(module: str, function: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(module), function, None)
    except ImportError:
        return None


def _vllm_expert_calls(sets: list[MoeCase], kernel: Callable[..., Tensor]) -> list[Call]:
    return [
        partial(
            kernel,
            case.x,
            case.experts.gate_up.values,
            case.experts.down.values,
            case.expert_weights,
            case.expert_ids.to(torch.int32),
        )
        for case in sets
    ]


def _sglang_expert_calls(sets: list[MoeCase], kernel: Callable[..., Tensor]) -> list[Call]:
    """All experts are here, and the input is kept: it is the next call's as well."""
    _publish_sglang_settings()
    chosen = importlib.import_module("sglang.srt.layers.moe.topk").StandardTopKOutput
    runner_config = importlib.import_module("sglang.srt.layers.moe.moe_runner").MoeRunnerConfig
    calls: list[Call] = []
    for case in sets:
        count = case.shape.num_experts
        calls.append(
            partial(
                kernel,
                case.x,
                case.experts.gate_up.values,
                case.experts.down.values,
                chosen(case.expert_weights, case.expert_ids.to(torch.int32), case.expert_weights.new_empty(0)),
                runner_config(num_experts=count, num_local_experts=count, activation="silu", inplace=False),
            )
        )
    return calls


def _publish_sglang_settings() -> None:
    """Its kernels read global settings that its server publishes first; versions before had none."""
    publish = _find("sglang.srt.server_args", "set_global_server_args_for_scheduler")
    settings = _find("sglang.srt.server_args", "ServerArgs")
    if publish is not None and settings is not None:
        publish(settings(model_path="dummy"))


def _vllm_calls(prepared: PreparedAttention, kernel: Callable[..., Any]) -> list[Call]:
    case, tensors, device = prepared.case, prepared.tensors, prepared.tensors.q.device
    shape = (case.kv_heads, -1, case.block_size)
    keys = tensors.keys.view(*shape, case.key_dim).permute(1, 2, 0, 3)
    values = tensors.values.view(*shape, case.value_dim).permute(1, 2, 0, 3)
    # It reads scales where keys and values are fp8.
    scales = None
    if case.kv_dtype != case.dtype:
        scales = torch.ones((len(case.seq_lens), case.kv_heads), device=device)
    options: dict[str, Any] = {}
    if "seq_threshold_3D" in inspect.signature(kernel).parameters:
        most = max(1, _VLLM_PROGRAMS // case.kv_heads)
        parts = (most, case.num_heads, _VLLM_SEGMENTS)
        size = 1 << math.ceil(math.log2(case.value_dim))
        options = {
            "seq_threshold_3D": most,
            "num_par_softmax_segments": _VLLM_SEGMENTS,
            "softmax_segm_output": torch.empty((*parts, size), dtype=torch.float32, device=device),
            "softmax_segm_max": torch.empty(parts, dtype=torch.float32, device=device),
            "softmax_segm_expsum": torch.empty(parts, dtype=torch.float32, device=device),
        }

    def run(table: Tensor) -> Tensor:
        kernel(
            q=tensors.q,
            k=keys,
            v=values,
            out=tensors.out,
            cu_seqlens_q=tensors.query_starts,
            max_seqlen_q=max(case.query_lens),
            seqused_k=tensors.seq_lens,
            max_seqlen_k=max(case.seq_lens),
            softmax_scale=scale_of(case),
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0.0,
            q_descale=None,
            k_descale=scales,
            v_descale=scales,
            **options,
        )
        return tensors.out

    return [partial(run, table) for table in tensors.tables]


def _sglang_calls(prepared: PreparedAttention, kernel: Callable[..., Any]) -> list[Call]:
    case, tensors, device = prepared.case, prepared.tensors, prepared.tensors.q.device
    count = len(case.seq_lens)
    parts = (count, case.num_heads, _SGLANG_SPLITS)
    scratch = torch.empty((*parts, case.value_dim), dtype=torch.float32, device=device)
    sums = torch.empty(parts, dtype=torch.float32, device=device)
    splits = torch.full((count,), _SGLANG_SPLITS, dtype=torch.int32, device=device)
    scales = [1.0, 1.0] if "k_scale" in inspect.signature(kernel).parameters else []
    starts = _starts(case.seq_lens, device)

    def run(slots: Tensor) -> Tensor:
        kernel(
            tensors.q,
            tensors.keys.transpose(0, 1),
            tensors.values.transpose(0, 1),
            tensors.out,
            starts,
            slots,
            scratch,
            sums,
            splits,
            _SGLANG_SPLITS,
            scale_of(case),
            *scales,
        )
        return tensors.out

    return [partial(run, _slots(prepared, table, case.seq_lens)) for table in tensors.tables]


def _sglang_extend_calls(prepared: PreparedAttention, kernel: Callable[..., Any]) -> list[Call]:
    """It reads the prefix from the pools and the new tokens' keys and values from tensors of their own."""
    case, tensors, device = prepared.case, prepared.tensors, prepared.tensors.q.device
    prefixes = [length - count for length, count in zip(case.seq_lens, case.query_lens, strict=True)]
    keys, values = tensors.keys.transpose(0, 1), tensors.values.transpose(0, 1)
    scales = {"k_scale": 1.0, "v_scale": 1.0} if "k_scale" in inspect.signature(kernel).parameters else {}
    shared: dict[str, Any] = {
        "q_extend": tensors.q,
        "o_extend": tensors.out,
        "k_buffer": keys,
        "v_buffer": values,
        "qo_indptr": tensors.query_starts,
        "kv_indptr": _starts(prefixes, device),
        "custom_mask": None,
        "is_causal": True,
        "mask_indptr": None,
        "max_len_extend": max(case.query_lens),
        "sm_scale": scale_of(case),
        **scales,
    }

    def run(new_keys: Tensor, new_values: Tensor, slots: Tensor) -> Tensor:
        kernel(k_extend=new_keys, v_extend=new_values, kv_indices=slots, **shared)
        return tensors.out

    calls: list[Call] = []
    for table in tensors.tables:
        new = _slots(prepared, table, case.seq_lens, prefixes)
        own = (keys[new].to(case.dtype), values[new].to(case.dtype))
        calls.append(partial(run, *own, _slots(prepared, table, prefixes)))
    return calls


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[S + 1] int32: where each sequence's part begins."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _slots(
    prepared: PreparedAttention, table: Tensor, ends: Sequence[int], begins: Sequence[int] | None = None
) -> Tensor:
    """The slots of the sequences' positions from `begins` (default 0) to `ends`, one sequence after the other."""
    size = prepared.case.block_size
    parts = []
    for seq, (begin, end) in enumerate(zip(begins or [0] * len(ends), ends, strict=True)):
        positions = torch.arange(begin, end, device=table.device)
        parts.append(table[seq].long()[positions // size] * size + positions % size)
    return torch.cat(parts)
