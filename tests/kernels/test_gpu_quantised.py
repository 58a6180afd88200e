"""Quantised experts and fp8 keys and values change stored values and nothing else: the rest is as on a CPU."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels.ops
from kernels.gpu.moe_config import WeightStorage
from kernels.gpu.moe_weights import store_weights
from moeserve.config import ConfigError
from moeserve.model.decoder import Decoder
from moeserve.model.gpu.kernels import expert_storage
from moeserve.model.kv_pool import KVPool, kv_block_bytes
from tests.support.checkpoints import change_tensors, load, spec_of
from tests.support.gpu_decoder import build_gpu_decoder
from tests.support.gpu_logits import MAX_LEN, MAX_TOKENS, cpu_logits, difference, gpu_logits, two_requests
from tests.support.tiny_models import CASES, save

pytestmark = pytest.mark.kernel_change

FP8 = torch.float8_e4m3fn


def gpu_decoder(directory: Path, device: torch.device, quantization: str = "none") -> Decoder:
    spec = spec_of(directory)
    storage = expert_storage(spec, torch.float32, quantization)
    limits = {"max_tokens": MAX_TOKENS, "max_model_len": MAX_LEN}
    return build_gpu_decoder(directory, spec, dtype=torch.float32, device=device, storage=storage, **limits)


def replace_experts(directory: Path, storage: WeightStorage) -> None:
    """Puts into the checkpoint what the quantised weights of its experts stand for."""

    def stand_for(weights: Tensor) -> Tensor:
        """[E, N, K], whose last dimension is the one summed over."""
        return store_weights(weights.contiguous(), storage).expanded()

    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".experts." not in name or "bias" in name:
                continue
            if tensor.dim() == 2:
                tensors[name] = stand_for(tensor[None])[0]
            else:
                tensors[name] = stand_for(tensor.transpose(1, 2)).transpose(1, 2)

    change_tensors(directory, change)


@pytest.mark.parametrize(
    ("case", "quantization", "limit"),
    [("gpt_oss", "int8", 0.02), ("qwen3_moe", "fp8", 0.05), ("qwen3_moe", "int4", 0.15)],
)
def test_quantised_experts_compute_with_the_weights_that_they_stand_for(
    case: str, quantization: str, limit: float, device: torch.device, tmp_path: Path
) -> None:
    save(case, tmp_path)
    requests = two_requests()
    full = cpu_logits(load(tmp_path), requests)
    found = gpu_logits(gpu_decoder(tmp_path, device, quantization), requests)
    replace_experts(tmp_path, expert_storage(spec_of(tmp_path), torch.float32, quantization))
    assert difference(found, cpu_logits(load(tmp_path), requests)) < 1e-5
    whole = torch.cat(full)
    error = ((torch.cat(found) - whole).norm() / whole.norm()).item()
    assert 1e-3 < error < limit


@pytest.mark.parametrize(
    ("case", "quantization", "reason"),
    [("llama", "int8", "has no experts"), ("mixtral-odd", "int4", "groups of 32 values divide")],
)
def test_what_cannot_be_quantised_is_one_sentence(
    case: str, quantization: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "mixtral-odd", ("Mixtral", {"num_local_experts": 2, "intermediate_size": 80}))
    save(case, tmp_path)
    with pytest.raises(ConfigError, match=rf"^--quantization experts={quantization}: .*{reason}[^.]*\.$"):
        expert_storage(spec_of(tmp_path), torch.bfloat16, quantization)


@pytest.mark.parametrize("case", ["mixtral-window", "deepseek_v3-yarn"])
def test_keys_and_values_in_fp8_are_those_of_a_cpu_rounded_when_they_are_stored(
    case: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(case, tmp_path)
    # Some keys and values go beyond what fp8 reaches.
    change_tensors(tmp_path, _enlarge_keys_and_values)
    requests = two_requests()
    full = cpu_logits(load(tmp_path), requests)
    found = gpu_logits(gpu_decoder(tmp_path, device), requests, FP8)
    largest = _round_what_is_stored(monkeypatch)
    expected = cpu_logits(load(tmp_path), requests)
    assert max(largest) > 448
    assert difference(found, expected) < 1e-4
    assert difference(found, full) > 1e-2


def _enlarge_keys_and_values(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith(("k_proj.weight", "v_proj.weight", "kv_a_layernorm.weight")):
            tensors[name] = tensor * 200


def _round_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Has the CPU's attention keep keys and values as fp8 would; the largest that came, per write."""
    largest: list[float] = []

    def rounding(store: Callable[..., Tensor | None], first_pool: int, slots_at: int) -> Callable[..., Tensor | None]:
        def call(*arguments: Tensor, **options: object) -> Tensor | None:
            result = store(*arguments, **options)
            for pool in arguments[first_pool : first_pool + 2]:
                if pool is not None:
                    written = pool[:, arguments[slots_at]]
                    largest.append(written.abs().max().item())
                    pool[:, arguments[slots_at]] = written.clamp(-448, 448).to(FP8).to(pool.dtype)
            return result

        return call

    # Attention as one call of the compiled kernels stores without asking these functions.
    monkeypatch.setattr("moeserve.model.decoder.attention_block", lambda _: None)
    monkeypatch.setattr(kernels.ops, "rotate_and_store", rounding(kernels.ops.rotate_and_store, 4, 3))
    monkeypatch.setattr(kernels.ops, "write_kv", rounding(kernels.ops.write_kv, 0, 2))
    return largest


def test_blocks_in_fp8_take_half_the_memory_and_are_cleared(device: torch.device, tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    layers = spec_of(tmp_path).kv_layers
    assert kv_block_bytes(layers, 16, FP8) * 2 == kv_block_bytes(layers, 16, torch.bfloat16)
    pool = KVPool(layers, 3, 4, FP8, device)
    keys, values = pool.layers[0]
    assert values is not None
    for part in (keys, values):
        part.copy_(torch.full(part.shape, torch.nan))
    pool.zero_blocks(array("i", [1]))
    for part in (keys, values):
        blocks = part.float().unflatten(1, (3, 4)).transpose(0, 1).cpu()
        assert not blocks[1].any()
        assert blocks[[0, 2]].isnan().all()
