"""The sampler against straightforward formulas, and its independence of the batch."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.ops import CpuOps
from kernels.sampling import draw, softmax, uniform_at
from moeserve.model.sampler import NOT_FINITE, ScoredTokens, draw_tokens
from moeserve.plan import Chunk, ChunkExtras, ChunkResult, SamplingParams

VOCAB = 50
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def chunk(sampling: SamplingParams, position: int = 5, extras: ChunkExtras | None = None) -> Chunk:
    return Chunk("r", array("i", [1]), position, array("i", [0]), sampling, extras)


def sample(logits: torch.Tensor, chunks: list[Chunk]) -> list[ChunkResult]:
    return draw_tokens(CpuOps(), logits, chunks).results()


def test_greedy_takes_the_largest_logit() -> None:
    logits = torch.randn(4, VOCAB)
    results = sample(logits, [chunk(GREEDY)] * 4)
    assert [result.token_id for result in results] == logits.argmax(-1).tolist()


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = torch.randn(3, VOCAB)
    logits[0, 3], logits[2, 7] = torch.nan, torch.inf
    results = sample(logits, [chunk(GREEDY)] * 3)
    assert [result.error for result in results] == [NOT_FINITE, None, NOT_FINITE]
    assert results[1].token_id == int(logits[1].argmax())


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_the_least_temperatures_are_greedy(filters: dict[str, Any]) -> None:
    logits = torch.randn(3, VOCAB) * 10
    least = SamplingParams(1, temperature=1e-38, seed=4, **filters)
    assert [result.token_id for result in sample(logits, [chunk(least)] * 3)] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("width", [1, 15, 16, 1024, 1025, 50_000])
def test_probabilities_are_those_of_torch_and_a_row_has_the_same_bits_anywhere(width: int) -> None:
    logits = 10 * torch.randn(5, width + 3)[:, :width]
    logits[:, width // 2] += 1.0
    logits[3, 1:] = -torch.inf
    for takes_logs, wanted in ((False, logits.softmax(-1)), (True, logits.log_softmax(-1))):
        found = softmax(logits, takes_logs=takes_logs)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
        assert torch.equal(softmax(logits[2], takes_logs=takes_logs), found[2])


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([1.0, 2.0, 0.0, -1.0])
    counts = torch.zeros(4)
    for position in range(4000):
        counts[draw(row, 0.7, 0, 1.0, 0.0, uniform_at(11, position))] += 1
    torch.testing.assert_close(counts / 4000, (row / 0.7).softmax(-1), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "allowed"),
    [(2, 1.0, 0.0, {1, 0}), (0, 0.6, 0.0, {1}), (0, 0.7, 0.0, {1, 0}), (0, 1.0, 0.3, {1, 0}), (3, 0.99, 0.2, {0, 1})],
)
def test_filters_keep_only_what_they_allow(top_k: int, top_p: float, min_p: float, allowed: set[int]) -> None:
    row = torch.tensor([1.0, 2.0, 0.0, -1.0])
    drawn = {draw(row, 1.0, top_k, top_p, min_p, uniform_at(3, position)) for position in range(300)}
    assert drawn == allowed


def test_top_p_beyond_the_first_candidates_still_reaches_its_mass() -> None:
    row = torch.zeros(5000)
    drawn = {draw(row, 1.0, 0, 0.9, 0.0, uniform_at(1, position)) for position in range(3000)}
    assert len(drawn) > 1800


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(6, VOCAB)
    sampling = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=42)
    chunks = [chunk(sampling, position) for position in range(6)]
    together = [result.token_id for result in sample(logits, chunks)]
    alone = [sample(logits[i : i + 1], [chunks[i]])[0].token_id for i in range(6)]
    assert together == alone
    others = [
        sample(logits[:1], [chunk(replace(sampling, temperature=5.0, seed=seed))])[0].token_id for seed in range(20)
    ]
    assert len(set(others)) > 5


def test_uniform_numbers_are_spread_over_the_unit_interval() -> None:
    numbers = [uniform_at(seed, position) for seed in range(40) for position in range(50)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert len(set(numbers)) == len(numbers)


def test_penalties_match_their_formulas() -> None:
    logits = torch.randn(1, VOCAB)
    history = array("i", [3, 7, 7, 9, 9, 9])
    sampling = SamplingParams(
        max_tokens=8,
        temperature=0.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.3,
        logit_bias={int(logits.argmax()): -100.0},
    )
    expected = logits[0].clone()
    for token in {3, 7, 9}:
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token, count in {7: 1, 9: 3}.items():
        expected[token] -= 0.5 + 0.25 * count
    expected[int(logits.argmax())] -= 100.0
    extras = ChunkExtras(history=history, num_prompt_tokens=2)
    assert sample(logits, [chunk(sampling, extras=extras)])[0].token_id == int(expected.argmax())


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.randn(1, VOCAB)
    best, second = logits[0].topk(2).indices.tolist()
    extras = ChunkExtras(banned_token_ids=(best,))
    assert sample(logits, [chunk(GREEDY, extras=extras)])[0].token_id == second


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    logits = torch.randn(1, VOCAB)
    sampling = replace(GREEDY, logprobs=3, logit_bias={4: 50.0})
    result = sample(logits, [chunk(sampling)])[0]
    expected = logits.log_softmax(-1)[0]
    assert result.token_id == 4
    assert result.logprobs is not None
    assert result.logprobs.logprob == pytest.approx(float(expected[4]))
    assert [token for token, _ in result.logprobs.top] == expected.topk(3).indices.tolist()


def test_prompt_logprobs_name_one_token_per_row() -> None:
    logits = torch.randn(3, VOCAB)
    found = ScoredTokens(lambda states: states, logits, array("i", [1, 2, 3]), 0).all()
    assert [entry.logprob for entry in found] == pytest.approx(logits.log_softmax(-1)[range(3), [1, 2, 3]].tolist())
    assert found[0].top == ()
