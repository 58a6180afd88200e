"""The experts of a mixture-of-experts layer on the GPU: the counterpart of `kernels.moe` on a CPU.

With one configuration a row has the same bits in any batch and at any place in it: no product mixes rows, and a token's
choices are added in their order. Another configuration may cut K otherwise and round otherwise.

Experts may lie in slots of device memory (`SlotExperts`): each is one run of bytes, and a table maps experts to slots.
The matrices of all slots are views with the slot as their first stride, so the kernels read experts in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels.moe
from kernels.gpu.moe_align import SortedPairs, max_row_tiles, num_chunks, padded_bins, sort_pairs
from kernels.gpu.moe_config import MoeConfig, WeightStorage
from kernels.gpu.moe_kernels import combine, down, gate_up
from kernels.gpu.moe_weights import FORMAT_OF, ExpertStorage, GpuExperts, StoredMatrix
from kernels.packed_experts import ExpertMatrices, ExpertPacking, ExpertShape
from kernels.specs import Activation

# The alignment of every field of an expert in its slot, in bytes.
_ALIGNMENT = 16


class TritonMoe:
    """`moe_experts` as a dispatch, with its own configurations and scratch; one for all layers.

    choose: returns the configuration for a number of tokens, see `kernels.gpu.moe_config.MoeConfigs`.
    """

    def __init__(self, choose: Callable[[int], MoeConfig], workspace: MoeWorkspace) -> None:
        self._choose = choose
        self._workspace = workspace

    def __call__(
        self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, experts: GpuExperts, activation: Activation
    ) -> Tensor:
        """x [T, H] -> [T, H], a new tensor."""
        return self._run(x, expert_ids, expert_weights, experts, activation, torch.empty_like(x))

    def partial(
        self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, experts: GpuExperts, activation: Activation
    ) -> Tensor:
        """Return the sum over the local experts, fp32 whatever x is; ranks add up these sums."""
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        return self._run(x, expert_ids, expert_weights, experts, activation, out)

    def products(
        self, x: Tensor, expert_ids: Tensor, experts: GpuExperts, activation: Activation, products: Tensor
    ) -> None:
        """See `moe_products`. The sum by `combine_products` has the bits of `partial`."""
        if len(x):
            moe_products(x, expert_ids, experts, activation, self._choose(len(x)), self._workspace, products)

    def _run(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: GpuExperts, activation: Activation, out: Tensor
    ) -> Tensor:
        if not len(x):
            return out
        return moe_experts(x, ids, weights, experts, activation, self._choose(len(x)), self._workspace, out)


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: GpuExperts,
    activation: Activation,
    config: MoeConfig,
    workspace: MoeWorkspace,
    out: Tensor | None = None,
) -> Tensor:
    """Sum weight * expert(x) over k, in fp32, and store the sum in out [T, H], which is returned.

    x [T, H], rows contiguous; expert_ids [T, k] and expert_weights [T, k] fp32, contiguous. Absent experts (id -1, or
    without a slot) add nothing. out: by default a new tensor like x; its dtype may be wider. Raises
    ValueError if the workspace is too small.
    """
    num_pairs = expert_ids.numel()
    result = torch.empty_like(x) if out is None else out
    if num_pairs == 0:
        return result
    if x.stride(1) != 1 or not expert_ids.is_contiguous() or not expert_weights.is_contiguous():
        raise ValueError("rows of x, expert ids and expert weights must be contiguous")
    _check_gate(experts, activation)
    slots = experts.expert_slot
    products = workspace.results_of(num_pairs)
    moe_products(x, expert_ids, experts, activation, config, workspace, products)
    combine(products, expert_weights, result, expert_ids, slots, experts.num_experts)
    return result


def moe_products(
    x: Tensor,
    expert_ids: Tensor,
    experts: GpuExperts,
    activation: Activation,
    config: MoeConfig,
    workspace: MoeWorkspace,
    products: Tensor,
) -> None:
    """Write expert(x) for each chosen local expert to products [T, k, H]; leave the places of absent experts.

    Arguments as in `moe_experts`. products: contiguous, fp32 or of x's dtype, to which values are rounded either way.
    """
    num_pairs, top_k = expert_ids.numel(), expert_ids.shape[1]
    if num_pairs == 0:
        return
    if x.stride(1) != 1 or not expert_ids.is_contiguous() or not products.is_contiguous():
        raise ValueError("rows of x, expert ids and products must be contiguous")
    _check_gate(experts, activation)
    up, block_m = experts.gate_up, config.block_m
    hidden = workspace.hidden_of(num_pairs)
    tiles = workspace.sorted_pairs(num_pairs, up.num_slots, block_m)
    sort_pairs(expert_ids, up.num_slots, block_m, tiles, workspace.counts, experts.expert_slot)
    gate_up(x, up, activation, top_k, tiles, block_m, config.gate_up, hidden)
    down(hidden, experts.down, tiles, block_m, config.down, products)


def _check_gate(experts: GpuExperts, activation: Activation) -> None:
    if experts.is_gated != activation.is_gated:
        raise ValueError(f"experts {'with' if experts.is_gated else 'without'} a gate do not take {activation.kind}")


def combine_products(products: Tensor, expert_weights: Tensor) -> Tensor:
    """Sum weight * products [T, k, H] over k -> [T, H] fp32. Places of absent experts hold zeros."""
    out = torch.empty((products.shape[0], products.shape[2]), dtype=torch.float32, device=products.device)
    if len(out):
        combine(products, expert_weights, out)
    return out


def moe_experts_reference(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, experts: GpuExperts, activation: Activation
) -> Tensor:
    """Compute `kernels.moe.moe_experts_reference` with the widened weights of `experts`: -> [T, H] fp32."""
    slots = expert_ids
    if experts.expert_slot is not None:
        slots = torch.where(expert_ids < 0, -1, experts.expert_slot[expert_ids.clamp(min=0)].long())
    up, down = experts.gate_up, experts.down
    return kernels.moe.moe_experts_reference(
        x, slots, expert_weights, up.expanded(), down.expanded(), activation, up.bias, down.bias
    )


@dataclass(frozen=True, slots=True)
class MoeWorkspace:
    """Scratch of one layer at a time, shared by all layers of a stream. Its addresses never change.

    pairs [n] int32; tiles [3, m] int32; num_tiles int32 scalar; counts int32; hidden [n, I] and results [n, H], for up
    to n = max_tokens * k pairs in at most m row tiles.
    """

    pairs: Tensor
    tiles: Tensor
    num_tiles: Tensor
    counts: Tensor
    hidden: Tensor
    results: Tensor

    @staticmethod
    def allocate(
        max_tokens: int,
        top_k: int,
        num_slots: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> MoeWorkspace:
        """Allocate a workspace. num_slots: the most slots of any layer. dtype: the dtype of the activations."""
        pairs = max_tokens * top_k

        def ints(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=torch.int32, device=device)

        return MoeWorkspace(
            pairs=ints(pairs),
            tiles=ints(3, max_row_tiles(pairs, num_slots, 16)),
            num_tiles=ints(),
            counts=ints(num_chunks(pairs) * padded_bins(num_slots)),
            hidden=torch.empty((pairs, intermediate_size), dtype=dtype, device=device),
            results=torch.empty((pairs, hidden_size), dtype=dtype, device=device),
        )

    def hidden_of(self, num_pairs: int) -> Tensor:
        """[num_pairs, I]. Raises ValueError if the workspace is smaller."""
        self._check(num_pairs)
        return self.hidden[:num_pairs]

    def results_of(self, num_pairs: int) -> Tensor:
        """[num_pairs, H]. Raises ValueError if the workspace is smaller."""
        self._check(num_pairs)
        return self.results[:num_pairs]

    def _check(self, num_pairs: int) -> None:
        if num_pairs > self.pairs.shape[0]:
            raise ValueError(f"{num_pairs} rows of experts are more than the workspace holds ({self.pairs.shape[0]})")

    def sorted_pairs(self, num_pairs: int, num_slots: int, block_m: int) -> SortedPairs:
        """Return the part for a batch of num_pairs. Raises ValueError if it is larger than the workspace."""
        self._check(num_pairs)
        num_tiles = max_row_tiles(num_pairs, num_slots, block_m)
        if num_tiles > self.tiles.shape[1]:
            raise ValueError(f"{num_tiles} row tiles are more than the workspace holds ({self.tiles.shape[1]})")
        slot, first, rows = self.tiles[:, :num_tiles].unbind(0)
        return SortedPairs(self.pairs[:num_pairs], slot, first, rows, self.num_tiles)


class SlotExperts:
    """The experts of one layer that are in slots. All work is queued on the current stream.

    A chosen expert that is not shown adds nothing. A check would have to wait for the device, so the owner of the slots
    must show the chosen experts first.
    """

    def __init__(self, layout: SlotLayout, arena: Tensor, num_experts: int, moe: TritonMoe) -> None:
        """arena: see `SlotLayout.matrices`; the caller fills it."""
        table = torch.full((num_experts,), -1, dtype=torch.int32, device=arena.device)
        self.resident = GpuExperts(*layout.matrices(arena), table)
        self._table = table
        self._moe = moe
        self._shown: list[int] = []

    def show(self, contents: Sequence[int]) -> None:
        contents = list(contents)
        if self._shown == contents:
            return
        self._shown = contents
        table = torch.full(self._table.shape, -1, dtype=torch.int32)
        for slot, expert in enumerate(contents):
            if expert >= 0:
                table[expert] = slot
        if self._table.is_cuda:
            table = table.pin_memory()
        self._table.copy_(table, non_blocking=True)

    def multiply(self, x: Tensor, expert_ids: Tensor, activation: Activation, products: Tensor) -> None:
        """Write the products of chosen experts that are shown to products [T, k, H] fp32; leave other places."""
        self._moe.products(x, expert_ids, self.resident, activation, products)

    def combine(self, products: Tensor, expert_weights: Tensor) -> Tensor:
        """Sum products by weight [T, k] -> [T, H] fp32: the same bits for any number of parts.

        Places of ids -1 hold zeros.
        """
        return combine_products(products, expert_weights)


class SlotLayout(ExpertPacking):
    """The layout in which the GPU kernels read experts of a shape.

    A slot holds, each from a multiple of 16 bytes on: gate and up values, their scale, their bias, then the same for
    the down projection. storage: the format of the weights, by default the shape's dtype.
    """

    def __init__(self, shape: ExpertShape, storage: WeightStorage | None = None) -> None:
        self.storage = storage or WeightStorage(FORMAT_OF[shape.dtype])
        self._experts = ExpertStorage(shape, self.storage)
        self.name = f"gpu-{self._experts.name}"
        self._probes = self._experts.probes()
        self.num_bytes = sum(_padded(field) for probe in self._probes for field in probe.fields())

    def pack(self, matrices: ExpertMatrices) -> Tensor:
        """See `ExpertPacking.pack`. All on the CPU."""
        packed = torch.zeros(self.num_bytes, dtype=torch.uint8)
        stored, first = self._experts.store(matrices, packed.device), 0
        for field in (*stored.gate_up.fields(), *stored.down.fields()):
            data = field.contiguous().flatten().view(torch.uint8)
            packed[first : first + len(data)] = data
            first += _padded(field)
        return packed

    def matrices(self, arena: Tensor) -> tuple[StoredMatrix, StoredMatrix]:
        """Return views of all slots' matrices, gate and up, then down. arena: uint8 [slots, num_bytes or more].

        Slots start at multiples of 16 bytes.
        """
        matrices = []
        first = 0
        for probe in self._probes:
            views: list[Tensor | None] = []
            for field in (probe.values, probe.scale, probe.bias):
                if field is None:
                    views.append(None)
                    continue
                size = field.numel() * field.element_size()
                views.append(arena[:, first : first + size].view(field.dtype).unflatten(1, field.shape[1:]))
                first += _padded(field)
            values, scale, bias = views
            assert values is not None
            matrices.append(StoredMatrix(values, scale, bias, probe.form))
        return matrices[0], matrices[1]


def _padded(field: Tensor) -> int:
    return math.ceil(field.numel() * field.element_size() / _ALIGNMENT) * _ALIGNMENT
