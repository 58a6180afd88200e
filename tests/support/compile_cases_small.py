"""Norms, rotation with KV write, sampling and block copies at the shapes of Qwen3-30B-A3B, for `compile_only`."""

import torch

from kernels.gpu.norm import add_rms_norm, layer_norm, rms_norm
from kernels.gpu.rope_kv import norm_rope_write_kv
from kernels.gpu.sampling import greedy, sample

BF16 = torch.bfloat16


def rope(interleaved=False, rotary=128, **pool):
    q, k, v = torch.empty(2, 40, 128, dtype=BF16).split([32, 4, 4], 1)
    pools = [torch.empty(4, 64, 128, dtype=pool.get("dtype", BF16)) for _ in range(2)]
    scales = {"k_scale": torch.ones(4), "v_scale": torch.ones(4)} if pool.get("scaled") else {}
    angles = torch.empty(2, rotary // 2)
    weight = torch.empty(128, dtype=BF16)
    slots = torch.zeros(2, dtype=torch.int64)
    return lambda: norm_rope_write_kv(
        q, k, v, angles, angles, slots, *pools, interleaved=interleaved, q_weight=weight, k_weight=weight, **scales
    )


def calls():
    x, weight = torch.empty(2, 2048, dtype=BF16), torch.empty(2048, dtype=BF16)
    yield "rms_norm", lambda: rms_norm(x, weight, 1e-6)
    yield "add_rms_norm", lambda: add_rms_norm(x, x.clone(), weight, 1e-6)
    yield "layer_norm", lambda: layer_norm(x, weight, weight, 1e-6)
    wide = torch.empty(2, 7168, dtype=BF16)
    yield "rms_norm wide", lambda: rms_norm(wide, torch.empty(7168, dtype=BF16), 1e-6)
    yield "rope", rope()
    yield "rope interleaved partial", rope(interleaved=True, rotary=64)
    yield "rope fp8", rope(dtype=torch.float8_e4m3fn)
    yield "rope fp8 scaled", rope(dtype=torch.float8_e4m3fn, scaled=True)
    logits = torch.empty(2, 151936)
    yield "greedy", lambda: greedy(logits)
    yield "greedy bf16", lambda: greedy(logits.to(BF16))
    ones = torch.ones(2)
    places = torch.zeros(2, dtype=torch.int64)
    yield "sample", lambda: sample(logits, ones, places, places)
    top_k = torch.ones(2, dtype=torch.int32)
    yield "sample filtered", lambda: sample(logits, ones, places, places, top_k=top_k, top_p=ones, min_p=ones)
