"""Kernels against their references in the process that measures them: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.layer_checks import attention_checks, expert_checks
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.rope_kv import norm_rope_write_kv
from kernels.gpu.rope_kv_reference import norm_rope_write_kv_reference
from kernels.gpu.sampling import greedy, sample
from kernels.gpu.sampling_filters import filter_thresholds
from kernels.gpu.sampling_reference import filter_thresholds_reference, sample_reference
from moeserve.tune.check import Check, checked
from moeserve.tune.guard import relative_error, run_guarded

_EPS = 1e-6


def checks(device: torch.device, num_sms: int) -> Iterator[Check]:
    """Small shapes with odd sizes, random inputs."""
    torch.manual_seed(0)
    x, residual = (torch.randn(3, 300, device=device).to(torch.bfloat16) for _ in range(2))
    weight = torch.randn(300, device=device).to(torch.bfloat16)
    yield checked("RMS norm", lambda: relative_error(_guarded_norm(x, weight), _wide_norm(x, weight)))
    total = residual + x
    yield Check(
        "residual and RMS norm", relative_error(add_rms_norm(x, residual, weight, _EPS), _wide_norm(total, weight))
    )
    yield Check("residual", relative_error(residual, total))
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
    yield from attention_checks(device, num_sms)
    yield from expert_checks(device)


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
            eps=_EPS,
        )
        outputs.append(torch.cat([part.flatten() for part in (rotated, *pools)]))
    return relative_error(outputs[0], outputs[1])


def _guarded_norm(x: Tensor, weight: Tensor) -> Tensor:
    return run_guarded(lambda out: rms_norm(x, weight, _EPS, out), x)


def _wide_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x.double(), (x.shape[-1],), weight.double(), _EPS)
