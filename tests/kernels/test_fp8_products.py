"""Weights in FP8 multiply activations that are rounded to FP8, where a checkpoint's makers round them too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.gpu.moe import MoeWorkspace, SlotExperts, SlotLayout, TritonMoe
from kernels.gpu.moe_config import MoeConfig, Tile, WeightStorage
from kernels.gpu.packed_linear import FEW_ROWS, PackedLinear
from kernels.gpu.packed_rows import packed_form, rounded_to_fp8
from kernels.packed_experts import ExpertShape
from kernels.specs import Activation
from kernels.weight_formats import FP8, FP8_BLOCK, Q8_0
from tests.support.quantised_files import deepseek, quantise_checkpoint
from tests.support.quantised_rows import random_rows
from tests.support.tiny_models import build

pytestmark = pytest.mark.kernel_change


def test_activations_are_rounded_by_token_and_128_columns() -> None:
    x = torch.zeros(2, 256)
    x[0, 0], x[0, 1], x[0, 128] = 448.0, 1.01, 1.01
    rounded = rounded_to_fp8(x)
    # Numbers of e4m3 near 1 are an eighth apart; beside no greater one a number is the greatest of its group.
    assert (rounded[0, 0], rounded[0, 1]) == (448.0, 1.0)
    torch.testing.assert_close(rounded[0, 128], torch.tensor(1.01))
    assert not rounded[1].any()
    assert (rounded_to_fp8(torch.randn(3, 256)) - torch.randn(3, 256)).isfinite().all()


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS + 1])
def test_products_are_those_of_rounded_activations(num_rows: int, device: torch.device) -> None:
    torch.manual_seed(0)
    rows, bias = random_rows(FP8_BLOCK, 40, 512), torch.randn(40)
    x = torch.randn(num_rows, 512)
    linear = PackedLinear(rows, bias, torch.float32, device, fp8_products=True)
    found = linear(x.to(device)).cpu()
    wanted = rounded_to_fp8(x) @ rows.dequantise().T + bias
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    widened = PackedLinear(rows, bias, torch.float32, device)(x.to(device)).cpu()
    assert 1e-3 < (found - widened).abs().max() / wanted.abs().max() < 0.1
    # A row's bits do not depend on the rows beside it, if the tile is the same.
    assert torch.equal(linear(x[-1:].repeat(num_rows, 1).to(device)).cpu()[:1], found[-1:])


def test_only_blocks_of_128_columns_multiply_in_fp8() -> None:
    forms = [packed_form(form, 256, fp8_products=True) for form in (FP8_BLOCK, FP8, Q8_0)]
    assert [form.in_fp8 for form in forms] == [True, False, False]
    assert forms[0] != packed_form(FP8_BLOCK, 256)
    assert forms[0].row_bytes == packed_form(FP8_BLOCK, 256).row_bytes


def test_experts_round_their_input_and_what_is_between_their_projections(device: torch.device) -> None:
    torch.manual_seed(0)
    hidden, width, num_experts, num_tokens = 256, 128, 3, 5
    shape = ExpertShape(hidden, width, torch.float32, torch.bfloat16, formats=(FP8_BLOCK, FP8_BLOCK))
    layout = SlotLayout(shape, WeightStorage("packed_float32", fp8_products=True))
    matrices = [
        (random_rows(FP8_BLOCK, 2 * width, hidden), random_rows(FP8_BLOCK, hidden, width)) for _ in range(num_experts)
    ]
    tile = Tile(32, 32, 1, 4, 2)
    workspace = MoeWorkspace.allocate(num_tokens, 2, num_experts, hidden, width, torch.float32, device)
    moe = TritonMoe(lambda _: MoeConfig(16, tile, tile), workspace)
    arena = torch.zeros((num_experts, layout.num_bytes), dtype=torch.uint8, device=device)
    for slot, (up, down) in enumerate(matrices):
        arena[slot].copy_(layout.pack((up, down, None, None)))
    experts = SlotExperts(layout, arena, num_experts, moe)
    experts.show(range(num_experts))
    x, ids = torch.randn(num_tokens, hidden), torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]])
    products = torch.zeros(num_tokens, 2, hidden, device=device)
    experts.multiply(x.to(device), ids.to(device), Activation(), products)
    wide = [(up.dequantise(), down.dequantise()) for up, down in matrices]
    wanted = torch.stack(
        [torch.stack([expert(row, *wide[place]) for place in chosen]) for row, chosen in zip(x, ids, strict=True)]
    )
    # A sum in another order may round to the next number of e4m3.
    assert (products.cpu() - wanted).abs().max() < 0.02 * wanted.abs().max()
    assert (products.cpu() - wanted).abs().mean() < 1e-3 * wanted.abs().mean()


def expert(row: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, linear = (rounded_to_fp8(row[None]) @ up.T).chunk(2, 1)
    return (rounded_to_fp8(torch.nn.functional.silu(gate) * linear) @ down.T)[0]


@pytest.mark.parametrize(
    ("settings", "changes", "expected"),
    [
        ({}, {}, True),
        ({"arithmetic": "exact"}, {}, False),
        ({"dtype": "float32"}, {}, False),
        ({}, {"activation_scheme": "static"}, False),
    ],
    ids=["as the makers", "exact", "float32", "static"],
)
def test_a_service_multiplies_in_fp8_as_the_makers_of_a_checkpoint_do_unless_told(
    settings: dict[str, Any],
    changes: dict[str, Any],
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planning = pytest.importorskip("moeserve.engine.memory_plan", reason="nothing that serves is installed")
    from moeserve.config import ServeConfig

    build("mixtral", intermediate_size=128, num_hidden_layers=1, num_local_experts=3).save_pretrained(tmp_path)
    quantise_checkpoint(tmp_path, *deepseek(128, 128))
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))
    monkeypatch.setattr(planning, "cuda_absence", lambda needs_fp8: None)
    monkeypatch.setattr(planning, "current_gpu", lambda: torch.device("cpu"))
    plan = planning.plan_model(tmp_path, ServeConfig(model=str(tmp_path), device="cuda", **settings))
    assert plan.rounding.fp8_products == expected
