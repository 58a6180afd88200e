"""A GPU's runner with fewer slots than experts: the same bits as with all of them, from host memory and from disk."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch

from experts.memory.expert_file import round_to_page
from moeserve.config import ConfigError
from moeserve.cuda.build import build_gpu_decoder
from moeserve.cuda.expert_memory import (
    GpuExpertSettings,
    GpuResidentModel,
    open_gpu_experts,
    plan_gpu_residency,
    slot_layout,
)
from moeserve.cuda.gpu_model import GpuSettings, make_runner
from moeserve.executor import LaunchingRunner
from moeserve.expert_service.prefetch import PrefetchingLauncher, start_prefetching
from moeserve.kv_budget import KvBudget
from moeserve.models.families import build_spec
from moeserve.models.hf_config import load_config
from moeserve.models.progress import silent
from moeserve.models.spec import DecoderSpec
from moeserve.plan import Chunk, ChunkResult, StepPlan
from moeserve.request import SamplingParams
from tests.support.tiny_models import save

BLOCK_SIZE, MAX_LEN, MAX_TOKENS = 4, 32, 16
SETTINGS = GpuSettings(BLOCK_SIZE, 4, MAX_TOKENS, MAX_LEN, None, 0.9, enforce_eager=True)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, logprobs=3)
PROMPTS = ([3, 14, 15, 92, 65, 35, 89], [27, 18, 41])
NUM_DECODES = 1
DTYPE = torch.float32


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases, and more experts wanted by a prompt than by a token."""
    directory = tmp_path_factory.mktemp("gpt_oss")
    save("gpt_oss", directory)
    return directory


@pytest.fixture(scope="module")
def spec(model_dir: Path) -> DecoderSpec:
    return build_spec(load_config(model_dir))


@pytest.fixture(scope="module")
def expected(model_dir: Path, spec: DecoderSpec, device: torch.device) -> list[list[ChunkResult]]:
    """With all experts in the device's memory."""
    return generate(model_dir, spec, device, None)


def generate(
    model_dir: Path, spec: DecoderSpec, device: torch.device, experts: GpuResidentModel | None, prefetch: str = "off"
) -> list[list[ChunkResult]]:
    """The results of a step of prompts and some steps of decodes."""
    decoder = build_gpu_decoder(
        model_dir, spec, dtype=DTYPE, device=device, max_tokens=MAX_TOKENS, max_model_len=MAX_LEN, experts=experts
    )
    runner: LaunchingRunner = make_runner(decoder, KvBudget(8, MAX_LEN), SETTINGS)
    if experts is not None and (listener := start_prefetching(prefetch, experts, decoder)) is not None:
        runner = PrefetchingLauncher(runner, listener)
    tables = [array("i", [1, 4, 6]), array("i", [3, 0, 2])]
    chunks = [
        Chunk(str(number), array("i", prompt), 0, tables[number], GREEDY) for number, prompt in enumerate(PROMPTS)
    ]
    results = []
    for step in range(1 + NUM_DECODES):
        results.append(runner.launch(StepPlan(step, chunks)).result().chunks)
        chunks = [
            Chunk(
                chunk.request_id, array("i", [result.token_id or 0]), chunk.start + len(chunk.token_ids), table, GREEDY
            )
            for chunk, result, table in zip(chunks, results[-1], tables, strict=True)
        ]
    return results


def open_experts(
    model_dir: Path, spec: DecoderSpec, device: torch.device, num_slots: int, host_bytes: int, store: Path
) -> GpuResidentModel:
    """Settings that pay for `num_slots` in each layer."""
    size = num_slots * len(spec.moe_layers) * round_to_page(slot_layout(spec, DTYPE).num_bytes)
    plan = plan_gpu_residency(spec, DTYPE, size)
    assert plan is not None
    assert set(plan.slots.num_slots) == {num_slots}
    settings = GpuExpertSettings(size, host_bytes, "lru", store, None)
    return open_gpu_experts(model_dir, spec, plan, settings, DTYPE, device, MAX_TOKENS, silent)


@pytest.mark.parametrize(
    ("num_slots", "host_bytes", "prefetch"),
    [(3, 2**30, "popularity+gate-early"), (6, 0, "gate")],
    ids=["host", "disk"],
)
def test_fewer_slots_than_experts_change_no_bit(
    model_dir: Path,
    spec: DecoderSpec,
    device: torch.device,
    expected: list[list[ChunkResult]],
    tmp_path: Path,
    num_slots: int,
    host_bytes: int,
    prefetch: str,
) -> None:
    experts = open_experts(model_dir, spec, device, num_slots, host_bytes, tmp_path)
    try:
        assert experts.tier.startswith("disk" if host_bytes == 0 else "host memory")
        assert generate(model_dir, spec, device, experts, prefetch) == expected
        stats = experts.memory.stats()
        assert stats.counters.num_evictions > 0
        assert stats.counters.num_misses > stats.counters.num_evictions
        assert (stats.predictor_seconds > 0) or prefetch == "gate"
    finally:
        experts.memory.close()


def test_memory_that_is_enough_or_too_little_is_told_at_once(spec: DecoderSpec) -> None:
    assert plan_gpu_residency(spec, DTYPE, 2**30) is None
    with pytest.raises(ConfigError, match="need 3 each: give at least"):
        plan_gpu_residency(spec, DTYPE, 1)
