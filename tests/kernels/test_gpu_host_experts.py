"""Experts that lie in the host's memory and are computed there, or copied: the tokens of a GPU that holds them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from experts.memory.file import round_to_page
from experts.memory.host_share import HostCosts, HostShare
from kernels.cpu.library import native_kernels_absence
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.experts import host_experts
from moeserve.engine.experts.gpu_memory import slot_layouts
from moeserve.engine.experts.host_experts import HostExperts
from moeserve.engine.gpu_body import gpu_expert_settings
from moeserve.model.families import build_spec, load_config
from moeserve.model.rounding import Rounding
from moeserve.model.spec import DecoderSpec
from moeserve.plan import ChunkResult
from tests.support.gpu_experts import DTYPE, generate, open_experts
from tests.support.quantised_files import mxfp4, quantise_checkpoint
from tests.support.tiny_models import build, save

pytestmark = [
    pytest.mark.kernel_change,
    pytest.mark.skipif(native_kernels_absence() is not None, reason="the host computes with compiled kernels"),
]
MODELS = ("qwen3_moe", "gpt_oss")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in folders.items():
        save(name, folder)
    return folders


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], device: torch.device) -> dict[str, list[list[ChunkResult]]]:
    """With all experts in the device's memory."""
    return {name: generate(folder, spec_of(folder), device, None) for name, folder in models.items()}


def spec_of(folder: Path) -> DecoderSpec:
    return build_spec(load_config(folder))


def assert_equal_but_for_rounding(found: list[list[ChunkResult]], expected: list[list[ChunkResult]]) -> None:
    for step, of_step in zip(found, expected, strict=True):
        assert [result.token_id for result in step] == [result.token_id for result in of_step]
        for result, other in zip(step, of_step, strict=True):
            assert result.logprobs is not None
            assert other.logprobs is not None
            assert result.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)


class EveryOther(HostShare):
    """Has the host compute every other absent expert of an event, whatever this machine measures."""

    def _share_out(
        self, layer: int, absent: Sequence[int], num_rows: Mapping[int, int], copy_seconds: float
    ) -> frozenset[int]:
        return frozenset(absent[::2])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compute", ["copy", "host", "auto"])
def test_tokens_do_not_depend_on_where_experts_are_computed(
    models: dict[str, Path],
    device: torch.device,
    expected: dict[str, list[list[ChunkResult]]],
    tmp_path: Path,
    name: str,
    compute: str,
) -> None:
    folder = models[name]
    spec = spec_of(folder)
    assert spec.moe is not None
    experts = open_experts(folder, spec, device, spec.moe.gate.top_k, 2**30, tmp_path, compute=compute)
    try:
        experts.share()
        assert_equal_but_for_rounding(generate(folder, spec, device, experts), expected[name])
        stats = experts.memory.stats()
        assert (stats.counters.num_elsewhere > 0) == (compute == "host") or compute == "auto"
        assert (stats.counters.demand_bytes > 0) == (compute == "copy") or compute == "auto"
        assert (stats.costs is None) == (compute == "copy")
    finally:
        experts.memory.close()


@pytest.mark.parametrize("num_slots", [3, 6])
def test_a_step_whose_experts_are_partly_copied_and_partly_computed_by_the_host_gives_the_same_tokens(
    models: dict[str, Path],
    device: torch.device,
    expected: dict[str, list[list[ChunkResult]]],
    tmp_path: Path,
    num_slots: int,
) -> None:
    folder = models["gpt_oss"]
    spec = spec_of(folder)
    assert spec.moe is not None
    experts = open_experts(folder, spec, device, num_slots, 2**30, tmp_path, compute="auto")
    costs = HostCosts(1e-4, [(1, 1e-4)])
    try:
        experts.memory.share_with_host(EveryOther(experts.control, spec.moe.num_experts, costs, waits_for_copies=True))
        assert_equal_but_for_rounding(generate(folder, spec, device, experts), expected["gpt_oss"])
        counters = experts.memory.stats().counters
        assert 0 < counters.num_elsewhere < counters.num_misses
        assert experts.memory.host_seconds > 0
    finally:
        experts.memory.close()


