"""Digests of what the compiled kernels compute from random inputs, for comparisons between processors' libraries.

`MOESERVE_CPU_KERNELS=x86-64-v3 python -m tests.support.kernel_bits [BATCHES]` prints them as JSON, by case.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256

import torch
from torch import Tensor

from kernels.activation import Activation
from kernels.attention import paged_attention
from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.cpu.experts import PanelLayout
from kernels.cpu.library import native_kernels
from kernels.cpu.quantised import quantise
from kernels.gated_delta_rule import DeltaHeads, gated_delta_rule
from kernels.indexed_attention import choose_positions, indexed_attention
from kernels.kv_rows import pack_rows, row_width
from kernels.linear import Linear, PanelLinear, pack_linear
from kernels.mamba import MambaHeads, mamba1_scan, mamba2_scan
from kernels.moe_gate import GateSpec, native_choice
from kernels.norm import gated_norm, rms_norm, rms_norm_of_sum
from kernels.packed_experts import ExpertShape
from kernels.rope_kv import rotate_and_store
from kernels.sampling import likeliest, softmax
from kernels.short_conv import short_conv
from kernels.specs import ActivationKind
from kernels.state_rows import StateRows
from kernels.weight_formats import (
    FORMATS,
    FP8_FORMATS,
    Q4_1,
    Q4_K,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    Matrix,
    QuantizedRows,
    WeightFormat,
)
from tests.support.quantised_rows import normal, random_rows

Case = Callable[[int], Iterator[Tensor]]
_DEPTH = 512
_KERNELS = native_kernels()


def _linear(linear: Linear, depth: int, batches: int) -> Iterator[Tensor]:
    for _ in range(batches):
        x = normal(int(torch.randint(1, 40, ())), depth) * 2.0 ** torch.randint(-3, 4, (1,))
        yield linear(x)


def _product(weight: Callable[[], Matrix], depth: int, batches: int, **how: object) -> Iterator[Tensor]:
    yield from _linear(pack_linear(weight(), normal(70), torch.float32, **how), depth, batches)  # type: ignore[arg-type]


def _narrow(depth: int) -> Tensor:
    return normal(70, depth).bfloat16()


def _fine(form: WeightFormat) -> QuantizedRows:
    return random_rows(form, 70, _DEPTH).fine()


def _products() -> Iterator[tuple[str, Case]]:
    for depth in (577, 512):
        wide, narrow = partial(normal, 70, depth), partial(_narrow, depth)
        yield f"float32 {depth}", partial(_product, wide, depth)
        yield f"bfloat16 {depth}", partial(_product, narrow, depth)
        yield f"bfloat16 times bfloat16 {depth}", partial(_product, narrow, depth, narrow_rows=True)
    for name, form in FORMATS.items():
        rows = partial(random_rows, form, 70, _DEPTH)
        yield f"{name} int8", partial(_product, rows, _DEPTH)
        yield f"{name} exact", partial(_product, rows, _DEPTH, arithmetic="exact")
        yield f"{name} fine", partial(_product, partial(_fine, form), _DEPTH)
        if form in FP8_FORMATS:
            yield f"{name} times bfloat16", partial(_product, rows, _DEPTH, narrow_rows=True)


def _experts(formats: tuple[WeightFormat, WeightFormat], kind: ActivationKind, batches: int) -> Iterator[Tensor]:
    assert _KERNELS is not None
    activation = Activation(kind, 1.7, 5.0)
    shape = ExpertShape(
        256, 512, torch.float32, torch.float32, is_gated=activation.is_gated, formats=formats, arithmetic="int8"
    )
    layout = PanelLayout(shape, _KERNELS)
    experts = layout.experts(5)
    for number in range(5):
        pair = random_rows(formats[0], shape.gate_up_rows, 256), random_rows(formats[1], 256, 512)
        experts.put(number, layout.pack((*pair, None, None)))
    for _ in range(batches):
        x = normal(int(torch.randint(1, 40, ())), 256) / 8
        ids = torch.stack([torch.randperm(5)[:3] for _ in range(len(x))])
        yield experts(x, ids, torch.rand(len(x), 3), activation)


def _attention(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, batches: int) -> Iterator[Tensor]:
    keys, values = (pack_rows(normal(kv_heads, 1024, dim) * torch.rand(kv_heads, 1024, 1), dtype) for _ in range(2))
    for number in range(batches):
        blocks = array("i", torch.randperm(128).tolist())
        lengths = [int(torch.randint(1, 30, ())), 1, int(torch.randint(30, 70, ()))]
        spans = [ChunkSpan(length, int(torch.randint(0, 900, ())), blocks) for length in lengths]
        plan = AttentionPlan(spans, 8)
        q = normal(plan.num_rows, heads, dim)
        sinks, window = (normal(heads) if number % 3 == 1 else None), (100 if number % 2 else None)
        yield paged_attention(q, keys, values, plan, scale=dim**-0.5, window=window, sinks=sinks)


def _indexed(dtype: torch.dtype, batches: int) -> Iterator[Tensor]:
    index_keys, keys = (pack_rows(normal(1, 1024, dim), dtype) for dim in (32, 80))
    for _ in range(batches):
        blocks = array("i", torch.randperm(128).tolist())
        spans = [ChunkSpan(length, int(torch.randint(0, 900, ())), blocks) for length in (9, 1, 40)]
        plan = AttentionPlan(spans, 8)
        chosen = choose_positions(normal(50, 7, 32), normal(50, 7), index_keys, plan, 200)
        places = torch.cat([torch.arange(span.start, span.start + span.num_tokens) for span in spans])
        yield chosen[places >= 200]
        yield indexed_attention(normal(50, 5, 80), keys, plan, chosen, scale=0.1)


def _rotation(dtype: torch.dtype, batches: int) -> Iterator[Tensor]:
    for number in range(batches):
        qkv = normal(33, 6 + 2 * 2, 32)
        pools = [torch.zeros(2, 64, row_width(32, dtype), dtype=dtype) for _ in range(2)]
        angles, norms = normal(33, 16), (normal(32), normal(32))
        flags = {"interleaved": number % 2 == 1, "head_norms": norms if number % 3 else None, "eps": 1e-6}
        cos, sin = angles.clamp(-1, 1), (1 - angles.clamp(-1, 1) ** 2).sqrt()
        yield rotate_and_store(qkv, cos, sin, torch.randperm(64)[:33], *pools, **flags)  # type: ignore[arg-type]
        yield from pools


def _norms(batches: int) -> Iterator[Tensor]:
    for width in (15, 64, 577)[: 1 + batches]:
        x, weight, gates = normal(40, width), normal(width), normal(20, 2 * width)
        yield rms_norm(x, weight, 1e-5)
        yield gated_norm(x.view(20, 2, width), gates, weight, 1e-5)
        yield rms_norm_of_sum(x, normal(40, width), weight, 1e-5, 0.3)


def _gate(spec: GateSpec, batches: int) -> Iterator[Tensor]:
    gate = pack_linear(normal(8, 64))
    choose = native_choice(gate, spec, None)
    assert isinstance(gate, PanelLinear)
    assert choose is not None
    for _ in range(batches):
        yield from choose(normal(int(torch.randint(1, 40, ())), 64))


def _rows() -> StateRows:
    return StateRows(torch.tensor([0, 1, 24]), torch.tensor([2, 0]), 23)


def _recurrent(batches: int) -> Iterator[Tensor]:
    for _ in range(batches):
        states = normal(3, 4, 32, 48)
        heads = DeltaHeads(2, 4, 32, 48, -torch.rand(4) * 3, normal(4))
        yield gated_delta_rule(normal(24, sum(heads.widths)), normal(24, 8), heads, states, _rows())
        yield states
        of_mamba = MambaHeads(4, 2, 48, 32, -torch.rand(4), normal(4), normal(4))
        yield mamba2_scan(normal(24, sum(of_mamba.widths)), normal(24, 4), of_mamba, states, _rows())
        yield states
        of_channels = normal(3, 8, 64)
        inputs, sizes, shared = normal(24, 64), torch.rand(24, 64), normal(24, 16)
        yield mamba1_scan(inputs, sizes, shared, -torch.rand(8, 64), normal(64), of_channels, _rows())
        window = normal(3, 3, 64)
        yield short_conv(inputs, normal(4, 64), window, _rows(), normal(64))
        yield window


def _quantised(form: WeightFormat, batches: int) -> Iterator[Tensor]:
    assert _KERNELS is not None
    for number in range(batches):
        numbers = normal(24, _DEPTH)
        yield quantise(numbers.bfloat16() if number % 2 else numbers, form, _KERNELS).data


def _sampling(batches: int) -> Iterator[Tensor]:
    for _ in range(batches):
        logits = 4 * normal(5, 1003)
        yield from likeliest(logits)
        yield softmax(logits)
        yield softmax(logits, takes_logs=True)


def cases() -> Iterator[tuple[str, Case]]:
    """Yield the name of each case and what computes its results for a number of batches."""
    yield from _products()
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "swigluoai", "relu2", "clamped_silu"):
        yield f"experts {kind}", partial(_experts, (Q4_K, Q8_0), kind)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for heads, kv_heads, dim in ((9, 3, 64), (16, 2, 128), (5, 1, 32)):
            yield f"attention {dtype} {heads}/{kv_heads} of {dim}", partial(_attention, dtype, heads, kv_heads, dim)
        yield f"rotation {dtype}", partial(_rotation, dtype)
        yield f"indexed attention {dtype}", partial(_indexed, dtype)
    yield "norms", _norms
    yield "gate softmax", partial(_gate, GateSpec(3, renormalise=True))
    yield "gate sigmoid", partial(_gate, GateSpec(3, score="sigmoid"))
    yield "recurrent", _recurrent
    for form in (Q8_0, Q4_1, Q5_1, Q4_K, Q5_K, Q6_K):
        yield f"rounding to {form.name}", partial(_quantised, form)
    yield "sampling", _sampling


def digests(batches: int) -> dict[str, str]:
    """Return the digest of each case's results. The same inputs lead to each of them whatever the others computed."""
    found = {}
    with torch.inference_mode():
        for name, compute in cases():
            torch.manual_seed(0)
            digest = sha256()
            for result in compute(batches):
                digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
            found[name] = digest.hexdigest()[:16]
    return found


if __name__ == "__main__":
    print(json.dumps(digests(int(sys.argv[1]) if len(sys.argv) > 1 else 4), indent=1))
