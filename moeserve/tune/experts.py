"""Experts of one shape with random weights and routed tokens, and the search for their fastest configurations.

The two projections are tuned one after the other with the same row tile, since rows are sorted once for both; what
competes in the end is the whole operation. Nothing here depends on a clock but `time_us`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kernels.gpu.moe import MoeWorkspace, device_of, moe_experts, moe_experts_reference
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
from kernels.gpu.moe_kernels import (
    down_gemv,
    down_persistent,
    down_products_gemv,
    down_tiled,
    gate_up_gemv,
    gate_up_persistent,
    gate_up_tiled,
)
from kernels.gpu.moe_weights import GpuExperts, StoredMatrix
from kernels.specs import Activation
from moeserve.tune.measure import Report, TimeUs, cold_sets, is_right, median_us, relative_error, run_guarded

Routing = Literal["uniform", "zipf"]

ACTIVATION = Activation()
# Layers there are at most, and how often other experts are chosen where tokens are so few.
_MAX_SETS, _FEW_TOKENS = 8, 16


@dataclass(frozen=True, slots=True)
class MoeCase:
    """x [T, H], expert_ids [T, k] int64, expert_weights [T, k] fp32, and the experts that compute them."""

    shape: MoeShape
    x: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    experts: GpuExperts
    workspace: MoeWorkspace

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def num_distinct_experts(self) -> int:
        return int(torch.bincount(self.expert_ids.flatten()).count_nonzero())

    @property
    def max_load(self) -> int:
        """Rows of the busiest expert."""
        return int(torch.bincount(self.expert_ids.flatten()).max())

    @property
    def num_bytes(self) -> int:
        """The fewest bytes to move: matrices of the distinct experts, x and the output once."""
        weights = 0
        for matrix in (self.experts.gate_up, self.experts.down):
            for tensor in (matrix.values, matrix.scale):
                weights += 0 if tensor is None else tensor[0].numel() * tensor.element_size()
        return weights * self.num_distinct_experts + 2 * self.x.numel() * self.x.element_size()

    @property
    def num_flops(self) -> int:
        return 6 * self.num_tokens * self.shape.top_k * self.shape.hidden_size * self.shape.intermediate_size

    def run(self, config: MoeConfig, out: Tensor | None = None) -> Tensor:
        """Compute everything after the gate -> [T, H], `out` if it is given."""
        return moe_experts(
            self.x,
            self.expert_ids,
            self.expert_weights,
            self.experts,
            ACTIVATION,
            config,
            self.workspace,
            out,
            num_programs=device_of(self.x.device).num_multiprocessors,
        )

    def relative_error(self, config: MoeConfig, num_tokens: int = 8) -> float:
        """Run the kernels and compare some tokens with the reference in fp32; NaN if any token was not written.

        Raises WrongResultError, see `run_guarded`.
        """
        for scratch in (self.workspace.hidden, self.workspace.results):
            scratch.fill_(math.nan)
        out = run_guarded(partial(self.run, config), self.x)
        if not bool(out.isfinite().all()):
            return math.nan
        places = sorted({round(i * (self.num_tokens - 1) / max(1, num_tokens - 1)) for i in range(num_tokens)})
        chosen = (self.x[places], self.expert_ids[places], self.expert_weights[places])
        return relative_error(out[places], moe_experts_reference(*chosen, self.experts, ACTIVATION))


def make_case(
    shape: MoeShape,
    num_tokens: int,
    device: torch.device,
    *,
    routing: Routing = "uniform",
    experts: GpuExperts | None = None,
    seed: int = 0,
) -> MoeCase:
    """Make a case with normal activations, in bf16 unless weights are stored wider.

    experts: those of another case of the same shape; random by default.
    """
    random = torch.Generator(device=device).manual_seed(seed)
    dtype = {"float32": torch.float32, "float16": torch.float16}.get(shape.weights, torch.bfloat16)
    ids = route(num_tokens, shape.num_experts, shape.top_k, routing, random)
    workspace = MoeWorkspace.allocate(
        num_tokens, shape.top_k, shape.num_experts, shape.hidden_size, shape.intermediate_size, dtype, device
    )
    return MoeCase(
        shape,
        torch.randn((num_tokens, shape.hidden_size), generator=random, device=device).to(dtype),
        ids,
        torch.rand(ids.shape, generator=random, device=device) / shape.top_k,
        experts or random_experts(shape, random),
        workspace,
    )


def random_experts(shape: MoeShape, random: torch.Generator) -> GpuExperts:
    """Make weights that keep activations near 1, in the stored format, on the generator's device."""
    width, hidden = shape.intermediate_size, shape.hidden_size
    return GpuExperts(_random_matrix(shape, 2 * width, hidden, random), _random_matrix(shape, hidden, width, random))


