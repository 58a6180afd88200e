"""Experts of one shape with random weights and routed tokens, which can be timed and checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from benchmarks.kernels.measure import relative_error, run_guarded
from kernels.gpu.moe import MoeWorkspace, moe_experts, moe_experts_reference
from kernels.gpu.moe_align import SortedPairs, sort_pairs
from kernels.gpu.moe_config import MoeConfig, MoeShape, Projection, Tile
from kernels.gpu.moe_kernels import down, gate_up
from kernels.gpu.moe_weights import GpuExperts, StoredMatrix
from kernels.specs import Activation

Routing = Literal["uniform", "zipf"]

ACTIVATION = Activation()


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
            self.x, self.expert_ids, self.expert_weights, self.experts, ACTIVATION, config, self.workspace, out
        )

    def relative_error(self, config: MoeConfig, num_tokens: int = 8) -> float:
        """Run the kernels and compare some tokens with the reference in fp32; NaN if any token was not written.

        Raise WrongResultError, see `run_guarded`.
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

    experts: taken from another case of the same shape; random by default.
    """
    random = torch.Generator(device=device).manual_seed(seed)
    dtype = {"float32": torch.float32, "float16": torch.float16}.get(shape.weights, torch.bfloat16)
    ids = route(num_tokens, shape.num_experts, shape.top_k, routing, random)
    x = torch.randn((num_tokens, shape.hidden_size), generator=random, device=device).to(dtype)
    weights = torch.rand(ids.shape, generator=random, device=device)
    workspace = MoeWorkspace.allocate(
        num_tokens, shape.top_k, shape.num_experts, shape.hidden_size, shape.intermediate_size, dtype, device
    )
    weights /= weights.sum(-1, keepdim=True)
    return MoeCase(shape, x, ids, weights, experts or random_experts(shape, random), workspace)


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


def sorted_pairs(case: MoeCase, block_m: int) -> SortedPairs:
    """Sort the case's rows into its workspace."""
    num_slots = case.experts.gate_up.num_slots
    into = case.workspace.sorted_pairs(case.expert_ids.numel(), num_slots, block_m)
    return sort_pairs(case.expert_ids, num_slots, block_m, into, case.workspace.counts)


def projection_call(
    case: MoeCase, pairs: SortedPairs, block_m: int, projection: Projection, tile: Tile
) -> Callable[[], None]:
    """Return a call of one projection alone. pairs: the case's rows in tiles of block_m."""
    experts, space, top_k = case.experts, case.workspace, case.shape.top_k
    num_pairs = case.expert_ids.numel()
    hidden, results = space.hidden[:num_pairs], space.results[:num_pairs]
    if projection == "gate_up":
        return lambda: gate_up(case.x, experts.gate_up, ACTIVATION, top_k, pairs, block_m, tile, hidden)
    return lambda: down(hidden, experts.down, pairs, block_m, tile, results)
