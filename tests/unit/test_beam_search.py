"""The rules of beam search: which texts it finds, with any rules of length and end."""

from __future__ import annotations

from math import log
from random import Random

import pytest

from moeserve.frontend.beam_search import BeamParams, BeamSearch
from moeserve.plan import FinishReason
from tests.support.parameters import pairs

STOP = 0
VOCAB = 6


def likeliest(prefix: tuple[int, ...], seed: int = 0) -> list[tuple[int, float]]:
    """Return a made-up distribution of the token after a prefix, best first."""
    weights = Random(f"{prefix} {seed}").choices(range(1, 60), k=VOCAB)
    found = [(token, log(weight / sum(weights))) for token, weight in enumerate(weights)]
    return sorted(found, key=lambda pair: -pair[1])


def search(params: BeamParams, max_tokens: int, seed: int, min_tokens: int = 0) -> BeamSearch:
    beams = BeamSearch(params, max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=[STOP])
    while not beams.is_done:
        assert len({tuple(beam.token_ids) for beam in beams.beams}) == len(beams.beams)
        beams.advance([likeliest(tuple(beam.token_ids), seed)[: beams.num_alternatives] for beam in beams.beams])
    return beams


def all_texts(max_tokens: int, seed: int) -> dict[tuple[int, ...], float]:
    """Return every text that ends, with the sum of the log probabilities of its tokens."""
    found: dict[tuple[int, ...], float] = {}
    open_texts: dict[tuple[int, ...], float] = {(): 0.0}
    for length in range(1, max_tokens + 1):
        longer = {}
        for prefix, total in open_texts.items():
            for token, logprob in likeliest(prefix, seed):
                ends = token == STOP or length == max_tokens
                (found if ends else longer)[(*prefix, token)] = total + logprob
        open_texts = longer
    return found


@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0, 2.0])
def test_a_search_that_is_wide_enough_finds_the_best_of_all_texts(penalty: float) -> None:
    for seed in range(20):
        # Up to 125 texts are open before the last token.
        params = BeamParams(200, 5, penalty, "never")
        found = search(params, 4, seed).best()
        ranked = sorted(all_texts(4, seed).items(), key=lambda pair: -pair[1] / len(pair[0]) ** penalty)
        assert [tuple(text.token_ids) for text in found] == [text for text, _ in ranked[:5]]
        assert [text.score for text in found] == pytest.approx([t / len(x) ** penalty for x, t in ranked[:5]])
        for text in found:
            assert text.finish_reason is (FinishReason.STOP if text.token_ids[-1] == STOP else FinishReason.LENGTH)


def test_an_early_stop_ends_once_as_many_texts_have_ended_as_there_are_beams() -> None:
    lengths = {}
    for early in (True, False, "never"):
        lengths[early] = [
            max(len(beam.token_ids) for beam in search(BeamParams(3, 3, 1.0, early), 30, seed).best())  # type: ignore[arg-type]
            for seed in range(30)
        ]
    assert sum(lengths[True]) < sum(lengths[False])
    assert sum(lengths[False]) <= sum(lengths["never"])


@pytest.mark.parametrize(("width", "penalty"), pairs([2, 3, 5], [-1.0, 0.0, 1.0]))
def test_answers_are_distinct_texts_in_the_order_of_their_scores(width: int, penalty: float) -> None:
    for seed in range(20):
        found = search(BeamParams(width, width, penalty, False), 12, seed).best()
        assert len({tuple(text.token_ids) for text in found}) == width
        assert [text.score for text in found] == sorted((text.score for text in found), reverse=True)


def test_no_text_stops_before_its_fewest_tokens() -> None:
    for seed in range(20):
        found = search(BeamParams(3, 3, -2.0, False), 12, seed, min_tokens=5).best()
        assert min(len(text.token_ids) for text in found) >= 6
        assert all(STOP not in text.token_ids[:-1] for text in found)


def test_log_probabilities_are_of_the_tokens_of_each_text() -> None:
    for text in search(BeamParams(4, 4, 1.0, False, logprobs=2), 8, 3).best():
        for number, (token, logprobs) in enumerate(zip(text.token_ids, text.logprobs, strict=True)):
            row = likeliest(tuple(text.token_ids[:number]), 3)
            assert (logprobs.logprob, list(logprobs.top)) == (dict(row)[token], row[:2])


def test_a_search_without_enough_tokens_ends_with_what_it_has_found() -> None:
    search = BeamSearch(BeamParams(3, 3), max_tokens=5, stop_token_ids=[STOP])
    search.advance([[(STOP, -0.1)]])
    assert search.is_done
    assert [text.token_ids for text in search.best()] == [[STOP]]
    with pytest.raises(ValueError, match="over"):
        search.advance([])
