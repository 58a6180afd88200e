"""What Triton would compile while one rank of several serves, counted as `tests.support.launch_keys` counts it.

`python -m tests.support.rank_launch_keys CASE...` prints the same for every case and way: decodes replayed, all-to-all
throughout, and fewer slots than the rank has experts. The other rank is made up: its steps are drawn, and it sends back
whatever there is. It has to run in a process of its own, without TRITON_INTERPRET.
"""

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from experts.collectives import Collectives, DeviceWaits
from experts.expert_file import round_to_page
from experts.placement import contiguous
from kernels.gpu.moe_config import WeightStorage
from moeserve.device import KvBudget
from moeserve.model.families import build_spec, load_config
from moeserve.model.gpu_batches import AttentionLimits
from moeserve.model.gpu_expert_memory import GpuExpertSettings, slot_layout
from moeserve.model.gpu_kernels import expert_configs, expert_storage, kv_dtype_of
from moeserve.model.gpu_model import GpuSettings
from moeserve.model.gpu_setup import StepLimits, blank_arrays, launch_all_variants, launch_variants
from moeserve.model.kv_pool import kv_block_bytes
from moeserve.model.spec import DecoderSpec
from moeserve.model.step_arrays import StepShape, capture_sizes
from moeserve.model_loading import ModelPlan
from moeserve.plan import StepPlan
from moeserve.ranks.gpu_member import GpuMember
from moeserve.ranks.messages import StepRows
from tests.support.launch_keys import (
    BLOCK_SIZE,
    CPU,
    DTYPE,
    MAX_LEN,
    MAX_SEQS,
    MAX_TOKENS,
    NUM_BLOCKS,
    choose_for_hopper,
    gates_at_random,
    launch_keys,
    plans,
)
from tests.support.tiny_models import save

WAYS = ("graphs", "alltoall", "slots")


class MadeUp:
    """Collectives of rank 0 whose other rank has `other_rows` rows and sends any number of them."""

    def __init__(self, generator: random.Random) -> None:
        self.rank, self.num_ranks, self.device = 0, 2, CPU
        self.num_entered, self.bytes_to, self.other_rows = 0, [0, 0], MAX_TOKENS
        self.waits = DeviceWaits(CPU, 10)
        self._generator = generator

    def be_patient(self, seconds: float) -> None: ...

    def all_gather(self, rows: Tensor) -> Tensor:
        return torch.cat((rows, rows))

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        return parts[: len(parts) // 2].clone()

    def all_to_all(self, rows: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> Tensor:
        if rows.dim() == 1:
            return torch.tensor([int(rows[0]), self._generator.randint(0, self.other_rows)])
        return rows.new_zeros((sum(from_ranks), rows.shape[1]))

    def agree_on_least(self, number: int) -> int:
        return number

    def add_up(self, number: int) -> int:
        return number


def make_member(folder: Path, spec: DecoderSpec, storage: str, kv: str, way: str, others: MadeUp) -> GpuMember:
    assert spec.moe is not None
    kv_dtype = kv_dtype_of(kv)
    settings = GpuSettings(
        BLOCK_SIZE,
        MAX_SEQS,
        MAX_TOKENS,
        MAX_LEN,
        NUM_BLOCKS * kv_block_bytes(spec.kv_layers, BLOCK_SIZE, kv_dtype or DTYPE),
        0.9,
        enforce_eager=False,
        experts=bounded(folder, spec, expert_storage(spec, DTYPE, storage)) if way == "slots" else None,
        kv_dtype=kv_dtype,
        expert_quantization=storage,
    )
    placement = contiguous(len(spec.moe_layers), spec.moe.num_experts, 2)
    plan = ModelPlan(spec, DTYPE, KvBudget(0, 0), 0, placement)
    shape = "alltoall" if way == "alltoall" else "allgather"
    return GpuMember(folder, plan, settings, cast("Collectives", others), shape=shape, timeout=10)


def bounded(folder: Path, spec: DecoderSpec, storage: WeightStorage) -> GpuExpertSettings:
    """One slot fewer than the rank has experts."""
    assert spec.moe is not None
    num_slots = spec.moe.num_experts // 2 - 1
    size = num_slots * len(spec.moe_layers) * round_to_page(slot_layout(spec, DTYPE, storage).num_bytes)
    return GpuExpertSettings(size, 2**30, "lru", None, None)


def start(member: GpuMember, spec: DecoderSpec, storage: WeightStorage, kv: str) -> None:
    """What a start does on a GPU."""
    member.warm_up()
    limits = AttentionLimits(spec, BLOCK_SIZE, MAX_LEN, DTYPE, CPU, kv_dtype=kv_dtype_of(kv))
    steps = StepLimits(MAX_TOKENS, MAX_SEQS, MAX_LEN)
    runner, decoder = member._captured, member._decoder
    assert runner is not None
    variants = launch_variants(limits, expert_configs(spec, storage, CPU), steps)
    pools = runner._kv_pool.layers
    launch_all_variants(decoder, pools, runner._batches, variants, BLOCK_SIZE, member.steps.begin_alike)
    for size in capture_sizes(MAX_SEQS) if runner._decode is not None else ():
        member.steps.begin_decodes(size)
        runner._decode.run(blank_arrays(StepShape(size, (), size), BLOCK_SIZE, spec.vocab_size), None, size)


def steps_of_two(generator: random.Random) -> Iterator[list[StepPlan]]:
    """Of this rank and the other: alike or not, one of them idle or not."""
    own = list(plans(generator))
    decodes, mixed = own[:MAX_SEQS], own[MAX_SEQS:]
    idle = StepPlan(0, [])
    for plan in own:
        yield [plan, generator.choice(decodes if plan in decodes else mixed)]
        yield [plan, idle]
    for plan in (*decodes[:: MAX_SEQS // 7], *mixed):
        yield [plan, generator.choice(own)]
        yield [idle, plan]


def keys_of(folder: Path, spec: DecoderSpec, storage: str, kv: str, way: str) -> tuple[set[str], set[str]]:
    """The keys of starting up and those of serving."""
    generator = random.Random(5)
    others = MadeUp(generator)
    member = make_member(folder, spec, storage, kv, way, others)
    with torch.inference_mode(), gates_at_random(), launch_keys() as started:
        start(member, spec, expert_storage(spec, DTYPE, storage), kv)
    num_replayed = 0
    with torch.inference_mode(), gates_at_random(), launch_keys() as served:
        for both in steps_of_two(generator):
            rows = StepRows.of(both)
            others.other_rows = rows.num_rows[1]
            member.begin_step(rows)
            num_replayed += member.steps.decode_size is not None
            member.runner.launch(both[0])
    assert (num_replayed > MAX_SEQS) == (way == "graphs"), num_replayed
    if (stats := member.memory_stats()) is not None:
        assert stats.counters.num_evictions
        assert member._resident is not None
        member._resident.memory.close()
    return started, served


def main(cases: list[str]) -> None:
    choose_for_hopper()
    for case in cases:
        name, storage, kv = case.split(":") if ":" in case else (case, "none", "auto")
        with tempfile.TemporaryDirectory() as folder:
            save(name, Path(folder))
            spec = build_spec(load_config(Path(folder)))
            for way in WAYS:
                started, served = keys_of(Path(folder), spec, storage, kv, way)
                print(f"{case} {way}: {len(started)} at start")
                for key in sorted(served - started):
                    print(f"NEW {key}")


if __name__ == "__main__":
    main(sys.argv[1:])
