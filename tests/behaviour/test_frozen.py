"""The service computes the same as when `frozen.json` was recorded; see `freeze`."""

from __future__ import annotations

import warnings

import pytest

from tests.behaviour.cases import Record
from tests.behaviour.freeze import check, differences, first_difference


# Ends what hangs; a busy machine takes minutes.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "parts",
    [
        # At once, since one part waits where another computes.
        # A model of each shape of dispatch, and one with windows and biases.
        pytest.param(
            ("plans", "kernels", "cpu", "demo", "ranks/qwen3_moe", "ranks/gpt_oss", "ranks/granitemoe"), id="cpu"
        ),
        pytest.param(
            ("ranks/qwen2_moe", "ranks/glm4_moe", "ranks/deepseek_v3-yarn"), id="more ranks", marks=pytest.mark.long
        ),
        pytest.param(("gpu",), id="gpu", marks=pytest.mark.kernel_change),
    ],
)
def test_tokens_bits_and_plans_are_those_recorded(parts: tuple[str, ...]) -> None:
    wrong, notes = check(parts)
    for note in notes:
        warnings.warn(note, stacklevel=1)
    assert wrong == []


RECORD: Record = {"tokens": [[1, 2], [3]], "bits": ["aa bb", "cc"], "cached": [0, 4]}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"tokens": [[1, 2], [4]], "bits": ["aa bb", "dd"]}, "prompt 1, token 0: tokens were 3, are 4"),
        ({"tokens": [[1, 2], [3, 3]]}, "prompt 1, tokens: 1 became 2"),
        ({"bits": ["aa bx", "cc"]}, "prompt 0, token 1: bits were bb, are bx"),
        ({"bits": ["aa bb"]}, "2 lists of bits became 1"),
        ({"cached": [0, 0]}, "prompt 1, cached tokens: were 4, are 0"),
    ],
)
def test_the_first_difference_is_told(changed: Record, told: str | None) -> None:
    assert first_difference(RECORD, RECORD | changed, exact=True) == told


def test_bits_that_were_not_recorded_are_not_compared() -> None:
    assert first_difference({"tokens": [[1]]}, {"tokens": [[1]], "bits": ["aa"]}, exact=True) is None


def test_other_weights_and_where_torch_computes_other_arithmetic_leave_tokens_to_compare() -> None:
    def found(arithmetic: str, weights: str, bits: str) -> dict[str, object]:
        record = RECORD | {"bits": [bits, "cc"]}
        machine = {"cpu": "AVX2", "arithmetic": arithmetic, "versions": "torch"}
        cases = {"cpu/qwen/cold": record, "gpu/qwen/cold": record, "plans/fcfs-0": {"plans": ["aa"]}}
        return {"machine": machine, "weights": {"qwen": weights}, "has_gpu": False, "cases": cases}

    frozen, parts = found("1", "w", "aa bb"), ["cpu/qwen", "gpu/qwen", "plans"]
    wrong, notes = differences(frozen, found("1", "w", "aa bx"), parts)
    assert [line.split(":")[0] for line in wrong] == ["cpu/qwen/cold", "gpu/qwen/cold"]
    assert notes == []
    wrong, notes = differences(frozen, found("2", "w", "aa bx"), parts)
    assert [line.split(":")[0] for line in wrong] == ["cpu/qwen/cold"]
    assert "tokens only of gpu" in notes[0]
    wrong, notes = differences(frozen, found("1", "v", "aa bx"), parts)
    assert wrong == []
    assert "tokens only of qwen" in notes[0]
