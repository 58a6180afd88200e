"""Quantised weights stay in their bits on a GPU, and stand for the values that a CPU widens them to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.gpu.moe import MoeWorkspace, SlotExperts, SlotLayout, TritonMoe
from kernels.gpu.moe_config import MoeConfig, Tile, WeightStorage
from kernels.gpu.packed_linear import FEW_ROWS, PackedLinear, PackedTable
from kernels.gpu.packed_rows import packed_form
from kernels.moe import moe_experts_reference
from kernels.ops import CpuOps
from kernels.packed_experts import ExpertShape
from kernels.specs import Activation
from kernels.weight_formats import FORMATS, FP8, INT4_F16, MXFP4, Q4_K, Q5_0, Q6_K, Q8_0, WeightFormat
from moeserve.model.checkpoint import read_index
from moeserve.model.weights import load_decoder
from tests.support.checkpoints import load, spec_of
from tests.support.gpu_decoder import build_gpu_decoder
from tests.support.gpu_logits import MAX_LEN, MAX_TOKENS, cpu_logits, difference, gpu_logits, two_requests
from tests.support.quantised_files import (
    Quantise,
    awq,
    compressed,
    deepseek,
    gptq,
    modelopt,
    mxfp4,
    quantise_checkpoint,
)
from tests.support.quantised_rows import random_rows
from tests.support.tiny_models import build

pytestmark = pytest.mark.kernel_change

NOTHING_SERVES = "nothing that serves is installed on this machine"

# Rows whose parts have 64, 32 and 16 weights.
DEPTHS = [(form, 256) for form in FORMATS.values()] + [(INT4_F16, 64), (FP8, 64), (Q5_0, 64)]


@pytest.mark.parametrize(("form", "depth"), DEPTHS, ids=str)
def test_unpacked_weights_have_the_bits_of_those_that_a_cpu_widens(
    form: WeightFormat, depth: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    rows = random_rows(form, 19, depth)
    table = PackedTable(rows, torch.float32, device)
    ids = torch.randint(0, 19, (21,))
    assert torch.equal(table(ids.to(device)).cpu(), rows.dequantise()[ids])
    rounded = PackedTable(rows, torch.bfloat16, device)(ids.to(device))
    assert torch.equal(rounded.cpu(), rows.dequantise()[ids].bfloat16())


def test_packed_rows_take_hardly_more_bytes_than_their_blocks() -> None:
    for form in FORMATS.values():
        # Scales of these have 6 bits in a file.
        most = 1.05 if form.name in ("q3_k", "iq4_xs") else 1.0
        assert packed_form(form, 2048).row_bytes <= most * form.row_bytes(2048), form


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS + 1])
@pytest.mark.parametrize("form", [Q4_K, Q6_K], ids=str)
def test_products_are_those_of_the_widened_weights(form: WeightFormat, num_rows: int, device: torch.device) -> None:
    torch.manual_seed(0)
    rows, bias = random_rows(form, 40, 512), torch.randn(40)
    x = torch.randn(num_rows, 512)
    found = PackedLinear(rows, bias, torch.float32, device)(x.to(device)).cpu()
    wanted = x @ rows.dequantise().T + bias
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


def test_columns_in_an_order_of_their_own_are_put_in_it(device: torch.device) -> None:
    torch.manual_seed(0)
    rows = random_rows(INT4_F16, 8, 64)
    rows = type(rows)(rows.format, rows.data, 64, torch.randperm(64))
    x, ids = torch.randn(3, 64), torch.tensor([5, 0])
    found = PackedLinear(rows, None, torch.float32, device)(x.to(device)).cpu()
    torch.testing.assert_close(found, x @ rows.dequantise().T)
    assert torch.equal(PackedTable(rows, torch.float32, device)(ids.to(device)).cpu(), rows.dequantise()[ids])


def test_packed_experts_in_slots_compute_with_the_widened_weights(device: torch.device) -> None:
    torch.manual_seed(0)
    hidden, width, num_experts, num_tokens = 64, 32, 3, 5
    shape = ExpertShape(hidden, width, torch.float32, torch.bfloat16, has_bias=True, formats=(MXFP4, Q8_0))
    layout = SlotLayout(shape, WeightStorage("packed_float32"))
    matrices = [(random_rows(MXFP4, 2 * width, hidden), random_rows(Q8_0, hidden, width)) for _ in range(num_experts)]
    biases = [(torch.randn(2 * width), torch.randn(hidden)) for _ in range(num_experts)]
    tile = Tile(32, 32, 1, 4, 2)
    workspace = MoeWorkspace.allocate(num_tokens, 2, num_experts, hidden, width, torch.float32, device)
    moe = TritonMoe(lambda _: MoeConfig(16, tile, tile), workspace)
    arena = torch.zeros((num_experts, layout.num_bytes), dtype=torch.uint8, device=device)
    for slot, (both, bias) in enumerate(zip(matrices, biases, strict=True)):
        arena[slot].copy_(layout.pack((*both, *bias)))
    experts = SlotExperts(layout, arena, num_experts, moe)
    experts.show(range(num_experts))
    x, ids = torch.randn(num_tokens, hidden), torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]])
    products = torch.zeros(num_tokens, 2, hidden, device=device)
    experts.multiply(x.to(device), ids.to(device), Activation(), products)
    weights = torch.rand(num_tokens, 2)
    wide = [torch.stack([both[place].dequantise() for both in matrices]) for place in range(2)]
    wide += [torch.stack([both[place] for both in biases]) for place in range(2)]
    wanted = moe_experts_reference(x, ids, weights, wide[0], wide[1], Activation(), wide[2], wide[3])
    found = experts.combine(products, weights.to(device)).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


@pytest.mark.parametrize(
    "layout",
    [
        gptq(4, 32, desc_act=True),
        awq(32),
        compressed("int-quantized", 8, 32, symmetric=False),
        deepseek(128, 128),
        mxfp4(),
        modelopt(),
    ],
    ids=["gptq with an order", "awq", "codes of 8 bits", "fp8", "mxfp4", "nvfp4"],
)
def test_other_quantised_checkpoints_compute_with_the_values_of_their_files(
    layout: tuple[dict[str, Any], Quantise], device: torch.device, tmp_path: Path
) -> None:
    sizes = {"intermediate_size": 128, "num_hidden_layers": 2, "num_local_experts": 3}
    build("mixtral", **sizes).save_pretrained(tmp_path)
    plain, requests = quantise_checkpoint(tmp_path, *layout), two_requests()
    spec = spec_of(tmp_path)
    rounding = pytest.importorskip("moeserve.engine.memory_plan", reason=NOTHING_SERVES).rounding_on_gpu(
        spec, read_index(tmp_path)
    )
    assert rounding.keeps_stored
    limits = {"max_tokens": MAX_TOKENS, "max_model_len": MAX_LEN}
    decoder = build_gpu_decoder(tmp_path, spec, dtype=torch.float32, device=device, rounding=rounding, **limits)
    # Experts whose columns have orders of their own are widened.
    has_order = layout[0].get("desc_act", False)
    assert all((experts.down.form is None) == has_order for experts in decoder.experts)
    assert difference(gpu_logits(decoder, requests), cpu_logits(load(plain), requests)) < 1e-5


def save_gguf(directory: Path) -> Path:
    """Save an MoE model as `Q4_K_M` files mix kinds: other ones for values than for queries, two for `down`."""

    pytest.importorskip("gguf", reason=NOTHING_SERVES)
    from gguf import GGMLQuantizationType as Kind

    from moeserve.model.gguf.folder import gguf_folder
    from tests.support.gguf_export import write_gguf

    def kind_of(name: str, _: object) -> Kind:
        if name == "output.weight" or any(part in name for part in ("attn_v", "blk.0.ffn_down")):
            return Kind.Q6_K
        return Kind.F32 if "ffn_gate_inp" in name else Kind.Q8_0 if "attn_k" in name else Kind.Q4_K

    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    model = build("qwen3_moe", **sizes, num_experts=4, num_hidden_layers=2, mlp_only_layers=[])
    write_gguf(directory / "tiny.gguf", "qwen3moe", model, kind_of)
    return gguf_folder(directory / "tiny.gguf", directory / "cache")


def test_a_gguf_model_computes_in_the_bits_of_its_file_as_a_cpu_in_exact_arithmetic(
    device: torch.device, tmp_path: Path
) -> None:
    folder, requests = save_gguf(tmp_path), two_requests()
    spec = spec_of(folder)
    rounding = pytest.importorskip("moeserve.engine.memory_plan", reason=NOTHING_SERVES).rounding_on_gpu(
        spec, read_index(folder)
    )
    limits = {"max_tokens": MAX_TOKENS, "max_model_len": MAX_LEN}
    decoder = build_gpu_decoder(folder, spec, dtype=torch.float32, device=device, rounding=rounding, **limits)
    assert {experts.down.form.name for experts in decoder.experts} == {"q6_k", "q4_k"}
    cpu = load_decoder(folder, spec, ops=CpuOps("exact"), max_model_len=MAX_LEN, rounding=rounding)
    assert difference(gpu_logits(decoder, requests), cpu_logits(cpu, requests)) < 1e-5
