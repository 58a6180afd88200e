"""A tiny model on a GPU's runner with fewer slots than experts, and what it computes in a few steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from experts.memory.file import round_to_page
from experts.observer import AnyObserver
from experts.routing.gates import FittedGates
from moeserve.device import KvBudget
from moeserve.engine.experts.gpu_memory import (
    GpuExpertSettings,
    GpuResidentModel,
    open_gpu_experts,
    plan_gpu_residency,
    slot_layouts,
)
from moeserve.engine.experts.prefetch import start_prefetching
from moeserve.engine.rank import ObservedRunner
from moeserve.model.gpu.kernels import expert_storage
from moeserve.model.gpu.model import GpuSettings, make_runner
from moeserve.model.rounding import NO_ROUNDING, Rounding
from moeserve.model.spec import DecoderSpec, silent
from moeserve.plan import Chunk, ChunkResult, SamplingParams, StepPlan
from tests.support.gpu_decoder import build_gpu_decoder

BLOCK_SIZE, MAX_LEN, MAX_TOKENS = 4, 32, 16
SETTINGS = GpuSettings(BLOCK_SIZE, 4, MAX_TOKENS, MAX_LEN, None, 0.9, enforce_eager=True)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, logprobs=3)
PROMPTS = ([3, 14, 15, 92, 65, 35, 89], [27, 18, 41])
TABLES = ([1, 4, 6], [3, 0, 2])
NUM_DECODES = 1
DTYPE = torch.float32


def prompt_chunks() -> list[Chunk]:
    return [
        Chunk(str(number), array("i", prompt), 0, array("i", table), GREEDY)
        for number, (prompt, table) in enumerate(zip(PROMPTS, TABLES, strict=True))
    ]


def following(chunks: Sequence[Chunk], results: Sequence[ChunkResult]) -> list[Chunk]:
    """Each request's next token."""
    return [
        Chunk(
            chunk.request_id,
            array("i", [result.token_id or 0]),
            chunk.start + len(chunk.token_ids),
            chunk.block_table,
            GREEDY,
        )
        for chunk, result in zip(chunks, results, strict=True)
    ]


def generate(
    model_dir: Path,
    spec: DecoderSpec,
    device: torch.device,
    experts: GpuResidentModel | None,
    prefetch: str = "off",
    fitted: FittedGates | None = None,
    quantization: str = "none",
    observers: list[AnyObserver] | None = None,
) -> list[list[ChunkResult]]:
    """The results of a step of prompts and some steps of decodes. observers: the list of `experts`, to be completed."""
    observers = [] if observers is None else observers
    decoder = build_gpu_decoder(
        model_dir,
        spec,
        dtype=DTYPE,
        device=device,
        max_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        experts=experts,
        observers=observers,
        storage=expert_storage(spec, DTYPE, quantization),
    )
    rank = ObservedRunner(make_runner(decoder, KvBudget(8, MAX_LEN), SETTINGS), observers)
    if experts is not None:
        prefetching = start_prefetching(prefetch, experts, decoder, fitted=fitted)
        observers.extend(() if prefetching is None else prefetching.observers)
    chunks, results = prompt_chunks(), []
    for step in range(1 + NUM_DECODES):
        results.append(rank.launch(StepPlan(step, chunks)).result().chunks)
        chunks = following(chunks, results[-1])
    return results


def open_experts(
    model_dir: Path,
    spec: DecoderSpec,
    device: torch.device,
    num_slots: int,
    host_bytes: int,
    store: Path,
    quantization: str = "none",
    observers: Sequence[AnyObserver] = (),
    compute: str = "copy",
    host: Rounding = NO_ROUNDING,
) -> GpuResidentModel:
    """Settings that pay for `num_slots` in each layer. compute: `--expert-compute`; the model does not share yet. host:
    how the host keeps experts that it computes."""
    storage = expert_storage(spec, DTYPE, quantization)
    size = num_slots * len(spec.moe_layers) * round_to_page(slot_layouts(spec, DTYPE, storage).num_bytes)
    plan = plan_gpu_residency(spec, DTYPE, size, storage)
    assert plan is not None
    assert set(plan.slots.num_slots) == {num_slots}
    settings = GpuExpertSettings(size, host_bytes, "lru", store)
    if compute != "copy":
        settings = replace(settings, compute=compute, host=lambda: host)
    return open_gpu_experts(model_dir, plan, settings, device, MAX_TOKENS, silent, observers=observers)
