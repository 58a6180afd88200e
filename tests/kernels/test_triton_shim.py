"""The mended interpreter still fits the installed Triton: bf16 and fp8 come out as torch computes them."""

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.kernels import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is interpreted")


@triton.jit
def cast_kernel(source, target, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(target + places, tl.load(source + places).to(target.dtype.element_ty))


@triton.jit
def dot_kernel(a, b, out, N: tl.constexpr):
    rows = tl.arange(0, N)
    places = rows[:, None] * N + rows[None, :]
    tl.store(out + places, tl.dot(tl.load(a + places), tl.load(b + places)))


@triton.jit
def add_kernel(a, out, N: tl.constexpr):
    places = tl.arange(0, N)
    values = tl.load(a + places)
    tl.store(out + places, values + values)


@triton.jit
def scalar_mask_kernel(flag, out, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(out + places, places, mask=(places < 3) & (tl.load(flag) >= 0))


def bits(values):
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()])


@pytest.mark.parametrize("name", [*interpreter.PATCHED])
def test_what_is_patched_exists_and_is_ours(name):
    assert getattr(interpreter.InterpreterBuilder, name).__module__ == "benchmarks.kernels.interpreter"


def test_patching_twice_patches_once():
    before = interpreter.InterpreterBuilder.cast_impl
    interpreter.mend_interpreter()
    assert interpreter.InterpreterBuilder.cast_impl is before


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_casts_equal_torch_bit_by_bit(source, target):
    generator = torch.Generator().manual_seed(7)
    spread = torch.randn(4094, generator=generator) * torch.logspace(-3, 2, 4094)
    values = torch.cat([spread, torch.tensor([0.0, -0.0])]).clamp(-440, 440).to(source)
    out = torch.empty(4096, dtype=target)
    cast_kernel[(1,)](values, out, 4096)
    assert torch.equal(bits(out), bits(values.float().to(target)))


def test_a_cast_of_nan_and_infinity_keeps_them():
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0])
    out = torch.empty(4, dtype=torch.bfloat16)
    cast_kernel[(1,)](values, out, 4)
    assert torch.equal(out.isnan(), values.isnan())
    assert torch.equal(out[1:].float(), values[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_dot_equals_the_fp32_product_of_its_operands(dtype):
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    out = torch.full((32, 32), torch.nan)
    dot_kernel[(1,)](a, b, out, 32)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_bf16_arithmetic_outside_a_dot_is_refused():
    values = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="bf16 arithmetic"):
        add_kernel[(1,)](values, torch.empty_like(values), 16)


@pytest.mark.parametrize(("flag", "expected"), [(0, [0, 1, 2, 9]), (-1, [9, 9, 9, 9])])
def test_a_scalar_comparison_may_be_part_of_a_mask(flag, expected):
    out = torch.full((4,), 9, dtype=torch.int32)
    scalar_mask_kernel[(1,)](torch.tensor([flag]), out, 4)
    assert out.tolist() == expected
