"""The kernels that a service would have Triton compile, counted by the keys of its cache; nothing is launched.

`python -m tests.support.launch_keys CASE...` prints, for every case and way of serving, how many keys starting up
reaches and, one per line, the kernels that serving steps of all kinds reach besides. A case is a name of `tiny_models`,
or NAME:FORM:KV with the form of the experts by --quantization and the value of --kv-cache-dtype; `awq` stands for a
checkpoint whose last layer has unquantised experts. It has to run in a process of its own, without TRITON_INTERPRET.
Whatever a kernel would have written stays as it is; what the gates
choose is drawn at random.
"""

import contextlib
import random
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import kernels.gpu.ops
import moeserve.model.gpu.batches
from experts.memory.file import round_to_page
from kernels.gpu.moe_config import WeightStorage
from kernels.packed_experts import ExpertShape
from moeserve.engine.experts.gpu_memory import (
    GpuExpertSettings,
    GpuResidentModel,
    open_gpu_experts,
    plan_gpu_residency,
    slot_layouts,
)
from moeserve.engine.memory_plan import rounding_on_gpu
from moeserve.model.checkpoint import read_index
from moeserve.model.expert_weights import shapes_of_experts
from moeserve.model.families import build_spec, load_config
from moeserve.model.gpu.batches import StepBatches, native_limits
from moeserve.model.gpu.kernels import expert_configs, expert_storage, kv_dtype_of
from moeserve.model.gpu.runner import DecodeSteps, GpuModelRunner, HeardDecoder
from moeserve.model.gpu.setup import StepLimits, blank_arrays, launch_all_variants, launch_variants
from moeserve.model.kv_pool import KVPool
from moeserve.model.rounding import Rounding
from moeserve.model.spec import DecoderSpec, silent
from moeserve.model.state_pool import StatePool, pools_by_layer
from moeserve.model.step_arrays import StepShape, capture_sizes
from moeserve.plan import Chunk, ChunkExtras, SamplingParams, StepPlan
from tests.support.caught_launches import launches_go_to
from tests.support.gpu_decoder import build_gpu_decoder
from tests.support.quantised_files import awq, quantise_checkpoint
from tests.support.tiny_models import save

# The multiprocessors of the device that configurations are chosen for, an H200; its shared memory is the interpreter's.
HOPPER_SMS = 132
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, MAX_SEQS, MAX_TOKENS = 16, 64, 256, 70, 1100
# Lengths around every threshold, and some that no power of two divides.
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 100, 127, 128, 200, 255)
DRAWS = (
    SamplingParams(4, temperature=0.0),
    SamplingParams(4, temperature=0.7, seed=3),
    SamplingParams(4, temperature=0.7, top_k=5),
    SamplingParams(4, temperature=0.7, top_p=0.5),
    SamplingParams(4, temperature=0.0, logit_bias={3: 1.0}),
    SamplingParams(4, temperature=1.0, logit_bias={3: 1.0}),
    SamplingParams(4, temperature=1.0, min_p=0.1, logit_bias={3: 1.0}),
)


