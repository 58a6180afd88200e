"""The fields of beam search in chat and completions: what they ask for, and what cannot be had beside a search."""

import json
from typing import Any

import pytest

from moeserve.frontend.beam_search import BeamParams
from moeserve.frontend.dialects import chat, completions
from moeserve.frontend.dialects.internal import GenerateRequest, ModelFacts
from moeserve.frontend.errors import ApiError

FACTS = ModelFacts(("tiny",), 512, 260, (259,), {}, 20)
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (chat, {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": (completions, {"prompt": "hi"}),
}
pytestmark = pytest.mark.parametrize("dialect", sorted(BASES))


def parse(dialect: str, **changes: Any) -> GenerateRequest:
    module, base = BASES[dialect]
    request: GenerateRequest = module.parse(json.dumps({"model": "tiny", **base, **changes}).encode(), FACTS)
    return request


def search(dialect: str, **changes: Any) -> GenerateRequest:
    return parse(dialect, **{"use_beam_search": True, "n": 2, **changes})


def refuse(dialect: str, **changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        search(dialect, **changes)
    return caught.value


def test_n_is_the_number_of_beams_and_of_answers_unless_best_of_is_wider(dialect: str) -> None:
    request = search(dialect, n=3)
    assert (request.beams, request.n, request.num_sequences) == (BeamParams(3, 3), 3, 3)
    request = search(dialect, n=1, best_of=4)
    assert (request.beams, request.n, request.num_sequences) == (BeamParams(4, 1), 1, 4)
    assert request.best is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"n": 1}, "n"), ({"best_of": 1}, "best_of"), ({"n": 3, "best_of": 2}, "best_of"), ({"best_of": 17}, "best_of")],
)
def test_a_width_that_cannot_be_is_refused(dialect: str, changes: dict[str, Any], param: str) -> None:
    error = refuse(dialect, **changes)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(("given", "meant"), [(True, True), (False, False), (None, False), ("never", "never")])
def test_early_stopping_has_three_forms(dialect: str, given: Any, meant: Any) -> None:
    beams = search(dialect, early_stopping=given).beams
    assert beams is not None
    assert beams.early_stopping is meant or beams.early_stopping == meant == "never"


def test_a_length_penalty_is_a_number_within_bounds(dialect: str) -> None:
    assert search(dialect, length_penalty=-0.5).beams == BeamParams(2, 2, -0.5)
    assert search(dialect, length_penalty=None).beams == BeamParams(2, 2, 1.0)
    for value in (11, -11, "long"):
        assert refuse(dialect, length_penalty=value).param == "length_penalty"
    for early in ("always", 3, []):
        assert refuse(dialect, early_stopping=early).param == "early_stopping"


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"presence_penalty": 1},
        {"frequency_penalty": 1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 1}},
        {"stop": ["x"]},
        {"prompt_logprobs": 1},
        {"cache_hit_threshold": 0.5},
    ],
)
def test_a_field_that_would_change_the_search_is_refused_by_its_name(dialect: str, field: dict[str, Any]) -> None:
    error = refuse(dialect, **field)
    assert (error.status, error.param) == (400, *field)
    assert "use_beam_search" in error.message


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 0},
        {"top_p": 1},
        {"top_k": -1},
        {"logit_bias": {}},
        {"stop": []},
        {"min_tokens": 2},
        {"ignore_eos": True},
        {"stop_token_ids": [5]},
        {"seed": 3},
        {"stream": True},
        {"cache_salt": "x"},
        {"priority": 1},
        {"prompt_logprobs": False},
    ],
)
def test_other_fields_go_with_a_search(dialect: str, field: dict[str, Any]) -> None:
    assert search(dialect, **field).beams == BeamParams(2, 2)


def test_log_probabilities_are_of_the_texts_that_are_found(dialect: str) -> None:
    asked = {"logprobs": True, "top_logprobs": 3} if dialect == "chat" else {"logprobs": 3}
    assert search(dialect, **asked).beams == BeamParams(2, 2, logprobs=3)


def test_without_a_search_its_fields_are_ignored_and_named(dialect: str) -> None:
    request = parse(dialect, length_penalty=2, early_stopping=True)
    assert (request.beams, request.ignored) == (None, ("length_penalty", "early_stopping"))
    assert search(dialect, length_penalty=2).ignored == ()


def test_blocks_are_not_handed_over_for_a_search(dialect: str) -> None:
    facts = {"do_remote_decode": True}
    assert refuse(dialect, kv_transfer_params=facts).param == "kv_transfer_params"


def test_an_echo_of_a_prompt_with_log_probabilities_is_refused(dialect: str) -> None:
    if dialect == "completions":
        assert refuse(dialect, echo=True, logprobs=1).param == "echo"
        assert refuse(dialect, echo=True, max_tokens=0).param == "max_tokens"
        assert search(dialect, echo=True).echo
    else:
        assert refuse(dialect, echo=True).param == "echo"
