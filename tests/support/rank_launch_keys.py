"""Kernels that Triton would compile while one rank of several serves, counted as `tests.support.launch_keys` counts it.

`python -m tests.support.rank_launch_keys CASE...` prints the same for every case and way: decodes replayed, all-to-all
throughout, and fewer slots than the rank has experts. The other rank is made up: its steps are drawn, and it sends back
whatever there is. It has to run in a process of its own, without TRITON_INTERPRET.
"""

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from experts.memory.file import round_to_page
from experts.parallel.collectives import Collectives
from experts.placement.placement import contiguous
from kernels.gpu.moe_config import WeightStorage
from moeserve.config import ServeConfig
from moeserve.device import KvBudget
from moeserve.engine.assemble import LoadedRank, load_rank
from moeserve.engine.experts.gpu_memory import slot_layouts
from moeserve.engine.memory_plan import ModelPlan
from moeserve.engine.rank import Rank
from moeserve.engine.ranks.together import StepRows
from moeserve.model.families import build_spec, load_config
from moeserve.model.gpu.batches import native_limits
from moeserve.model.gpu.kernels import expert_configs, expert_storage, kv_dtype_of
from moeserve.model.gpu.runner import GpuModelRunner
from moeserve.model.gpu.setup import StepLimits, blank_arrays, launch_all_variants, launch_variants
from moeserve.model.kv_pool import kv_block_bytes
from moeserve.model.spec import DecoderSpec
from moeserve.model.step_arrays import StepShape, capture_sizes
from moeserve.plan import StepPlan
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


class MadeUp(Collectives):
    """Collectives of rank 0 whose other rank has `other_rows` rows and sends any number of them."""

    def __init__(self, generator: random.Random) -> None:
        super().__init__(0, 2)
        self.other_rows = MAX_TOKENS
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


def load(folder: Path, spec: DecoderSpec, storage: str, kv: str, way: str, others: MadeUp) -> LoadedRank:
    assert spec.moe is not None
    kv_dtype = kv_dtype_of(kv)
    config = ServeConfig(
        device="cuda",
        expert_parallel_size=2,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        kv_cache_memory=NUM_BLOCKS * kv_block_bytes(spec.kv_layers, BLOCK_SIZE, kv_dtype or DTYPE),
        record_experts=False,
        dispatch="alltoall" if way == "alltoall" else "allgather",
        kv_cache_dtype=kv,
        quantization="none" if storage == "none" else f"experts={storage}",
        expert_memory=slot_bytes(spec, expert_storage(spec, DTYPE, storage)) if way == "slots" else None,
        expert_policy="lru",
        expert_prefetch="off",
        expert_compute="copy",
    )
    placement = contiguous(len(spec.moe_layers), spec.moe.num_experts, 2)
    plan = ModelPlan(spec, DTYPE, KvBudget(0, 0), 0, placement, device="cuda")
    return load_rank(folder, plan, config, lambda _: None, others)


def slot_bytes(spec: DecoderSpec, storage: WeightStorage) -> int:
    """One slot fewer than the rank has experts."""
    assert spec.moe is not None
    num_slots = spec.moe.num_experts // 2 - 1
    return num_slots * len(spec.moe_layers) * round_to_page(slot_layouts(spec, DTYPE, storage).num_bytes)


def start(loaded: LoadedRank, spec: DecoderSpec, storage: WeightStorage, kv: str) -> Rank:
    """The steps of a start on a GPU."""
    rank = loaded.start()
    limits = native_limits(spec, BLOCK_SIZE, MAX_LEN, DTYPE, CPU, kv_dtype=kv_dtype_of(kv))
    steps = StepLimits(MAX_TOKENS, MAX_SEQS, MAX_LEN)
    runner, group = cast("GpuModelRunner", rank.runner._runner), rank.group
    assert group is not None
    variants = launch_variants(limits, expert_configs(spec, storage, CPU), steps)
    pools = runner.kv_pool.layers
    launch_all_variants(
        cast("Any", loaded._decoder), pools, runner._batches, variants, BLOCK_SIZE, group.steps.begin_alike
    )
    for size in capture_sizes(MAX_SEQS) if runner._decode is not None else ():
        group.steps.begin_decodes(size)
        assert runner._decode is not None
        runner._decode.run(blank_arrays(StepShape(size, (), size), BLOCK_SIZE, spec.vocab_size), None, size)
    return rank


def steps_of_two(generator: random.Random) -> Iterator[list[StepPlan]]:
    """Yield the plans of this rank and the other: alike or not, one of them idle or not."""
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
    """The keys of starting up and the keys of serving."""
    generator = random.Random(5)
    others = MadeUp(generator)
    loaded = load(folder, spec, storage, kv, way, others)
    with torch.inference_mode(), gates_at_random(), launch_keys() as started:
        rank = start(loaded, spec, expert_storage(spec, DTYPE, storage), kv)
    group, num_replayed = rank.group, 0
    assert group is not None
    with torch.inference_mode(), gates_at_random(), launch_keys() as served:
        for both in steps_of_two(generator):
            rows = StepRows.of(both)
            others.other_rows = rows.num_rows[1]
            rank.begin_step(rows)
            num_replayed += group.steps.decode_size is not None
            rank.runner.launch(both[0])
    assert (num_replayed > MAX_SEQS) == (way == "graphs"), num_replayed
    if (stats := rank.memory_stats()) is not None:
        assert stats.counters.num_evictions
        assert rank.memory is not None
        rank.memory.close()
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
