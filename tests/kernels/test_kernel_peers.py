"""Peers compute what the kernels compute, from the same memory; those that are not installed say so."""

import sys
import types
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend

from kernels.attention import paged_attention_reference
from kernels.gpu.moe import moe_experts_reference
from kernels.gpu.moe_config import MoeConfig, MoeShape, Tile
from kernels.gpu.moe_weights import GpuExperts, StoredMatrix
from kernels.specs import Activation
from moeserve.bench.kernel_attention import prepare
from moeserve.bench.kernel_cases_attention import AttentionCase, attention_cases
from moeserve.bench.kernel_cases_moe import moe_cases
from moeserve.bench.kernel_peers_attention import _FLEX_SHAPES, attention_peers, contiguous_inputs, flex, sdpa
from moeserve.bench.kernel_peers_servers import NOT_INSTALLED, server_attention

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the bench itself runs them")

CPU = torch.device("cpu")
DECODE = AttentionCase("decode", "decode", (40, 40), (1, 1), 8, 4, 32, 32, 16)
PREFILL = AttentionCase("prefill", "prefill", (24, 24), (24, 24), 4, 2, 32, 32, 16)
CONTINUED = AttentionCase("continued prefill", "prefill", (40, 40), (24, 24), 4, 4, 32, 32, 16)
EXTEND = AttentionCase("extend", "extend", (40, 40), (5, 5), 4, 4, 32, 32, 16)
RAGGED = AttentionCase("ragged extend", "extend", (40, 22), (5, 3), 4, 2, 32, 32, 16)
FP8 = AttentionCase("fp8 decode", "decode", (40, 24), (1, 1), 8, 4, 32, 32, 16, torch.float8_e4m3fn)
TILE = Tile(32, 32, 1, 4, 2)


def prepared_case(case, monkeypatch):
    monkeypatch.setattr("moeserve.bench.kernel_case.COLD_BYTES", 2 * case.kv_bytes)
    return prepare(case, CPU, 8)


def relative(actual, expected):
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("case", [DECODE, PREFILL, CONTINUED, EXTEND], ids=lambda case: case.name)
def test_torchs_attention_is_ours(case):
    """On torch's contiguous inputs, by the reference: each sequence is a block of its own."""
    q, keys, values = contiguous_inputs(case, CPU)
    causal = case.kind != "decode"
    found = flex(q, keys, values, causal)
    assert relative(found, sdpa(SDPBackend.MATH, q, keys, values, causal)) < 1e-2
    length, count = case.seq_lens[0], case.query_lens[0]
    rows = q.reshape(2, 1, -1, 32) if case.kind == "decode" else q.transpose(1, 2)
    expected = paged_attention_reference(
        rows.flatten(0, 1),
        keys.transpose(0, 1).flatten(1, 2),
        values.transpose(0, 1).flatten(1, 2),
        torch.arange(2 * length).view(2, length),
        torch.tensor(case.seq_lens),
        torch.tensor([0, count, 2 * count]),
        block_size=1,
        scale=32**-0.5,
    )
    assert (
        relative(found.transpose(1, 2).reshape(expected.shape) if causal else found.reshape(expected.shape), expected)
        < 1e-2
    )


@pytest.mark.parametrize(
    ("case", "peer", "reason"),
    [(RAGGED, "varlen_attn", "refuses"), (FP8, "torch", "dtype"), (DECODE, "flex_attention", "not compiled")],
    ids=lambda value: str(value)[:9],
)
def test_what_torch_cannot_compute_is_told_of(case, peer, reason, monkeypatch):
    assert reason in attention_peers(prepared_case(case, monkeypatch)).absent[peer]


def test_flex_attention_is_compiled_for_shapes_that_are_measured():
    shapes = {(len(case.seq_lens), case.seq_lens[0], case.query_lens[0]) for case in attention_cases()}
    assert shapes >= _FLEX_SHAPES


def test_heads_are_repeated_for_a_backend_that_knows_no_groups(monkeypatch):
    def refuse_groups(backend, q, keys, values, causal):
        if q.shape[1] != keys.shape[1]:
            raise RuntimeError("no available kernel")
        return sdpa(SDPBackend.MATH, q, keys, values, causal)

    monkeypatch.setattr("moeserve.bench.kernel_peers_attention.sdpa", refuse_groups)
    calls = attention_peers(prepared_case(PREFILL, monkeypatch)).calls["SDPA cuDNN"]
    assert len(calls) == 2
    assert calls[0]().shape == (2, 4, 24, 32)


def test_peers_that_are_not_installed_or_refuse_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setattr("moeserve.bench.kernel_peers_attention._FLEX_SHAPES", {(2, 40, 1)})
    peers = attention_peers(prepared_case(DECODE, monkeypatch))
    assert {"vLLM Triton": NOT_INSTALLED, "SGLang Triton": NOT_INSTALLED}.items() <= peers.absent.items()
    # cuDNN computes on no CPU.
    assert peers.absent["SDPA cuDNN"].startswith("refuses")
    assert len(peers.calls["flex_attention"]) == 2
    case = tiny_experts_case()
    assert case.absent["SGLang Triton"] == NOT_INSTALLED
    assert case.absent["vLLM Triton"] == NOT_INSTALLED


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table,
    softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None, **scratch,
):  # fmt: skip
    """The arguments as vLLM understands them: pages [blocks, block size, KV heads, D]."""
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(seqused_k.max())
    assert causal
    assert scratch["softmax_segm_output"].shape[:2] == (seq_threshold_3D, q.shape[1])
    if k.dtype != q.dtype:
        assert k_descale.shape == v_descale.shape == (len(seqused_k), k.shape[2])
    pools = [pages.permute(2, 0, 1, 3).flatten(1, 2) for pages in (k, v)]
    out.copy_(
        paged_attention_reference(
            q, *pools, block_table, seqused_k, cu_seqlens_q, block_size=k.shape[1], scale=softmax_scale
        )
    )


