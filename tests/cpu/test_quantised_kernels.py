"""Products with quantised weights against the same values in float32, and the independence of a row from its batch."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch import Tensor

from kernels.activation import Activation
from kernels.cpu.experts import PanelLayout
from kernels.cpu.library import native_kernels
from kernels.cpu.quantised import pack_rows, quantise
from kernels.linear import Linear, pack_linear
from kernels.moe import moe_experts_reference
from kernels.packed_experts import ExpertShape, PackedExperts
from kernels.weight_formats import (
    FORMATS,
    FP8,
    FP8_BLOCK,
    MXFP4,
    Q4_1,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    Arithmetic,
    QuantizedRows,
    WeightFormat,
)
from tests.support.quantised_rows import random_rows

NATIVE = native_kernels()
pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.skipif(NATIVE is None, reason="There are no compiled kernels."),
]
DEPTH = 512
every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
every_arithmetic = pytest.mark.parametrize("arithmetic", ["int8", "exact"])


@pytest.mark.parametrize("name", [name for name in FORMATS if name.upper() in gguf.GGMLQuantizationType.__members__])
def test_rows_of_gguf_have_the_values_that_its_own_package_reads(name: str) -> None:
    rows = random_rows(FORMATS[name], 40, DEPTH)
    wanted = gguf.dequantize(rows.data.numpy(), gguf.GGMLQuantizationType[name.upper()])
    assert torch.equal(rows.dequantise(), torch.from_numpy(wanted))


@every_format
def test_exact_products_have_the_bits_of_the_same_values_in_float32(form: WeightFormat) -> None:
    rows, x, bias = random_rows(form, 70, DEPTH), torch.randn(40, DEPTH), torch.randn(70)
    exact, wide = pack_quantized_linear(rows, bias, "exact"), pack_linear(rows.dequantise(), bias)
    for num_rows in (1, 2, 3, 4, 5, 13, 40):
        assert torch.equal(exact(x[:num_rows]), wide(x[:num_rows])), num_rows


def pack_quantized_linear(rows: QuantizedRows, bias: Tensor | None = None, arithmetic: Arithmetic = "int8") -> Linear:
    return pack_linear(rows, bias, arithmetic=arithmetic)


def in_new_order(rows: QuantizedRows) -> QuantizedRows:
    return QuantizedRows(rows.format, rows.data, rows.depth, torch.randperm(rows.depth))


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to 8 bits in blocks of 32: codes [T, G, 32] and scales [T, G]."""
    blocks = x.unflatten(1, (-1, 32))
    most = blocks.abs().amax(2)
    return (blocks * (127.0 / most).unsqueeze(2)).round(), most / 127.0


def in_blocks(x: Tensor) -> Tensor:
    """Return the values of rounded rows."""
    codes, scales = rounded(x)
    return (codes * scales.unsqueeze(2)).flatten(1)


def rows_for(form: WeightFormat, num_rows: int, depth: int, is_fine: bool) -> QuantizedRows:
    rows = random_rows(form, num_rows, depth)
    return rows.fine() if is_fine else rows


@every_format
@pytest.mark.parametrize("is_fine", [False, True])
def test_int8_products_sum_rounded_rows_times_the_weights(form: WeightFormat, is_fine: bool) -> None:
    rows, x = rows_for(form, 70, DEPTH, is_fine), torch.randn(9, DEPTH)
    if form in (FP8, FP8_BLOCK):
        values = x
    else:
        values = in_blocks(x)
        if rows.is_fine:
            unit = rounded(x)[1].unsqueeze(2) / 256
            values = values + (((x - values).unflatten(1, (-1, 32)) / unit).round().clamp(max=127) * unit).flatten(1)
            assert ((values - x).abs().amax(1) / x.abs().amax(1)).max() < 4e-5
    wanted = values.double() @ rows.dequantise().double().T
    got = pack_quantized_linear(rows, None, "int8")(x)
    # The rest of a number may be rounded to either of two codes.
    assert ((got - wanted).abs().max() / wanted.std()).item() < (1e-4 if rows.is_fine else 1e-5)


