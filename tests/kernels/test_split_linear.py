"""The variant of sum, norm and projection has the results of the kernels that serve."""

import pytest
import torch

from benchmarks.kernels.variants.split_linear import FEW_ROWS, add_norm_linear
from kernels.gpu.norm import add_rms_norm

pytestmark = pytest.mark.kernel_change


@pytest.mark.parametrize("num_rows", [1, 5, FEW_ROWS])
@pytest.mark.parametrize(("depth", "width"), [(300, 70), (1024, 64)])
def test_sum_norm_and_projection_are_those_of_three_operations(num_rows, depth, width, device):
    torch.manual_seed(0)
    x, residual = (torch.randn(num_rows, depth, device=device) for _ in range(2))
    norm_weight, weight = torch.randn(depth, device=device), torch.randn(width, depth, device=device) / depth**0.5
    summed, out = add_norm_linear(x, residual, norm_weight, 1e-6, weight)
    of_stream = residual.clone()
    normed = add_rms_norm(x, of_stream, norm_weight, 1e-6)
    assert torch.equal(summed, of_stream)
    torch.testing.assert_close(out, normed @ weight.T, rtol=1e-4, atol=1e-4)
    # A row's bits depend on no other row.
    assert torch.equal(add_norm_linear(x[:1], residual[:1], norm_weight, 1e-6, weight)[1], out[:1])


def test_more_rows_are_refused(device):
    x, weight = torch.zeros(FEW_ROWS + 1, 64, device=device), torch.zeros(8, 64, device=device)
    with pytest.raises(ValueError, match="17 rows are more than 16"):
        add_norm_linear(x, x, x[0], 1e-6, weight)