@contextlib.contextmanager
def launch_keys() -> Iterator[set[str]]:
    """Yields a set that fills with the keys under which Triton caches kernels that are "launched" meanwhile."""
    found: set[str] = set()

    def keep_key(_run: Any, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binder = kernel.device_caches[0][-1]
        _, specialization, resolved = binder(*args, **options, debug=False)
        found.add(f"{kernel.fn.__module__}.{kernel.fn.__name__} {specialization} {resolved}")

    with launches_go_to(keep_key):
        yield found


def plans(generator: random.Random) -> Iterator[StepPlan]:
    """Decodes alone for every number of sequences, then decodes beside prompts of all lengths."""
    for count in range(1, MAX_SEQS + 1):
        draws = generator.choices(DRAWS, k=count) if count % 3 else [DRAWS[count % len(DRAWS)]] * count
        yield StepPlan(0, [chunk(generator, 1, sampling) for sampling in draws])
    for length in LENGTHS:
        for count in (0, 1, 5, 33):
            ending = generator.choice((None, *DRAWS))
            prompts = [chunk(generator, length, ending)]
            total = count + length
            while generator.random() < 0.7 and total + LENGTHS[-1] <= MAX_TOKENS:
                other = generator.choice(LENGTHS)
                prompts.append(chunk(generator, other, generator.choice((None, *DRAWS))))
                total += other
            yield StepPlan(0, [chunk(generator, 1, generator.choice(DRAWS)) for _ in range(count)] + prompts)
    # Experts by every kind of configuration, and all rows of a prompt wanted.
    for total in (300, 512, 513, 700, 1024, 1025, MAX_TOKENS):
        lengths = [min(MAX_LEN, total - done) for done in range(0, total, MAX_LEN)]
        yield StepPlan(0, [chunk(generator, length, DRAWS[0]) for length in lengths])
    whole = chunk(generator, 40, DRAWS[0])
    whole.extras = ChunkExtras(prompt_targets=array("i", [1] * 40))
    yield StepPlan(0, [whole])


def chunk(generator: random.Random, length: int, sampling: SamplingParams | None) -> Chunk:
    start = generator.randrange(MAX_LEN - length + 1)
    blocks = array("i", (generator.randrange(NUM_BLOCKS) for _ in range(-(-(start + length) // BLOCK_SIZE))))
    return Chunk("", array("i", (generator.randrange(128) for _ in range(length))), start, blocks, sampling)


def main(cases: list[str]) -> None:
    choose_for_hopper()
    for case in cases:
        name, quantization, kv = case.split(":") if ":" in case else (case, "none", "auto")
        with tempfile.TemporaryDirectory() as folder:
            save(name, Path(folder))
            if quantization == "awq":
                quantise_checkpoint(Path(folder), *awq(32), is_of_last_experts)
                quantization = "none"
            spec = build_spec(load_config(Path(folder)))
            rounding = rounding_on_gpu(spec, read_index(Path(folder)))
            shapes = shapes_of_experts(Path(folder), spec, DTYPE, rounding)
            storage = expert_storage(spec, DTYPE, quantization, shapes)
            for way in ("graphs", "eager") if spec.moe is None else ("graphs", "eager", "slots"):
                experts = open_experts(Path(folder), spec, storage, rounding, shapes) if way == "slots" else None
                kv_dtype, eager = kv_dtype_of(kv), way != "graphs"
                started, served = keys_of(Path(folder), spec, storage, rounding, kv_dtype, experts, eager=eager)
                if experts is not None:
                    assert experts.memory.stats().counters.num_evictions
                    experts.memory.close()
                print(f"{case} {way}: {len(started)} at start")
                for key in sorted(served - started):
                    print(f"NEW {key}")


def is_of_last_experts(name: str) -> bool:
    return ".2.mlp.experts" in name


def open_experts(
    folder: Path, spec: DecoderSpec, storage: WeightStorage, rounding: Rounding, shapes: Sequence[ExpertShape]
) -> GpuResidentModel:
    """Half of the experts have a slot, or as many as a token may choose."""
    assert spec.moe is not None
    num_slots = max(spec.moe.num_experts // 2, spec.moe.gate.top_k)
    size = num_slots * len(spec.moe_layers) * round_to_page(slot_layouts(spec, DTYPE, storage, shapes).num_bytes)
    plan = plan_gpu_residency(spec, DTYPE, size, storage, rounding=rounding, shapes=shapes)
    assert plan is not None
    settings = GpuExpertSettings(size, 2**30, "lru", None)
    configs = expert_configs(spec, storage, CPU)
    return open_gpu_experts(folder, plan, settings, CPU, MAX_TOKENS, silent, configs)


def choose_for_hopper() -> None:
    """Rather than for the few processors that the interpreter makes up."""
    vars(moeserve.model.gpu.batches)["multiprocessors_of"] = lambda _: HOPPER_SMS


@contextlib.contextmanager
def gates_at_random() -> Iterator[None]:
    """No gate computes anything here, but the host looks at what it chose."""
    operations = vars(kernels.gpu.ops)
    plain = operations["select_experts"]

    def select(logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = plain(logits, *args, **kwargs)
        return ids.copy_(torch.rand(logits.shape).argsort(1)[:, : ids.shape[1]]), weights

    operations["select_experts"] = select
    try:
        yield
    finally:
        operations["select_experts"] = plain


@torch.inference_mode()
def keys_of(
    folder: Path,
    spec: DecoderSpec,
    storage: WeightStorage,
    rounding: Rounding,
    kv_dtype: torch.dtype | None,
    experts: GpuResidentModel | None,
    *,
    eager: bool,
) -> tuple[set[str], set[str]]:
    """The keys of starting up and the keys of serving. experts: not all of them have a slot."""
    dtype, configs = DTYPE, expert_configs(spec, storage, CPU)
    decoder = build_gpu_decoder(
        folder,
        spec,
        dtype=dtype,
        device=CPU,
        max_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        configs=configs,
        experts=experts,
        storage=storage,
        rounding=rounding,
    )
    pool = KVPool(spec.kv_layers, NUM_BLOCKS, BLOCK_SIZE, kv_dtype or dtype, CPU)
    states = StatePool(spec.state_layers, 1, dtype, CPU) if spec.state_layers else None
    pools = pools_by_layer(spec, pool.layers, states)
    limits = native_limits(spec, BLOCK_SIZE, MAX_LEN, dtype, CPU, kv_dtype=kv_dtype)
    batches = StepBatches(limits, MAX_SEQS)
    steps = StepLimits(MAX_TOKENS, MAX_SEQS, MAX_LEN)
    variants = launch_variants(limits, configs, steps, keeps_stored=rounding.keeps_stored)
    heard = HeardDecoder(decoder, pools)
    decode = None if eager else DecodeSteps(heard, limits, capture_sizes(MAX_SEQS))
    with gates_at_random(), launch_keys() as started:
        launch_all_variants(decoder, pools, batches, variants, BLOCK_SIZE)
        for size in capture_sizes(MAX_SEQS) if decode is not None else ():
            assert decode is not None
            decode.run(blank_arrays(StepShape(size, (), size), BLOCK_SIZE, spec.vocab_size), None, size)
    runner = GpuModelRunner(heard, pool, batches, decode=decode)
    with gates_at_random(), launch_keys() as served:
        for plan in plans(random.Random(5)):
            runner.launch(plan)
    return started, served


if __name__ == "__main__":
    main(sys.argv[1:])
