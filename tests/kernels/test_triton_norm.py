"""Norms: every width, strided rows, residuals in place, and rows that ignore each other."""

import pytest
import torch
from torch.nn import functional

from kernels.gpu.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

EPS = 1e-6
TOLERANCE = {torch.float32: (2e-6, 2e-6), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1e-2, 1e-2)}


def close(actual, expected):
    rtol, atol = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


def wide_rms(x, weight):
    return functional.rms_norm(x.double(), (x.shape[-1],), weight.double(), EPS)


def wide_layer(x, weight, bias):
    return functional.layer_norm(x.double(), (x.shape[-1],), weight.double(), bias.double(), EPS)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64), (2, 129), (2, 3, 96), (0, 64)])
def test_rms_norm_equals_torch(device, shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).to(dtype)
    weight = torch.randn(shape[-1], device=device).to(dtype)
    close(rms_norm(x, weight, EPS), wide_rms(x, weight))


def test_rms_norm_reads_and_writes_a_slice_of_wider_rows_and_nothing_beside_it(device):
    torch.manual_seed(1)
    whole = torch.randn(4, 50, device=device)
    before = whole.clone()
    part = whole[:, 10:30]
    weight = torch.randn(20, device=device)
    assert rms_norm(part, weight, EPS, out=part) is part
    close(part, wide_rms(before[:, 10:30], weight))
    assert torch.equal(whole[:, :10], before[:, :10])
    assert torch.equal(whole[:, 30:], before[:, 30:])


def test_a_row_has_the_same_bits_in_any_batch(device):
    torch.manual_seed(2)
    x = torch.randn(6, 96, device=device).to(torch.bfloat16)
    weight = torch.randn(96, device=device).to(torch.bfloat16)
    order = torch.tensor([4, 0, 5, 1, 3, 2], device=device)
    assert torch.equal(rms_norm(x, weight, EPS)[order], rms_norm(x[order], weight, EPS))
    assert torch.equal(rms_norm(x[2:3], weight, EPS), rms_norm(x, weight, EPS)[2:3])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_residual_takes_the_sum_and_the_norm_is_that_of_the_sum(device, dtype):
    torch.manual_seed(3)
    x, residual = (torch.randn(3, 72, device=device).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(72, device=device).to(dtype) for _ in range(2))
    expected = (residual.float() + x.float() * 0.5).to(dtype)
    for normed, target in (
        (lambda r: add_rms_norm(x, r, weight, EPS, 0.5), wide_rms(expected, weight)),
        (lambda r: add_layer_norm(x, r, weight, bias, EPS, 0.5), wide_layer(expected, weight, bias)),
    ):
        mutated = residual.clone()
        close(normed(mutated), target)
        assert torch.equal(mutated, expected)


@pytest.mark.parametrize("width", [3, 64, 100])
def test_layer_norm_equals_torch(device, width):
    torch.manual_seed(4)
    x, weight, bias = (torch.randn(s, width, device=device) for s in (5, 1, 1))
    close(layer_norm(x + 3, weight[0], bias[0], EPS), wide_layer(x + 3, weight[0], bias[0]))
