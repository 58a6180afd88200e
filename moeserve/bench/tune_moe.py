"""Times the candidates of the experts' kernels for one shape on the GPU and keeps the fastest per number of tokens.

The two projections are tuned one after the other with the same row tile, since rows are sorted once for both; what
competes in the end is the whole operation. Nothing here depends on a clock but `time_us`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from kernels.gpu.moe_align import SortedPairs, sort_pairs
from kernels.gpu.moe_config import (
    Device,
    MoeConfig,
    MoeShape,
    Projection,
    Tile,
    Variant,
    candidate_block_ms,
    candidate_tiles,
    candidate_variants,
)
from kernels.gpu.moe_experts import device_of
from kernels.gpu.moe_gemv import down_gemv, down_products_gemv, gate_up_gemv
from kernels.gpu.moe_persistent import down_persistent, gate_up_persistent
from kernels.gpu.moe_tiled import down_tiled, gate_up_tiled
from moeserve.bench.moe_case import ACTIVATION, MoeCase, make_case, random_experts

# Runs something often enough and gives the median of its microseconds.
TimeUs = Callable[[Callable[[], object]], float]
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tuned:
    config: MoeConfig
    microseconds: float


def median_us(call: Callable[[], object]) -> float:
    """On a CUDA device, with the cache flushed before each run."""
    from triton.testing import do_bench

    milliseconds: float = do_bench(call, warmup=5, rep=20, return_mode="median")
    return milliseconds * 1000


def tune_shape(
    shape: MoeShape,
    all_num_tokens: Sequence[int],
    device: torch.device,
    *,
    time_us: TimeUs = median_us,
    report: Report = lambda line: None,
) -> dict[int, Tuned]:
    """The fastest configuration for each number of tokens, with its time. Weights take the memory of one layer."""
    experts = random_experts(shape, torch.Generator(device=device).manual_seed(0))
    best = {}
    for num_tokens in all_num_tokens:
        case = make_case(shape, num_tokens, device, experts=experts)
        best[num_tokens] = _tune_case(case, device_of(device), time_us, report)
    return best


def _tune_case(case: MoeCase, device: Device, time_us: TimeUs, report: Report) -> Tuned:
    found: list[Tuned] = []
    for variant in candidate_variants(case.shape, case.num_tokens, device):
        block_ms = [1] if variant in ("gemv", "gemv_split") else candidate_block_ms(case.shape, case.num_tokens)
        for block_m in block_ms:
            pairs = None if variant in ("gemv", "gemv_split") else sorted_pairs(case, block_m)
            gate_up = _best_tile(case, variant, pairs, block_m, "gate_up", device, time_us)
            down = _best_tile(case, variant, pairs, block_m, "down", device, time_us)
            if gate_up is None or down is None:
                continue
            config = MoeConfig(variant, block_m, gate_up, down)
            found.append(Tuned(config, time_us(partial(case.run, config))))
            report(f"{case.num_tokens} tokens, {variant}, {block_m} rows: {found[-1].microseconds:.1f} us")
    if not found:
        raise RuntimeError(f"no candidate for {case.shape.name()} runs on this device")
    return min(found, key=lambda tuned: tuned.microseconds)


def _best_tile(
    case: MoeCase,
    variant: Variant,
    pairs: SortedPairs | None,
    block_m: int,
    projection: Projection,
    device: Device,
    time_us: TimeUs,
) -> Tile | None:
    """The fastest that runs; the others are skipped, since what fits is only known to the compiler."""
    timed: list[tuple[float, Tile]] = []
    for tile in candidate_tiles(case.shape, case.num_tokens, projection, variant, block_m, device):
        call = projection_call(case, variant, pairs, block_m, projection, tile, device)
        try:
            timed.append((time_us(call), tile))
        except (OutOfResources, PTXASError):
            continue
    return min(timed, key=lambda entry: entry[0])[1] if timed else None


def sorted_pairs(case: MoeCase, block_m: int) -> SortedPairs:
    """The case's rows, sorted into its workspace."""
    num_slots = case.experts.gate_up.num_slots
    into = case.workspace.sorted_pairs(case.expert_ids.numel(), num_slots, block_m)
    return sort_pairs(case.expert_ids, num_slots, block_m, into, case.workspace.counts)


def projection_call(
    case: MoeCase,
    variant: Variant,
    pairs: SortedPairs | None,
    block_m: int,
    projection: Projection,
    tile: Tile,
    device: Device,
) -> Callable[[], None]:
    """Runs one projection alone. pairs: the case's, in tiles of block_m; None without tiles."""
    experts, space = case.experts, case.workspace
    num_pairs = case.expert_ids.numel()
    hidden, results = space.hidden[:num_pairs], space.results[:num_pairs]
    ids, weights = case.expert_ids, case.expert_weights
    if pairs is None:
        out = torch.empty_like(case.x)
        if projection == "gate_up":
            return lambda: gate_up_gemv(case.x, experts.gate_up, ACTIVATION, ids, None, tile, hidden)
        if variant == "gemv_split":
            return lambda: down_products_gemv(hidden, experts.down, ids, None, tile, results)
        return lambda: down_gemv(hidden, experts.down, ids, weights, None, tile, out)
    top_k = case.shape.top_k
    if variant == "tiled":
        if projection == "gate_up":
            return lambda: gate_up_tiled(case.x, experts.gate_up, ACTIVATION, top_k, pairs, block_m, tile, hidden)
        return lambda: down_tiled(hidden, experts.down, pairs, block_m, tile, results)
    programs = device.num_multiprocessors
    if projection == "gate_up":
        return lambda: gate_up_persistent(
            case.x, experts.gate_up, ACTIVATION, top_k, pairs, block_m, tile, hidden, programs
        )
    return lambda: down_persistent(hidden, experts.down, pairs, block_m, tile, results, programs)