@every_format
@pytest.mark.parametrize(("arithmetic", "is_fine"), [("int8", False), ("int8", True), ("exact", False)])
def test_a_product_with_quantised_weights_has_the_same_bits_in_any_batch(
    form: WeightFormat, arithmetic: Arithmetic, is_fine: bool
) -> None:
    linear = pack_quantized_linear(rows_for(form, 48, 256, is_fine), None, arithmetic)
    x = torch.randn(300, 256)
    whole = linear(x)
    for _ in range(150):
        rows = torch.randperm(300)[: int(torch.randint(1, 40, ()))]
        assert torch.equal(linear(x[rows]), whole[rows])
    assert torch.equal(linear(x[:200]), whole[:200])


def test_a_row_has_the_same_bits_with_any_number_of_threads() -> None:
    linear, x = pack_quantized_linear(random_rows(Q4_K, 320, DEPTH)), torch.randn(33, DEPTH)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(linear(x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("form", [Q8_0, Q4_K, FORMATS["int4_f16"]], ids=lambda form: form.name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_beside_quantised_weights_a_row_that_is_not_finite_spoils_itself_alone(
    form: WeightFormat, value: float
) -> None:
    linear, x = pack_quantized_linear(random_rows(form, 32, 256)), torch.randn(5, 256)
    wanted = linear(x)
    x[2, 77] = value
    got = linear(x)
    assert not got[2].isfinite().any()
    assert torch.equal(got[[0, 1, 3, 4]], wanted[[0, 1, 3, 4]])


def test_rows_of_zeros_and_of_tiny_numbers_are_not_lost() -> None:
    rows = random_rows(Q8_0, 32, 64)
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e-30)])
    got = pack_quantized_linear(rows)(x)
    assert torch.equal(got[0], torch.zeros(32))
    torch.testing.assert_close(got[1], rows.dequantise().sum(1) * 1e-30, atol=0.0, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_to_8_bits_is_off_by_half_a_step(dtype: torch.dtype) -> None:
    assert NATIVE is not None
    weight = torch.randn(40, 96).to(dtype)
    blocks = quantise(weight, Q8_0, NATIVE).dequantise().view(40, 3, 32)
    wanted = weight.float().view(40, 3, 32)
    step = wanted.abs().amax(2, keepdim=True) / 127
    assert ((blocks - wanted).abs() <= 0.56 * step).all()  # The largest code of a block is 118 to 127.


@pytest.mark.parametrize("form", [Q4_1, Q4_K])
def test_rounding_to_4_bits_leaves_less_error_than_the_range_of_all_numbers(form: WeightFormat) -> None:
    assert NATIVE is not None
    weight, kind = torch.randn(64, 512), gguf.GGMLQuantizationType.Q4_1
    plain = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
    searched = quantise(weight, form, NATIVE).dequantise()
    assert (searched - weight).square().mean() < 0.9 * (plain - weight).square().mean()


@pytest.mark.parametrize(("form", "error"), [(Q8_0, 0.006), (Q4_1, 0.08), (Q4_K, 0.08), (Q5_K, 0.04), (Q6_K, 0.02)])
def test_rounding_leaves_the_error_of_its_bits_for_any_numbers(form: WeightFormat, error: float) -> None:
    assert NATIVE is not None
    weight = torch.randn(7, 1024)[:, :768]  # No row begins where another one ends.
    for numbers in (weight, weight.bfloat16().float(), weight - 1.0, 1e-3 * weight, weight.abs(), -weight.abs()):
        rounded = quantise(numbers, form, NATIVE).dequantise()
        assert (rounded - numbers).norm() < error * numbers.norm()
    assert torch.equal(quantise(weight[1:2], form, NATIVE).data, quantise(weight, form, NATIVE).data[1:2])
    assert torch.equal(
        quantise(weight.bfloat16(), form, NATIVE).data, quantise(weight.bfloat16().float(), form, NATIVE).data
    )
    assert not quantise(torch.zeros(2, 256), form, NATIVE).dequantise().any()
    torch.testing.assert_close(
        quantise(torch.full((1, 256), -3.0), form, NATIVE).dequantise(), torch.full((1, 256), -3.0), rtol=1e-3, atol=0.0
    )


def test_weights_on_the_grid_of_a_format_are_kept() -> None:
    assert NATIVE is not None
    for form in (Q8_0, Q4_1):
        rows = random_rows(form, 64, 128)
        again = quantise(rows.dequantise(), form, NATIVE)
        torch.testing.assert_close(again.dequantise(), rows.dequantise(), atol=2e-3, rtol=0.0)


def test_numbers_are_not_rounded_to_formats_of_checkpoints() -> None:
    assert NATIVE is not None
    with pytest.raises(ValueError, match="not to mxfp4"):
        quantise(torch.randn(4, 256), MXFP4, NATIVE)


def test_rows_are_packed_in_any_order_with_zeros_between() -> None:
    assert NATIVE is not None
    rows = random_rows(Q6_K, 32, 256)
    order = torch.randperm(32)
    assert torch.equal(pack_rows(rows, NATIVE, order), pack_rows(rows.rows(order), NATIVE))
    zeros = torch.full((32,), -1)
    assert not pack_rows(rows, NATIVE, zeros).any()


@every_format
def test_rows_in_several_pieces_are_packed_where_they_are(form: WeightFormat) -> None:
    assert NATIVE is not None
    whole = random_rows(form, 96, DEPTH)
    pieces = [whole.data[:33].clone(), whole.data.repeat_interleave(2, 0)[66:80:2], whole.data[40:].clone()]
    rows = QuantizedRows(form, pieces, DEPTH)
    assert rows.shape == whole.shape
    assert torch.equal(rows.data, whole.data)
    order = torch.randperm(96)
    order[::5] = -1
    for given in (None, order):
        assert torch.equal(pack_rows(rows, NATIVE, given), pack_rows(whole, NATIVE, given))


NUM_EXPERTS, HIDDEN, INTERMEDIATE = 5, 256, 512


def make_experts(
    formats: tuple[WeightFormat, WeightFormat],
    arithmetic: Arithmetic,
    is_gated: bool,
    has_order: bool = False,
    is_fine: bool = False,
) -> tuple[PackedExperts, list[tuple[QuantizedRows, QuantizedRows]]]:
    assert NATIVE is not None
    shape = ExpertShape(
        HIDDEN,
        INTERMEDIATE,
        torch.float32,
        torch.float32,
        is_gated=is_gated,
        formats=formats,
        arithmetic=arithmetic,
        has_order=has_order,
        is_fine=is_fine,
    )
    layout = PanelLayout(shape, NATIVE)
    experts, matrices = layout.experts(NUM_EXPERTS), []
    for number in range(NUM_EXPERTS):
        pair = (
            random_rows(formats[0], shape.gate_up_rows, HIDDEN),
            random_rows(formats[1], HIDDEN, INTERMEDIATE),
        )
        if has_order:
            pair = in_new_order(pair[0]), in_new_order(pair[1])
        packed = layout.pack((*pair, None, None))
        assert packed.shape == (layout.num_bytes,)
        experts.put(number, packed)
        matrices.append(pair)
    return experts, matrices


def choices(num_tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:3] for _ in range(num_tokens)])
    return ids, torch.rand(num_tokens, 3)


