"""Kernels against their references on small shapes, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.attention_case import AttentionCase, AttentionTensors, Kind, PreparedAttention, prepare
from benchmarks.kernels.experts_case import ACTIVATION, MoeCase, make_case
from benchmarks.kernels.measure import Check, checked, relative_error, run_guarded, same_bits
from kernels.gpu.device import shared_memory_of
from kernels.gpu.moe import moe_experts_reference
from kernels.gpu.moe_config import MoeConfig, MoeShape, Tile, WeightFormat, config_for
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.rope_kv import norm_rope_write_kv, norm_rope_write_kv_reference
from kernels.gpu.sampling import filter_thresholds, filter_thresholds_reference, greedy, sample, sample_reference

_EPS = 1e-6
_WIDTHS = ((torch.bfloat16, ""), (torch.float8_e4m3fn, ", fp8 keys and values"))
# With sequences of one position, and of one less and one more than a tile.
_LENGTHS: dict[Kind, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "decode": ((1, 63, 64, 65, 130), (1, 1, 1, 1, 1)),
    "extend": ((20, 70, 130), (3, 16, 9)),
    "prefill": ((33, 70), (33, 5)),
}
_EXPERTS = MoeShape(8, 64, 64, 2, "bfloat16")
_TOKENS = 9
_TILE = Tile(32, 32, 1, 4, 2)
_BLOCK_MS = (16, 64)
_FORMATS: tuple[tuple[WeightFormat, int], ...] = (("int8", 0), ("fp8", 0), ("int4", 32))


def checks(device: torch.device, num_sms: int) -> Iterator[Check]:
    """Check every kernel on small shapes with odd sizes and random inputs."""
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


def attention_checks(device: torch.device, num_sms: int) -> Iterator[Check]:
    """Check every kind over keys and values of both widths; blocks and sequences in another order."""
    for kv_dtype, suffix in _WIDTHS:
        for kind, (seq_lens, query_lens) in _LENGTHS.items():
            name = f"{kind} attention{suffix}"
            case = AttentionCase(name, kind, seq_lens, query_lens, 4, 2, 64, 64, 16, kv_dtype)
            prepared = prepare(case, device, num_sms)
            yield checked(name, lambda prepared=prepared: prepared.relative_error(0))  # type: ignore[misc]
            if kind == "decode":
                yield checked(f"{name}, other order", partial(_other_order, prepared, device, num_sms))
            if kv_dtype == torch.bfloat16:
                # The last, since it moves them.
                yield checked(f"{kind} attention, other blocks", partial(_other_blocks, prepared))


def _other_blocks(prepared: PreparedAttention) -> float:
    """Return 1 unless the same keys and values in other blocks give the same bits."""
    tensors, size = prepared.tensors, prepared.case.block_size
    before = run_guarded(partial(prepared.attend, tensors.tables[0]), tensors.out)
    num_blocks = tensors.keys.shape[1] // size
    moved = torch.arange(num_blocks, device=before.device).roll(1)
    for pool in (tensors.keys, tensors.values):
        blocks = pool.view(pool.shape[0], num_blocks, -1)
        blocks.copy_(blocks.clone().roll(1, 1))
    table = moved.argsort()[tensors.tables[0].long()].to(torch.int32)
    return same_bits(run_guarded(partial(prepared.attend, table), tensors.out), before)


def _other_order(prepared: PreparedAttention, device: torch.device, num_sms: int) -> float:
    """Return the error of a decode whose sequences are in another order."""
    case, tensors = prepared.case, prepared.tensors
    turned = AttentionTensors(
        tensors.q.flip(0),
        tensors.keys,
        tensors.values,
        [table.flip(0) for table in tensors.tables],
        tensors.seq_lens.flip(0),
        tensors.query_starts,
        tensors.out,
    )
    other = dataclasses.replace(case, seq_lens=case.seq_lens[::-1])
    again = prepare(other, device, num_sms, config=prepared.config, tensors=turned)
    before, after = (
        run_guarded(partial(each.attend, each.tensors.tables[0]), tensors.out) for each in (prepared, again)
    )
    return relative_error(after.flip(0), before)


def expert_checks(device: torch.device) -> Iterator[Check]:
    """Check tiles of few and many rows and every stored format; few experts, absent ones, no tokens, other orders."""
    case = make_case(_EXPERTS, _TOKENS, device)
    for block_m in _BLOCK_MS:
        config = MoeConfig(block_m, _TILE, _TILE)
        yield checked(f"experts, tiles of {block_m} rows", partial(case.relative_error, config, _TOKENS))
    shared_bytes = shared_memory_of(device)
    config = config_for(_EXPERTS, _TOKENS, shared_bytes)
    ids = case.expert_ids
    for name, chosen in (
        ("all tokens on two experts", torch.tensor([5, 2], device=device).expand_as(ids).contiguous()),
        ("absent experts", ids.where(ids % 3 != 0, -1)),
    ):
        yield checked(f"experts, {name}", partial(_error_of_all, dataclasses.replace(case, expert_ids=chosen), config))
    yield checked("experts, no tokens", partial(_no_tokens, case, config))
    yield checked("experts, other order", partial(_other_tokens, case, config))
    for weights, group_size in _FORMATS:
        shape = dataclasses.replace(_EXPERTS, weights=weights, group_size=group_size)
        quantised, chosen_for = make_case(shape, _TOKENS, device), config_for(shape, _TOKENS, shared_bytes)
        yield checked(f"experts in {weights}", partial(quantised.relative_error, chosen_for, _TOKENS))


def _error_of_all(case: MoeCase, config: MoeConfig) -> float:
    inputs = (case.x, case.expert_ids, case.expert_weights, case.experts, ACTIVATION)
    return relative_error(run_guarded(partial(case.run, config), case.x), moe_experts_reference(*inputs))


def _part(case: MoeCase, rows: Tensor) -> MoeCase:
    ids, weights = case.expert_ids[rows], case.expert_weights[rows]
    return dataclasses.replace(case, x=case.x[rows], expert_ids=ids, expert_weights=weights)


def _no_tokens(case: MoeCase, config: MoeConfig) -> float:
    nothing = torch.arange(0, device=case.x.device)
    return float(_part(case, nothing).run(config).shape != (0, case.shape.hidden_size))


def _other_tokens(case: MoeCase, config: MoeConfig) -> float:
    """Return 1 unless every token has the same bits in any place of the batch."""
    order = torch.arange(case.num_tokens, device=case.x.device).flip(0)
    return same_bits(_part(case, order).run(config), case.run(config)[order])
