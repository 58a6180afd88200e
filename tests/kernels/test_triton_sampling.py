"""Tokens from logits: greedy as torch, draws that ignore the batch, filters that keep what sorting keeps."""

import pytest
import torch

from kernels.gpu.sampling import (
    filter_thresholds,
    filter_thresholds_reference,
    greedy,
    sample,
    sample_reference,
)

pytestmark = pytest.mark.kernel_change


def column(device, values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=device)


def filters(device, rows):
    """Temperatures, top-k, top-p and min-p as tensors, of such tuples."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return (
        column(device, temperature),
        column(device, top_k, torch.int32),
        column(device, top_p),
        column(device, min_p),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 1000, 4096, 4097, 9001])
def test_greedy_takes_the_first_of_the_largest_as_torch_does(device, vocab, dtype):
    torch.manual_seed(vocab)
    logits = torch.randn(3, vocab, device=device).mul(2).round().to(dtype)
    token_ids, largest = greedy(logits)
    assert token_ids.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits.float()]
    assert torch.equal(largest, logits.float().max(-1).values)


def test_greedy_of_no_rows_is_nothing(device):
    token_ids, largest = greedy(torch.empty(0, 10, device=device))
    assert token_ids.shape == largest.shape == (0,)


@pytest.mark.parametrize(("bad", "shows"), [(float("nan"), "isnan"), (float("inf"), "isinf")])
def test_a_row_that_is_not_finite_shows_it_and_spoils_no_other(device, bad, shows):
    torch.manual_seed(0)
    logits = torch.randn(3, 5000, device=device)
    logits[1, 4500] = bad
    token_ids, largest = greedy(logits)
    assert getattr(largest, shows)().tolist() == [False, True, False]
    assert token_ids[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    assert 0 <= int(token_ids[1]) < 5000


def test_a_row_of_minus_infinities_still_gives_a_token(device):
    token_ids, largest = greedy(torch.full((1, 4100), -torch.inf, device=device))
    assert token_ids.tolist() == [0]
    assert largest.tolist() == [-torch.inf]


@pytest.mark.parametrize("vocab", [5, 4097, 20003])
def test_a_seed_draws_the_token_that_it_draws_on_a_cpu(device, vocab):
    torch.manual_seed(1)
    logits = torch.randn(6, vocab, device=device)
    temperatures = column(device, [0.0, 0.3, 1.0, 2.0, 5.0, 1.0])
    seeds = column(device, [1, 2, 2**40 + 5, -7, 9, 2], torch.int64)
    positions = column(device, [3, 0, 17, 2**33, 4, 0], torch.int64)
    token_ids, largest = sample(logits, temperatures, seeds, positions)
    expected, expected_largest = sample_reference(logits, temperatures, seeds, positions)
    assert token_ids.tolist() == expected.tolist()
    assert torch.equal(largest, expected_largest)


def test_a_draw_ignores_the_batch(device):
    torch.manual_seed(2)
    logits = torch.randn(4, 700, device=device)
    temperatures = column(device, [1.0, 0.0, 0.7, 1.5])
    seeds, positions = column(device, [5, 6, 7, 8], torch.int64), column(device, [1, 2, 3, 4], torch.int64)
    filters = {
        "top_k": column(device, [0, 0, 40, 5], torch.int32),
        "top_p": column(device, [0.9, 1.0, 1.0, 0.8]),
        "min_p": column(device, [0.0, 0.0, 0.05, 0.0]),
    }
    together, _ = sample(logits, temperatures, seeds, positions, **filters)
    for row in range(4):
        only = slice(row, row + 1)
        alone, _ = sample(
            logits[only],
            temperatures[only],
            seeds[only],
            positions[only],
            **{name: value[only] for name, value in filters.items()},
        )
        assert alone.tolist() == together[only].tolist()


def test_filtered_draws_are_those_of_a_cpu(device):
    torch.manual_seed(5)
    rows = [
        (1.0, 1, 1.0, 0.0),
        (1.0, 50, 1.0, 0.0),
        (0.7, 0, 0.9, 0.0),
        (1.3, 0, 1e-6, 0.0),
        (2.0, 0, 0.999, 0.0),
        (0.5, 0, 1.0, 0.1),
        (1.0, 30, 0.95, 0.02),
        (0.0, 3, 0.5, 0.5),
        (1.0, 0, 1.0, 0.0),
    ]
    logits = torch.randn(len(rows), 9001, device=device) * 3
    temperatures, top_k, top_p, min_p = filters(device, rows)
    for position in range(3):
        places = torch.arange(len(rows), device=device) + position
        arguments = (logits, temperatures, places * 7, places)
        kept = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        assert sample(*arguments, **kept)[0].tolist() == sample_reference(*arguments, **kept)[0].tolist()


@pytest.mark.parametrize("top_k", [0, 3])
def test_tokens_of_equal_logits_are_drawn_equally_often(device, top_k):
    logits = torch.full((1, 3), 2.0, device=device)
    arguments = {"top_k": column(device, [top_k], torch.int32), "top_p": column(device, [1.0 - 1e-6 * (top_k > 0)])}
    drawn = [
        int(
            sample(
                logits,
                column(device, [1.0]),
                column(device, [3], torch.int64),
                column(device, [position], torch.int64),
                min_p=column(device, [0.0]),
                **arguments,
            )[0]
        )
        for position in range(60)
    ]
    assert min(drawn.count(token) for token in range(3)) > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_thresholds_keep_what_sorting_keeps(device, dtype):
    torch.manual_seed(3)
    rows = [
        (1.0, 1, 1.0, 0.0),
        (1.0, 50, 1.0, 0.0),
        (1.0, 10_000, 1.0, 0.0),
        (0.7, 0, 0.9, 0.0),
        (1.3, 0, 1e-6, 0.0),
        (1.0, 20, 0.5, 0.0),
        (0.5, 0, 1.0, 0.1),
        (1.0, 30, 0.95, 0.02),
        (0.0, 3, 0.5, 0.5),
        (1.0, 0, 1.0, 0.0),
    ]
    logits = (torch.randn(len(rows), 1100, device=device) * 3).to(dtype)
    arguments = filters(device, rows)
    actual = filter_thresholds(logits, *arguments)
    expected = filter_thresholds_reference(logits, *arguments)
    kept = logits.float() >= actual[:, None]
    assert torch.equal(kept, logits.float() >= expected[:, None])
    assert kept.sum(-1)[[2, 8, 9]].tolist() == [1100, 1100, 1100]
    if dtype == torch.float32:
        assert kept.sum(-1)[[0, 1, 4]].tolist() == [1, 50, 1]


@pytest.mark.parametrize("apart", [1, 64, 1024, 4096])
def test_thresholds_of_likely_tokens_anywhere_in_a_large_vocabulary(device, apart):
    """Kernels look at few tokens of each lane first: tokens so far apart share lanes, or have one each."""
    torch.manual_seed(apart)
    rows = [(1.0, 6, 1.0, 0.0), (1.0, 4, 0.7, 0.0), (2.0, 0, 0.9, 0.0), (1.0, 0, 0.999, 0.0), (1.0, 20_000, 1.0, 0.0)]
    logits = torch.randn(len(rows), 6 * 4096 - 5, device=device)
    logits[:, : 6 * apart : apart] += torch.rand(len(rows), 6, device=device) + 20.0
    logits[1, 7::2] = -torch.inf
    arguments = filters(device, rows)
    kept = (logits >= filter_thresholds(logits, *arguments)[:, None]).sum(-1).tolist()
    expected = (logits >= filter_thresholds_reference(logits, *arguments)[:, None]).sum(-1).tolist()
    # The nucleus of the third row is thousands of tokens: sums in another order end at another of them.
    assert abs(kept.pop(2) - expected.pop(2)) < 20
    assert kept == expected


def test_negative_and_zero_logits_have_an_order_too(device):
    logits = torch.tensor([[-3.0, -0.0, 0.0, -1e-30, -torch.inf, -2.0]], device=device)
    for top_k, kept in ((1, {1, 2}), (3, {1, 2, 3}), (4, {1, 2, 3, 5}), (5, {0, 1, 2, 3, 5})):
        threshold = filter_thresholds(
            logits,
            column(device, [1.0]),
            column(device, [top_k], torch.int32),
            column(device, [1.0]),
            column(device, [0.0]),
        )
        assert set((logits[0] >= threshold).nonzero().flatten().tolist()) == kept


def test_filtered_draws_never_leave_what_is_kept_and_match_the_reference(device):
    torch.manual_seed(4)
    count = 6
    logits = torch.randn(1, 600, device=device).expand(count, -1).contiguous()
    arguments = (
        torch.full((count,), 1.5, device=device),
        torch.arange(count, device=device),
        torch.full((count,), 9, dtype=torch.int64, device=device),
    )
    filters = {
        "top_k": torch.full((count,), 8, dtype=torch.int32, device=device),
        "top_p": torch.full((count,), 0.9, device=device),
        "min_p": torch.full((count,), 0.01, device=device),
    }
    token_ids, _ = sample(logits, *arguments, **filters)
    assert set(token_ids.tolist()) <= set(logits[0].topk(8).indices.tolist())
    assert len(set(token_ids.tolist())) > 1
    assert token_ids.tolist() == sample_reference(logits, *arguments, **filters)[0].tolist()