@pytest.mark.parametrize("formats", [(Q8_0, Q8_0), (Q4_K, Q6_K), (FORMATS["mxfp4"], Q8_0)], ids=str)
@pytest.mark.parametrize(("arithmetic", "tolerance"), [("exact", 3e-5), ("int8", 0.15)])
@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_quantised_experts_match_the_same_values_in_float32(
    formats: tuple[WeightFormat, WeightFormat], arithmetic: Arithmetic, tolerance: float, kind: str
) -> None:
    activation = Activation(kind)  # type: ignore[arg-type]
    experts, matrices = make_experts(formats, arithmetic, activation.is_gated)
    x, (ids, weights) = torch.randn(30, HIDDEN) / 8, choices(30)
    first, second = (torch.stack([pair[i].dequantise() for pair in matrices]) for i in (0, 1))
    wanted = moe_experts_reference(x, ids, weights, first, second, activation)
    got = experts(x, ids, weights, activation)
    assert ((got - wanted).abs().max() / wanted.std()).item() < tolerance


@pytest.mark.parametrize(("formats", "tolerance"), [((Q8_0, Q8_0), 1e-3), ((Q8_0, Q4_K), 0.15), ((Q4_K, Q8_0), 0.15)])
@pytest.mark.parametrize("has_order", [False, True])
def test_fine_experts_round_rows_twice_where_weights_have_8_bits(
    formats: tuple[WeightFormat, WeightFormat], tolerance: float, has_order: bool
) -> None:
    experts, matrices = make_experts(formats, "int8", True, has_order, is_fine=True)
    x, (ids, weights) = torch.randn(30, HIDDEN) / 8, choices(30)
    first, second = (torch.stack([pair[i].dequantise() for pair in matrices]) for i in (0, 1))
    wanted = moe_experts_reference(x, ids, weights, first, second, Activation("silu"))
    got = experts(x, ids, weights, Activation("silu"))
    assert ((got - wanted).abs().max() / wanted.std()).item() < tolerance
    for token in (0, 17, 29):
        one = slice(token, token + 1)
        assert torch.equal(experts(x[one], ids[one], weights[one], Activation("silu")), got[one])


