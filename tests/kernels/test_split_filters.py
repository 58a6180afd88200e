"""The variant whose programs share a row keeps and draws what sorting and a CPU do."""

import pytest
import torch

from benchmarks.kernels.variants import split_filters
from benchmarks.kernels.variants.split_filters import keep_by_split_rows
from kernels.gpu.sampling import filter_thresholds, filter_thresholds_reference, sample, sample_reference

pytestmark = pytest.mark.kernel_change

# Temperature, top-k, top-p and min-p.
ROWS = [(1.0, 1, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.0, 30, 0.95, 0.02), (0.5, 0, 1.0, 0.1), (0.0, 3, 0.5, 0.5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_split_rows_keep_what_sorting_keeps_and_draw_what_a_cpu_draws(dtype, device, monkeypatch):
    monkeypatch.setattr(split_filters, "_UNIT", 256)
    torch.manual_seed(0)
    logits = (torch.randn(len(ROWS), 500, device=device) * 3).to(dtype)
    temperature, top_k, top_p, min_p = (torch.tensor(column, device=device) for column in zip(*ROWS, strict=True))
    filters = {"top_k": top_k.int(), "top_p": top_p, "min_p": min_p}
    found = filter_thresholds(logits, temperature, *filters.values(), keep_by_split_rows)
    wanted = filter_thresholds_reference(logits, temperature, *filters.values())
    assert torch.equal(logits.float() >= found[:, None], logits.float() >= wanted[:, None])
    seeds = torch.arange(len(ROWS), device=device) * 7
    drawn = sample(logits, temperature, seeds, seeds + 1, **filters, keep=keep_by_split_rows)[0]
    assert drawn.tolist() == sample_reference(logits, temperature, seeds, seeds + 1, **filters)[0].tolist()
