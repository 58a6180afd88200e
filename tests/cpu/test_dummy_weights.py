"""Weights that are drawn while they are read: the same whole or by rows, in any layout, and as good as random."""

from __future__ import annotations

from pathlib import Path

import torch

from moeserve.model.dummy import draw_into
from moeserve.model.stored import TensorInfo

EXPERTS = TensorInfo(Path("dummy_weights.json"), "BF16", (3, 40, 50), 12_000)
# Each row is drawn in two pieces.
LARGE = TensorInfo(Path("dummy_weights.json"), "BF16", (3, 400, 250), 600_000)


def drawn(name: str, info: TensorInfo, row: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(info.shape if row is None else info.shape[1:], dtype=dtype)
    draw_into(name, info, out, row)
    return out


def test_a_row_has_the_numbers_that_it_has_in_the_whole_tensor_in_any_layout() -> None:
    whole = drawn("experts", LARGE)
    assert torch.equal(torch.stack([drawn("experts", LARGE, row) for row in range(3)]), whole)
    transposed = torch.empty(250, 400)
    draw_into("experts", LARGE, transposed.T, 1)
    assert torch.equal(transposed.T, whole[1])
    assert torch.equal(drawn("experts", LARGE, dtype=torch.bfloat16), whole.bfloat16())


def test_numbers_are_spread_evenly_and_other_tensors_have_others() -> None:
    found, other = (drawn(name, EXPERTS) for name in ("experts", "others"))
    assert found.unique().numel() > 0.99 * found.numel()
    torch.testing.assert_close(found.std(), torch.tensor(50**-0.5), rtol=0.05, atol=0.0)
    assert abs(float(found.mean())) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([found.flatten(), other.flatten()]))[0, 1])) < 0.05


def test_norms_are_near_one_and_other_vectors_near_nothing() -> None:
    vector = TensorInfo(Path("dummy_weights.json"), "BF16", (64,), 128)
    norm, bias = drawn("input_norm", vector), drawn("sinks", vector)
    assert 0.9 <= float(norm.min()) < float(norm.max()) <= 1.1
    assert -0.1 <= float(bias.min()) < 0 < float(bias.max()) <= 0.1