def test_rows_of_other_ranks_and_more_rows_than_are_computed_at_once_are_summed_as_on_the_device(
    models: dict[str, Path], device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models["qwen3_moe"]
    spec = spec_of(folder)
    assert spec.moe is not None
    monkeypatch.setattr(host_experts, "_PAIRS_AT_ONCE", 4)
    torch.manual_seed(0)
    num_rows, top_k = 9, spec.moe.gate.top_k
    x = torch.randn((num_rows, spec.hidden_size), device=device)
    ids = torch.stack([torch.randperm(spec.moe.num_experts)[:top_k] for _ in range(num_rows)])
    # These experts are on another rank: of one row all are.
    ids[ids % 3 == 0] = -1
    ids[4] = -1
    weights, found = torch.rand(ids.shape, device=device), []
    for compute in ("copy", "host"):
        experts = open_experts(folder, spec, device, top_k, 2**30, tmp_path, compute=compute)
        try:
            experts.share()
            layer = experts.layers[spec.moe_layers[0]]
            found.append(layer.partial(x, ids.to(device), weights, None, spec.moe.activation))
            assert (experts.memory.stats().counters.num_elsewhere > 0) == (compute == "host")
        finally:
            experts.memory.close()
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def test_a_host_that_fails_fails_the_step_and_not_the_next_one(
    models: dict[str, Path],
    device: torch.device,
    expected: dict[str, list[list[ChunkResult]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = models["qwen3_moe"]
    spec = spec_of(folder)
    assert spec.moe is not None
    experts = open_experts(folder, spec, device, spec.moe.gate.top_k, 2**30, tmp_path, compute="host")
    try:
        experts.share()
        with monkeypatch.context() as patched:
            patched.setattr(HostExperts, "_compute", failing)
            with pytest.raises(ValueError, match="expert 1 is not here"):
                generate(folder, spec, device, experts)
        assert_equal_but_for_rounding(generate(folder, spec, device, experts), expected["qwen3_moe"])
    finally:
        experts.memory.close()


def failing(*_: object) -> None:
    raise ValueError("expert 1 is not here")


def test_a_host_without_the_memory_is_refused_alone_and_told_where_it_may_copy(
    models: dict[str, Path], device: torch.device, tmp_path: Path
) -> None:
    folder = models["qwen3_moe"]
    spec = spec_of(folder)
    assert spec.moe is not None
    num_bytes = spec.moe.num_experts * len(spec.moe_layers) * round_to_page(slot_layouts(spec, DTYPE).num_bytes)
    with pytest.raises(ConfigError, match=r"--expert-compute host: the host needs .* and may take"):
        open_experts(folder, spec, device, 3, 1, tmp_path, compute="host")
    experts = open_experts(folder, spec, device, 3, num_bytes, tmp_path, compute="auto")
    try:
        assert experts.reads["compute"] == "copy"
        assert "the host needs" in experts.reads["reason"]
        assert experts.tier == "host memory"
    finally:
        experts.memory.close()


def test_the_host_keeps_a_packed_checkpoint_packed_and_gives_the_tokens_of_a_device_that_widens_it(
    device: torch.device, tmp_path: Path
) -> None:
    build("mixtral", intermediate_size=128).save_pretrained(tmp_path)
    quantise_checkpoint(tmp_path, *mxfp4())
    spec = spec_of(tmp_path)
    assert spec.moe is not None
    expected = generate(tmp_path, spec, device, None)
    config = ServeConfig(device="cuda", dtype="float32", expert_memory=1)
    settings = gpu_expert_settings(tmp_path, spec, config)
    assert settings is not None
    host, num_slots = settings.host(), spec.moe.gate.top_k
    assert isinstance(host, Rounding)
    assert host.keeps_stored
    assert not host.rounds_rows, "the device does not round rows to 8 bits"
    experts = open_experts(tmp_path, spec, device, num_slots, 2**30, tmp_path / "store", compute="host", host=host)
    try:
        experts.share()
        assert_equal_but_for_rounding(generate(tmp_path, spec, device, experts), expected)
        kept = experts.layers[0]._host
        assert kept is not None
        packed = kept._experts.packed(0)
        assert packed is not None
        assert len(packed) * 4 < slot_layouts(spec, DTYPE).num_bytes
    finally:
        experts.memory.close()
