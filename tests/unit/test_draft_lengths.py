"""Pure parts of drafts: where a text repeats itself, how likely guesses are right, and how many pay."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.scheduling.cost_model import CostModel
from moeserve.scheduling.draft_lengths import LEAST_LIKELY, Acceptance, Chances, best_lengths, may_pay
from moeserve.scheduling.draft_sources import CACHED_TEXT, FORCED, LAYOUT, OWN_TEXT, Guess
from moeserve.scheduling.suffix_index import LEAST_MATCH, LONGEST_MATCH, SuffixIndex
from moeserve.settings.drafts import SpeculativeConfig, parse_speculative

FIRST_RATES = {OWN_TEXT: 0.5, CACHED_TEXT: 0.9, FORCED: 0.9, LAYOUT: 0.5}


def matrix(rows: Sequence[Sequence[float]]) -> Chances:
    """Return rows of falling chances side by side, with zeros behind the shorter ones."""
    width = max(map(len, rows))
    return np.array([[*row, *[0.0] * (width - len(row))] for row in rows])


def brute_force(text: list[int]) -> tuple[int, int]:
    """Return the position after the longest earlier match of the end of a text, the latest among equals."""
    found, longest = 0, LEAST_MATCH - 1
    for position in range(len(text) - 1, 0, -1):
        length = 0
        while length < min(position, LONGEST_MATCH) and text[position - 1 - length] == text[-1 - length]:
            length += 1
        if length > longest:
            found, longest = position, length
    return (found, longest) if found else (0, 0)


@given(st.lists(st.sampled_from([1, 2, 3, 40_000, 70_000]), min_size=1, max_size=18), st.integers(1, 7))
def test_the_longest_and_latest_match_is_found(tokens: list[int], at_once: int) -> None:
    # No more positions are alike than are looked at.
    text, index = array("i", tokens), SuffixIndex()
    while index.extend(text, at_once):
        pass
    assert index.num_tokens == len(text) - 1
    assert index.find(text, text) == brute_force(tokens)


def test_certain_guesses_are_verified_and_unlikely_ones_are_not() -> None:
    def seconds(rows: int) -> float:
        return 1.0 + 0.2 * rows

    assert best_lengths(matrix([[0.99, 0.98, 0.97]]), 1, 8, seconds) == [3]
    assert best_lengths(matrix([[0.1, 0.05]]), 1, 8, seconds) == [0]
    assert best_lengths(matrix([[0.1], [0.9, 0.8], []]), 3, 8, seconds) == [0, 2, 0]
    assert best_lengths(matrix([[0.99, 0.98, 0.97]]), 1, 2, seconds) == [2]


def test_nothing_is_verified_where_rows_cost_in_full_or_costs_are_not_known() -> None:
    assert best_lengths(matrix([[0.99] * 8]), 1, 8, float) == [0]
    assert best_lengths(matrix([[0.99] * 8]), 1, 8, lambda rows: 0.0) == [0]


@given(
    st.lists(st.lists(st.floats(0.05, 1.0), max_size=8), min_size=1, max_size=12),
    st.integers(0, 12),
    st.integers(0, 100),
    st.lists(st.tuples(st.integers(1, 64), st.floats(0.01, 1.0)), min_size=1, max_size=6),
)
def test_no_other_lengths_make_more_tokens_per_second(
    chances: list[list[float]], num_more: int, most: int, measured: list[tuple[int, float]]
) -> None:
    cost, num_rows = CostModel(), len(chances) + num_more
    for rows, seconds in measured:
        cost.observe(rows, 0.0, seconds)
    falling = [list(accumulate(own, mul)) for own in chances]
    likeliest = sorted((chance for own in falling for chance in own), reverse=True)[:most]

    def pace(drafts: list[float]) -> float:
        return (num_rows + sum(drafts)) / max(cost.seconds(num_rows + len(drafts), 0.0), 1e-9)

    best = max(pace(likeliest[:count]) for count in range(len(likeliest) + 1))
    lengths = best_lengths(matrix(falling), num_rows, most, lambda rows: cost.seconds(rows, 0.0))
    found = pace([chance for own, length in zip(falling, lengths, strict=True) for chance in own[:length]])
    assert found == pytest.approx(best) if any(lengths) else best <= 1.0301 * found


def test_drafts_whose_failure_loses_rows_are_verified_only_if_they_are_surer() -> None:
    def seconds(rows: int) -> float:
        return 1.0 + 0.2 * rows

    unsure, sure = [0.7, 0.49, 0.343], [0.99, 0.98, 0.97]
    assert best_lengths(matrix([unsure]), 1, 8, seconds) == [3]
    assert best_lengths(matrix([unsure]), 1, 8, seconds, matrix([[0.3, 0.42, 0.441]])) == [2]
    assert best_lengths(matrix([unsure]), 1, 8, seconds, matrix([[3.0, 4.0, 5.0]])) == [0]
    assert best_lengths(matrix([sure]), 1, 8, seconds, matrix([[0.01, 0.02, 0.03]])) == [3]
    # Two rows that give no token make further ones cheap.
    assert best_lengths(matrix([[0.2]]), 3, 8, seconds) == [0]
    assert best_lengths(matrix([[0.2]]), 3, 8, seconds, matrix([[0.0]]), 2) == [1]


def test_rates_are_learnt_by_match_and_by_request() -> None:
    acceptance = Acceptance(FIRST_RATES)
    good, bad, new = (acceptance.of_request() for _ in range(3))
    for _ in range(50):
        acceptance.count(good, OWN_TEXT, 20, 1, 1)
        acceptance.count(bad, OWN_TEXT, 3, 0, 1)
    guesses = [Guess(OWN_TEXT, num_matched, array("i", [7])) for num_matched in (20, 3, 20)]
    (of_good,), (of_bad,), (of_new,) = acceptance.chances([good, bad, new], guesses, [1] * 3, [0] * 3, [1] * 3).tolist()
    assert of_good > 0.9
    assert of_bad < 0.1
    assert of_new > 0.8


SOURCES = st.sampled_from(list(FIRST_RATES))


@given(
    st.lists(st.tuples(SOURCES, st.integers(0, 40), st.integers(0, 9), st.integers(0, 1), st.booleans()), max_size=60),
    st.lists(
        st.tuples(SOURCES, st.integers(0, 40), st.integers(0, 20), st.integers(0, 6), st.integers(0, 6), st.booleans()),
        min_size=1,
    ),
)
def test_a_guess_is_as_likely_as_all_before_it_and_its_own_rate(
    counted: list[tuple[str, int, int, int, bool]], asked: list[tuple[str, int, int, int, int, bool]]
) -> None:
    acceptance = Acceptance(FIRST_RATES)
    owners = [acceptance.of_request(), acceptance.of_request()]
    for source, num_matched, num_right, num_wrong, owner in counted:
        acceptance.count(owners[owner], source, num_matched, num_right, num_right + num_wrong)
    expected = list[list[float]]()
    for source, num_matched, num_guessed, num_forced, num_laid, owner in asked:
        tokens = [(source, num_matched + number) for number in range(num_guessed)]
        tokens += [(FORCED, number) for number in range(num_forced)]
        tokens += [(LAYOUT, number) for number in range(num_laid)]
        ones = [Guess(*token, array("i")) for token in tokens]
        rates = [acceptance.chances([owners[owner]], [one], [1], [0], [1]).item() for one in ones]
        expected.append([chance if chance >= LEAST_LIKELY else 0.0 for chance in accumulate(rates, mul)])
    own = [owners[owner] for *_, owner in asked]
    guesses = [Guess(source, num_matched, array("i")) for source, num_matched, *_ in asked]
    num_guessed, num_forced = [each[2] for each in asked], [each[3] for each in asked]
    found = acceptance.chances(own, guesses, num_guessed, num_forced, [sum(each[2:5]) for each in asked])
    # The bits are those of one product after another.
    assert found.tolist() == matrix(expected).tolist()


def test_the_setting_is_vllms_json_or_a_method() -> None:
    assert parse_speculative("auto") == SpeculativeConfig("auto")
    given_json = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 4}'
    assert parse_speculative(given_json) == SpeculativeConfig("ngram", 5, 4)
    for text in ("mtp", "deepseek_mtp", '{"method": "mtp"}'):
        # The layer drafts one token; guesses out of text have their usual length.
        assert parse_speculative(text) == SpeculativeConfig("mtp", 16, 3, 1)
    assert parse_speculative('{"method": "mtp", "num_speculative_tokens": 3}') == SpeculativeConfig("mtp", 16, 3, 3)
    for text, word in [
        ("eagle", "draft model"),
        ("guess", "not one of"),
        ("{", "not JSON"),
        ('{"num_speculative_tokens": 0}', "from 1 to 64"),
        ('{"model": "x"}', "not one of"),
        ('{"method": ["ngram"]}', "not one of"),
    ]:
        with pytest.raises(ValueError, match=word):
            parse_speculative(text)


@given(
    st.lists(st.lists(st.floats(0.05, 1.0), max_size=8), min_size=1, max_size=12),
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(1, 64), st.floats(0.01, 1.0)), max_size=6),
)
def test_where_no_drafts_can_pay_none_are_verified(
    chances: list[list[float]], num_more: int, measured: list[tuple[int, float]]
) -> None:
    cost, num_rows = CostModel(), len(chances) + num_more
    for rows, seconds in measured:
        cost.observe(rows, 100.0 * rows, seconds)

    def seconds_of(rows: int) -> float:
        return cost.seconds(rows, 100.0 * rows)

    falling = [list(accumulate(own, mul)) for own in chances]
    most = sum(map(len, falling))
    if any(best_lengths(matrix(falling), num_rows, most, seconds_of)):
        assert may_pay(num_rows, most, seconds_of)


def test_drafts_may_pay_where_further_rows_cost_less_and_not_where_costs_are_not_known() -> None:
    assert may_pay(4, 16, lambda rows: 1.0 + 0.2 * rows)
    assert not may_pay(200, 800, lambda rows: 1.0 + 0.2 * rows)
    assert not may_pay(4, 16, lambda rows: 0.0)