def _random_matrix(shape: MoeShape, num_rows: int, depth: int, random: torch.Generator) -> StoredMatrix:
    device, count = random.device, shape.num_experts
    scale = depth**-0.5
    if shape.weights == "int4":
        size = (count, num_rows, depth // 2)
        packed = torch.randint(0, 256, size, generator=random, device=device, dtype=torch.uint8)
        groups = depth // shape.group_size
        return StoredMatrix(packed, torch.full((count, groups, num_rows), scale / 4, device=device))
    if shape.weights == "int8":
        size = (count, num_rows, depth)
        values = torch.randint(-127, 128, size, generator=random, device=device, dtype=torch.int8)
        return StoredMatrix(values, torch.full((count, num_rows), scale / 64, device=device))
    names = {"fp8": torch.float8_e4m3fn, "float32": torch.float32, "float16": torch.float16}
    values = torch.empty((count, num_rows, depth), dtype=names.get(shape.weights, torch.bfloat16), device=device)
    for matrix in values:
        # One expert at a time: fp32 normals of all of them would take several times their own memory.
        matrix.copy_(
            torch.randn((num_rows, depth), generator=random, device=device) * (1 if values.itemsize == 1 else scale)
        )
    if shape.weights == "fp8":
        return StoredMatrix(values, torch.full((count, num_rows), scale, device=device))
    return StoredMatrix(values)


def route(num_tokens: int, num_experts: int, top_k: int, routing: Routing, random: torch.Generator) -> Tensor:
    """Draw k distinct experts per token [T, k] int64: all equally likely, or the expert of rank r with weight 1 / r."""
    device = random.device
    weights = torch.ones(num_experts, device=device)
    if routing == "zipf":
        ranks = torch.randperm(num_experts, generator=random, device=device)
        weights = 1.0 / (ranks + 1)
    # The greatest of log weight + Gumbel noise is a draw by weight, and the k greatest are k draws without repetition.
    uniform = torch.rand((num_tokens, num_experts), generator=random, device=device).clamp_(min=1e-20)
    return (weights.log() - (-uniform.log()).log()).topk(top_k, dim=-1).indices


@dataclass(frozen=True, slots=True)
class Tuned:
    config: MoeConfig
    microseconds: float


def tune_shape(
    shape: MoeShape,
    all_num_tokens: Sequence[int],
    device: torch.device,
    *,
    time_us: TimeUs = median_us,
    report: Report = lambda line: None,
) -> Iterator[tuple[int, Tuned]]:
    """Yield, per number of tokens, the fastest configuration that computes the layer, with its time.

    Weights take the memory of one layer, or of several small ones. Raises RuntimeError if no candidate runs.
    """
    random = torch.Generator(device=device).manual_seed(0)
    layers = [random_experts(shape, random)]
    size = sum(matrix.values.nbytes for matrix in (layers[0].gate_up, layers[0].down))
    layers += [random_experts(shape, random) for _ in range(cold_sets(size, _MAX_SETS) - 1)]
    for num_tokens in all_num_tokens:
        count = _MAX_SETS if num_tokens <= _FEW_TOKENS else len(layers)
        sets = [
            make_case(shape, num_tokens, device, experts=layers[number % len(layers)], seed=number)
            for number in range(count)
        ]
        yield num_tokens, _Search(sets, device_of(device), time_us, report).best()


class _Search:
    """The search for one number of tokens. sets: the same work on different data, each with scratch of its own."""

    def __init__(self, sets: Sequence[MoeCase], device: Device, time_us: TimeUs, report: Report) -> None:
        self._sets, self._device, self._time_us, self._report = sets, device, time_us, report
        self._shape, self._num_tokens = sets[0].shape, sets[0].num_tokens

    def best(self) -> Tuned:
        found = sorted(self._candidates(), key=lambda tuned: tuned.microseconds)
        for tuned in found:
            if is_right(str(tuned.config), partial(self._sets[0].relative_error, tuned.config), self._report):
                self._report(f"{self._num_tokens} tokens: {tuned.config.variant}, {tuned.microseconds:.1f} us")
                return tuned
        raise RuntimeError(f"no candidate for {self._shape.name()} runs on this device")

    def _candidates(self) -> Iterator[Tuned]:
        """Yield the best tiles of each variant and number of rows."""
        for variant in candidate_variants(self._shape, self._num_tokens, self._device):
            rows = [1] if variant in ("gemv", "gemv_split") else candidate_block_ms(self._shape, self._num_tokens)
            for block_m in rows:
                pairs = [None if block_m == 1 else sorted_pairs(case, block_m) for case in self._sets]
                gate_up = self._best_tile(variant, pairs, block_m, "gate_up")
                down = self._best_tile(variant, pairs, block_m, "down")
                if gate_up is None or down is None:
                    continue
                config = MoeConfig(variant, block_m, gate_up, down)
                time = self._timed(str(config), [partial(case.run, config) for case in self._sets])
                if time is not None:
                    yield Tuned(config, time)
                    self._report(f"{self._num_tokens} tokens, {variant}, {block_m} rows: {time:.1f} us")

    def _best_tile(
        self, variant: Variant, pairs: Sequence[SortedPairs | None], block_m: int, projection: Projection
    ) -> Tile | None:
        """Return the fastest tile that runs, None if none does."""
        timed: list[tuple[float, Tile]] = []
        for tile in candidate_tiles(self._shape, self._num_tokens, projection, variant, block_m, self._device):
            calls = [
                projection_call(case, variant, of_case, block_m, projection, tile, self._device)
                for case, of_case in zip(self._sets, pairs, strict=True)
            ]
            time = self._timed(f"{variant}, {projection}, {block_m} rows, {tile}", calls)
            if time is not None:
                timed.append((time, tile))
        return min(timed, key=lambda entry: entry[0])[1] if timed else None

    def _timed(self, name: str, calls: Sequence[Callable[[], object]]) -> float | None:
        """Return microseconds; None if the candidate does not run, since only the compiler knows which fit."""
        try:
            return self._time_us(calls)
        except Exception as error:
            self._report(f"skipped {name}: {type(error).__name__}")
            return None


def sorted_pairs(case: MoeCase, block_m: int) -> SortedPairs:
    """Sort the case's rows into its workspace."""
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
    """Return a call of one projection alone. pairs: the case's rows in tiles of block_m; None without tiles."""
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