@every_arithmetic
@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_experts_have_orders_of_channels_of_their_own(arithmetic: Arithmetic, kind: str) -> None:
    activation = Activation(kind)  # type: ignore[arg-type]
    formats = (FORMATS["int4_f16"], FORMATS["fp8_f32"])
    experts, matrices = make_experts(formats, arithmetic, activation.is_gated, has_order=True)
    x, (ids, weights) = torch.randn(30, HIDDEN) / 8, choices(30)
    first, second = (torch.stack([pair[i].dequantise() for pair in matrices]) for i in (0, 1))
    wanted = moe_experts_reference(x, ids, weights, first, second, activation)
    got = experts(x, ids, weights, activation)
    assert ((got - wanted).abs().max() / wanted.std()).item() < (3e-5 if arithmetic == "exact" else 0.15)


@every_arithmetic
def test_a_product_has_the_order_of_its_columns(arithmetic: Arithmetic) -> None:
    rows, x = in_new_order(random_rows(Q8_0, 70, DEPTH)), torch.randn(9, DEPTH)
    wanted = x @ rows.dequantise().T
    got = pack_quantized_linear(rows, None, arithmetic)(x)
    assert ((got - wanted).abs().max() / wanted.std()).item() < (1e-5 if arithmetic == "exact" else 0.05)


@every_arithmetic
@pytest.mark.parametrize("has_order", [False, True])
def test_a_token_has_the_same_bits_in_any_batch_of_quantised_experts(arithmetic: Arithmetic, has_order: bool) -> None:
    experts, _ = make_experts((Q4_K, Q6_K), arithmetic, True, has_order)
    x, (ids, weights) = torch.randn(120, HIDDEN), choices(120)
    whole = experts(x, ids, weights, Activation())
    for _ in range(60):
        rows = torch.randperm(120)[: int(torch.randint(1, 30, ()))]
        assert torch.equal(experts(x[rows], ids[rows], weights[rows], Activation()), whole[rows])
