"""A GPU's runner with fewer slots than experts: the same bits as with all of them, from host memory and from disk."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experts.observer import AnyObserver
from experts.routing.files import Tap
from experts.routing.gates import FittedGates, GatePreview, shared_state
from moeserve.config import ConfigError
from moeserve.device import KvBudget
from moeserve.engine.experts.gpu_memory import plan_gpu_residency
from moeserve.model.families import build_spec, load_config
from moeserve.model.gpu.model import make_runner
from moeserve.model.spec import DecoderSpec
from moeserve.model.weights import load_decoder
from moeserve.plan import ChunkResult, StepPlan
from tests.support.fitted_gates import some_gates
from tests.support.gpu_decoder import build_gpu_decoder
from tests.support.gpu_experts import (
    DTYPE,
    MAX_LEN,
    MAX_TOKENS,
    PROMPTS,
    SETTINGS,
    generate,
    open_experts,
    prompt_chunks,
)
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import save

pytestmark = pytest.mark.kernel_change

BUILDS_FILE = pytest.mark.skipif(find_spec("msgspec") is None, reason="an expert file is built with msgspec")


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


@pytest.mark.parametrize(
    ("num_slots", "host_bytes", "prefetch"),
    [
        pytest.param(3, 2**30, "affinity", id="host"),
        pytest.param(6, 0, "fitted", id="disk", marks=BUILDS_FILE),
    ],
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
    observers: list[AnyObserver] = []
    experts = open_experts(model_dir, spec, device, num_slots, host_bytes, tmp_path, observers=observers)
    try:
        assert experts.tier.startswith("disk" if host_bytes == 0 else "host memory")
        assert generate(model_dir, spec, device, experts, prefetch, some_gates(spec), observers=observers) == expected
        stats = experts.memory.stats()
        assert stats.counters.num_evictions > 0
        assert stats.counters.num_misses > 0
        # A GPU may want a layer's experts of this small model before the thread that copies has looked at all.
        assert stats.counters.prefetch_bytes > 0 or device.type == "cuda"
    finally:
        experts.memory.close()


@pytest.mark.parametrize(
    ("quantization", "host_bytes"),
    [pytest.param("int4", 2**30, id="host"), pytest.param("fp8", 0, id="disk", marks=BUILDS_FILE)],
)
def test_quantised_experts_in_fewer_slots_give_the_bits_of_all_quantised_when_loaded(
    model_dir: Path, spec: DecoderSpec, device: torch.device, tmp_path: Path, quantization: str, host_bytes: int
) -> None:
    expected = generate(model_dir, spec, device, None, quantization=quantization)
    experts = open_experts(model_dir, spec, device, 3, host_bytes, tmp_path, quantization)
    try:
        assert generate(model_dir, spec, device, experts, quantization=quantization) == expected
        assert experts.memory.stats().counters.num_evictions > 0
    finally:
        experts.memory.close()


def test_memory_that_is_enough_or_too_little_is_told_at_once(spec: DecoderSpec) -> None:
    assert plan_gpu_residency(spec, DTYPE, 2**30) is None
    with pytest.raises(ConfigError, match="need 3 each: give at least"):
        plan_gpu_residency(spec, DTYPE, 1)


class HeardPreviews(AnyObserver):
    """Keeps what gates of later layers say of what it observes, plain and fitted."""

    def __init__(self, decoder: Any, fitted: FittedGates) -> None:
        blocks, norms = zip(*decoder.gated_blocks(), strict=True)
        self._previews = {
            (tap, maps is None): GatePreview(blocks, norms, 2, tap, maps) for tap in Tap for maps in (None, fitted)
        }
        self._num_layers = len(blocks)
        self.said: dict[tuple[str, bool, int, int], Tensor] = {}

    def gated(self, layer: int, x: Tensor, _: Tensor) -> None:
        self._hear(Tap.EARLY, layer, x)

    def attended(self, layer: int, residual: Tensor, shared: Tensor | None) -> None:
        self._hear(Tap.SHARED, layer, shared_state(residual, shared))

    def _hear(self, tap: Tap, layer: int, state: Tensor) -> None:
        distances = range(1, min(2, self._num_layers - 1 - layer) + 1)
        if not distances:
            return
        for plain in (True, False):
            for distance, said in zip(distances, self._previews[tap, plain](layer, distances, state), strict=True):
                self.said[tap.value, plain, layer, distance] = torch.from_numpy(said)


def test_later_gates_say_of_the_states_on_a_gpu_what_they_say_on_a_cpu(
    model_dir: Path, spec: DecoderSpec, device: torch.device, tmp_path: Path
) -> None:
    fitted = some_gates(spec)
    experts = open_experts(model_dir, spec, device, 6, 2**30, tmp_path)
    observers: list[AnyObserver] = []
    try:
        decoder = build_gpu_decoder(
            model_dir,
            spec,
            dtype=DTYPE,
            device=device,
            max_tokens=MAX_TOKENS,
            max_model_len=MAX_LEN,
            experts=experts,
            observers=observers,
        )
        observers.append(on_gpu := HeardPreviews(decoder, fitted))
        make_runner(decoder, KvBudget(8, MAX_LEN), SETTINGS).launch(StepPlan(0, prompt_chunks())).result()
    finally:
        experts.memory.close()
    observers = []
    reference = load_decoder(model_dir, spec, dtype=DTYPE, max_model_len=MAX_LEN, observers=observers)
    observers.append(on_cpu := HeardPreviews(reference, fitted))
    PagedRunner(reference, PROMPTS).step([(number, 0, len(prompt)) for number, prompt in enumerate(PROMPTS)])
    assert on_gpu.said.keys() == on_cpu.said.keys()
    assert len(on_cpu.said) == 2 * 2 * 3
    for place, said in on_cpu.said.items():
        assert (on_gpu.said[place] - said).abs().max() <= 1e-4 * said.abs().max(), place
