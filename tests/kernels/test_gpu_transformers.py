"""Models on transformers' code give the logits of their own forward on a GPU, through paged memory full of NaN."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

from tests.support.gpu_logits import difference

TOLERANCE = 1e-4


@pytest.fixture
def tiny() -> ModuleType:
    """The models, whose assembling needs packages that a machine with kernels alone has not."""
    pytest.importorskip("structlog")
    from tests.support import gpu_transformers

    transformers.utils.logging.disable_progress_bar()
    return gpu_transformers


# Between them attention that is fused and that is not, windows, latent attention, states of each kind, norms that
# centre weights, and experts brought to the common form.
@pytest.mark.kernel_change
@pytest.mark.parametrize(
    "model_type",
    [
        "olmoe",
        "qwen3_moe",
        "afmoe",
        "gemma4",
        "mistral4",
        "kimi_linear",
        "jamba",
        "lfm2_moe",
        "granitemoehybrid",
        "dbrx",
    ],
)
def test_logits_equal_those_of_the_own_forward(
    model_type: str, tiny: ModuleType, device: torch.device, tmp_path: Path
) -> None:
    assert tiny.difference_of(model_type, tmp_path, device) <= TOLERANCE


@pytest.mark.long
def test_every_type_that_a_gpu_is_said_to_compute_is_at_parity(
    tiny: ModuleType, device: torch.device, tmp_path: Path
) -> None:
    assert tiny.types_that_differ(tmp_path, device, TOLERANCE) == []


@pytest.mark.kernel_change
@pytest.mark.parametrize(("model_type", "layout"), [("hunyuan_v1_moe", "gptq"), ("exaone_moe", "fp8")])
def test_a_quantised_checkpoint_stays_packed_and_gives_the_logits_of_its_values(
    model_type: str, layout: str, tiny: ModuleType, device: torch.device, tmp_path: Path
) -> None:
    plain = tiny.quantised(model_type, layout, tmp_path / "model")
    _, wide = tiny.load(plain, device)
    _, packed = tiny.load(tmp_path / "model", device)
    assert all(experts.gate_up.form is not None for experts in packed.experts)
    assert difference(tiny.logits_of(packed), tiny.logits_of(wide)) <= TOLERANCE


@pytest.mark.kernel_change
def test_in_bfloat16_logits_are_near_those_in_float32(tiny: ModuleType, device: torch.device, tmp_path: Path) -> None:
    assert 0 < tiny.difference_of("hunyuan_v1_moe", tmp_path, device, torch.bfloat16) <= 0.05
