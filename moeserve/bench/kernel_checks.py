"""Kernels against their references in the process that measures them: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.moe_config import MoeShape, heuristic_config
from kernels.gpu.moe_experts import device_of, moe_experts_reference
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.rope_kv import norm_rope_write_kv
from kernels.gpu.rope_kv_reference import norm_rope_write_kv_reference
from kernels.gpu.sampling import greedy, sample
from kernels.gpu.sampling_filters import filter_thresholds
from kernels.gpu.sampling_reference import filter_thresholds_reference, sample_reference
from kernels.specs import Activation
from moeserve.bench.kernel_attention import prepare
from moeserve.bench.kernel_cases_attention import AttentionCase, Kind
from moeserve.bench.kernel_measurement import TOLERANCE
from moeserve.bench.moe_case import make_case


@dataclass(frozen=True, slots=True)
class Check:
    """`error` is relative (L2); NaN where something was not written."""

    name: str
    error: float

    @property
    def passed(self) -> bool:
        return self.error < TOLERANCE


def checks(device: torch.device, num_sms: int) -> Iterator[Check]:
    """Small shapes with odd sizes, random inputs."""
    torch.manual_seed(0)
    x, residual = (torch.randn(3, 300, device=device).to(torch.bfloat16) for _ in range(2))
    weight = torch.randn(300, device=device).to(torch.bfloat16)
    yield Check("RMS norm", _error(rms_norm(x, weight, 1e-6), _wide_norm(x, weight)))
    total = residual + x
    yield Check("residual and RMS norm", _error(add_rms_norm(x, residual, weight, 1e-6), _wide_norm(total, weight)))
    yield Check("norms, rotation, KV write", _rope_error(device))
    logits = torch.randn(4, 5001, device=device)
    yield Check("greedy", float((greedy(logits)[0] != logits.argmax(-1)).any()))
    ones, places = torch.ones(4, device=device), torch.arange(4, device=device)
    top_k = torch.tensor([0, 7, 0, 50], dtype=torch.int32, device=device)
    filters = (top_k, ones * 0.8, ones * 0.01)
    found, expected = (f(logits, ones, *filters) for f in (filter_thresholds, filter_thresholds_reference))
    yield Check("filters", float(((logits >= found[:, None]) != (logits >= expected[:, None])).any()))
    tokens, _ = sample(logits, ones, places, places)
    yield Check("draws", float((tokens != sample_reference(logits, ones, places, places)[0]).any()))
    for case in _attention_cases():
        yield Check(case.name, prepare(case, device, num_sms).relative_error(0))
    moe = MoeShape(8, 48, 64, 2, "bfloat16")
    tokens_of_experts = make_case(moe, 9, device)
    config = heuristic_config(moe, 9, device_of(device))
    inputs = (tokens_of_experts.x, tokens_of_experts.expert_ids, tokens_of_experts.expert_weights)
    expected = moe_experts_reference(*inputs, tokens_of_experts.experts, Activation())
    yield Check(f"experts, {config.variant}", _error(tokens_of_experts.run(config), expected.double()))


def _attention_cases() -> Iterator[AttentionCase]:
    """Every kind over keys and values of both widths."""
    lengths: dict[Kind, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "decode": ((1, 17, 64, 130), (1, 1, 1, 1)),
        "extend": ((20, 70, 130), (3, 16, 9)),
        "prefill": ((33, 70), (33, 5)),
    }
    for kv_dtype, suffix in ((torch.bfloat16, ""), (torch.float8_e4m3fn, ", fp8 keys and values")):
        for kind, (seq_lens, query_lens) in lengths.items():
            name = f"{kind} attention{suffix}"
            yield AttentionCase(name, kind, seq_lens, query_lens, 4, 2, 64, 64, 16, kv_dtype)


def _rope_error(device: torch.device) -> float:
    q, k, v = torch.split(torch.randn(3, 8, 48, device=device).to(torch.bfloat16), [4, 2, 2], 1)
    angles = torch.randn(3, 16, device=device)
    slots = torch.tensor([5, -1, 2], device=device)
    weight = torch.randn(48, device=device).to(torch.bfloat16)
    outputs = []
    for function in (norm_rope_write_kv, norm_rope_write_kv_reference):
        pools = [torch.zeros(2, 8, 48, device=device, dtype=torch.bfloat16) for _ in range(2)]
        rotated = function(
            q,
            k,
            v,
            angles.cos(),
            angles.sin(),
            slots,
            *pools,
            interleaved=True,
            q_weight=weight,
            k_weight=weight,
            eps=1e-6,
        )
        outputs.append(torch.cat([part.flatten() for part in (rotated, *pools)]))
    return _error(outputs[0], outputs[1].double())


def _wide_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x.double(), (x.shape[-1],), weight.double(), 1e-6)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())