def decode_attention_fwd(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, *rest):
    """The arguments as SGLang understands them: buffers [slots, KV heads, D] and the slots of every position."""
    _, _, num_kv_splits, max_kv_splits, sm_scale = rest
    assert int(num_kv_splits.max()) <= max_kv_splits
    for row in range(len(q)):
        slots = kv_indices[kv_indptr[row] : kv_indptr[row + 1]]
        group = q.shape[1] // k_buffer.shape[1]
        keys, values = (buffer[slots].float().repeat_interleave(group, 1) for buffer in (k_buffer, v_buffer))
        weights = (torch.einsum("hd,shd->hs", q[row].float(), keys) * sm_scale).softmax(-1)
        o[row] = torch.einsum("hs,shd->hd", weights, values).to(o.dtype)


def extend_attention_fwd(
    q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask,
    is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None,
):  # fmt: skip
    """The same of new tokens: their keys and values beside the buffers, the slots of the prefixes alone."""
    assert is_causal
    assert custom_mask is mask_indptr is None
    assert max_len_extend == int(qo_indptr.diff().max())
    for seq in range(len(qo_indptr) - 1):
        begin, end = int(qo_indptr[seq]), int(qo_indptr[seq + 1])
        slots = kv_indices[kv_indptr[seq] : kv_indptr[seq + 1]]
        keys, values = (
            torch.cat([buffer[slots].to(own.dtype), own[begin:end]]).transpose(0, 1)
            for buffer, own in ((k_buffer, k_extend), (v_buffer, v_extend))
        )
        length = keys.shape[1]
        o_extend[begin:end] = paged_attention_reference(
            q_extend[begin:end], keys, values, torch.arange(length)[None], torch.tensor([length]),
            torch.tensor([0, end - begin]), block_size=1, scale=sm_scale,
        )  # fmt: skip


def vllm_experts(hidden_states, w1, w2, topk_weights, topk_ids):
    experts = GpuExperts(StoredMatrix(w1), StoredMatrix(w2))
    return moe_experts_reference(hidden_states, topk_ids, topk_weights, experts, Activation())


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


@dataclass
class MoeRunnerConfig:
    """Some of its fields, with SGLang's defaults."""

    num_experts: int | None = None
    num_local_experts: int | None = None
    activation: str = "silu"
    inplace: bool = True
    no_combine: bool = False


@dataclass
class ServerArgs:
    model_path: str


published = []


def set_global_server_args_for_scheduler(server_args):
    published.append(server_args)


def sglang_experts(hidden_states, w1, w2, topk_output, moe_runner_config, b1=None, b2=None, **quantised):
    assert published, "SGLang's kernels read settings that somebody has to publish"
    assert (moe_runner_config.num_experts, moe_runner_config.num_local_experts) == (w1.shape[0], w1.shape[0])
    assert (moe_runner_config.inplace, moe_runner_config.no_combine, quantised) == (False, False, {})
    topk_weights, topk_ids, _ = topk_output
    assert topk_ids.dtype == torch.int32
    return vllm_experts(hidden_states, w1, w2, topk_weights, topk_ids)


def install(monkeypatch, path, *names, **named):
    """A module of this path that has these functions and classes, with its parents."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if name not in sys.modules or end == len(parts):
            module = types.ModuleType(name)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
    for name, value in {**{value.__name__: value for value in names}, **named}.items():
        setattr(module, name, value)


@pytest.mark.parametrize("case", [DECODE, PREFILL, CONTINUED, RAGGED, FP8], ids=lambda case: case.name)
def test_other_servers_kernels_get_our_memory_in_their_terms(case, monkeypatch):
    install(monkeypatch, "vllm.v1.attention.ops.triton_unified_attention", unified_attention)
    install(monkeypatch, "sglang.srt.layers.attention.triton_ops.decode_attention", decode_attention_fwd)
    install(monkeypatch, "sglang.srt.layers.attention.triton_ops.extend_attention", extend_attention_fwd)
    prepared = prepared_case(case, monkeypatch)
    peers = server_attention(prepared)
    assert set(peers.calls) == {"vLLM Triton", "SGLang Triton"}
    assert peers.absent == {}
    for index in range(2):
        ours = prepared.run(index).clone()
        for calls in peers.calls.values():
            prepared.tensors.out.fill_(torch.nan)
            assert relative(calls[index](), ours) < 1e-2


def test_other_servers_experts_compute_ours(monkeypatch):
    install(monkeypatch, "vllm.model_executor.layers.fused_moe.fused_moe", fused_experts=vllm_experts)
    install(monkeypatch, "sglang.srt.layers.moe.moe_runner", MoeRunnerConfig)
    install(monkeypatch, "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe", fused_experts=sglang_experts)
    install(monkeypatch, "sglang.srt.layers.moe.topk", StandardTopKOutput)
    install(monkeypatch, "sglang.srt.server_args", ServerArgs, set_global_server_args_for_scheduler)
    monkeypatch.setattr(sys.modules[__name__], "published", [])
    case = tiny_experts_case()
    assert case.absent == {}
    for peer in ("vLLM Triton", "SGLang Triton"):
        assert relative(case.peers[peer][1](), case.calls[1]()) < 1e-2


def tiny_experts_case():
    (planned,) = moe_cases(
        "tiny",
        CPU,
        lambda shape: lambda num_tokens: MoeConfig("tiled", 16, TILE, TILE),
        shape=MoeShape(4, 32, 64, 2, "bfloat16"),
        all_num_tokens=(3,),
        routings=("uniform",),
    )
    return planned.make()
