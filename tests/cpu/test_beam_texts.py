"""Beam search gives the texts and the scores of transformers' own, whatever else runs and however short memory is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks.token_engine import TokenEngine
from moeserve.config import ServeConfig
from moeserve.frontend.beam_search import BeamParams
from moeserve.plan import FinishReason, SamplingParams
from moeserve.wire import Output
from tests.support.model_searches import searched
from tests.support.tiny_models import build

STOPS = (7, 23)
BASE = ServeConfig(kv_cache_memory=2**21, block_size=4, max_model_len=256)
RULES: list[dict[str, Any]] = [
    {"width": 2, "length_penalty": 1.0, "early_stopping": False},
    {"width": 4, "length_penalty": 0.3, "early_stopping": True},
    {"width": 6, "length_penalty": 1.7, "early_stopping": "never"},
    {"width": 3, "length_penalty": -0.5, "early_stopping": "never"},
    {"width": 5, "length_penalty": 0.0, "early_stopping": False},
]


def prompts_of(random: Random) -> list[list[int]]:
    return [[random.randrange(8, 120) for _ in range(length)] for length in (1, 3, 8, 9, 14)]


def expected(
    model: Any, prompt: Sequence[int], params: BeamParams, max_tokens: int, min_tokens: int
) -> list[tuple[list[int], float]]:
    """Return the texts of transformers' own search, without what follows a stop token, and their scores."""
    answer = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.width,
        num_return_sequences=params.num_answers,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        eos_token_id=list(STOPS),
        pad_token_id=0,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    found = []
    for sequence, score in zip(answer.sequences.tolist(), answer.sequences_scores.tolist(), strict=True):
        output = sequence[len(prompt) :]
        ends = [place for place, token_id in enumerate(output) if token_id in STOPS]
        found.append((output[: ends[0] + 1] if ends else output, score))
    return found


def params_of(rule: dict[str, Any]) -> BeamParams:
    return BeamParams(num_answers=rule["width"], logprobs=0, **rule)


def score_of(found: Output, params: BeamParams) -> float:
    assert found.logprobs is not None
    total = sum(token.logprob for token in found.logprobs)
    return total / len(found.token_ids) ** params.length_penalty


@dataclass(frozen=True)
class Search:
    """Prompts that are searched by one rule, and the texts of transformers' own search for each."""

    prompts: list[list[int]]
    params: BeamParams
    sampling: SamplingParams
    wanted: list[list[tuple[list[int], float]]]


@cache
def searches_of(kind: str) -> tuple[Any, list[Search]]:
    """Return a model and its searches, the same for every engine."""
    model, random, searches = build(kind, **({"sliding_window": 9} if kind == "gpt_oss" else {})), Random(kind), []
    for number, rule in enumerate(RULES):
        params, prompts = params_of(rule), prompts_of(random)
        max_tokens, min_tokens = (12, 0) if number % 2 else (17, 5)
        sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=STOPS)
        wanted = [expected(model, prompt, params, max_tokens, min_tokens) for prompt in prompts]
        searches.append(Search(prompts, params, sampling, wanted))
    return model, searches


def check(found: list[Output], wanted: list[tuple[list[int], float]], params: BeamParams) -> None:
    assert [text.token_ids for text in found] == [token_ids for token_ids, _ in wanted]
    scores = [score_of(text, params) for text in found]
    assert scores == pytest.approx([score for _, score in wanted], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mixtral", {}),
        ("mixtral", {"max_num_batched_tokens": 12, "max_num_seqs": 12}),
        ("mixtral", {"enable_prefix_caching": False}),
        ("mixtral", {"kv_cache_memory": 120 * 2**10, "max_model_len": 64}),
        ("gpt_oss", {}),
        ("deepseek_v3-yarn", {"block_size": 16}),
    ],
)
def test_searches_find_the_texts_of_transformers_beam_search(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model, searches = searches_of(kind)
    model.save_pretrained(tmp_path)
    engine = TokenEngine(tmp_path, replace(BASE, **changes))
    num_stopped = 0
    for search in searches:
        answers = searched(engine, search.prompts, search.sampling, search.params)
        for wanted, found in zip(search.wanted, answers, strict=True):
            check(found, wanted, search.params)
            num_stopped += sum(text.finish_reason is FinishReason.STOP for text in found)
    assert num_stopped > 0
    engine.scheduler.check_idle()
    engine.close()


def random_rule(random: Random) -> dict[str, Any]:
    return {
        "width": random.randrange(2, 7),
        "length_penalty": random.choice([-1.0, 0.0, 0.6, 1.0, 2.0]),
        "early_stopping": random.choice([True, False, "never"]),
    }


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
def test_random_searches_find_the_texts_of_transformers_after_any_hit_in_the_cache(seed: int, tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    engine = TokenEngine(tmp_path, BASE)
    random = Random(seed)
    shared = [random.randrange(8, 120) for _ in range(random.randrange(8, 30))]
    num_cached = 0
    for _ in range(10):
        params = params_of(random_rule(random))
        max_tokens = random.randrange(1, 16)
        min_tokens = random.choice([0, max_tokens // 2])
        prompts = [
            [*shared[: random.randrange(1, len(shared))], random.randrange(8, 120)]
            for _ in range(random.randrange(1, 3))
        ]
        sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=STOPS)
        for prompt, found in zip(prompts, searched(engine, prompts, sampling, params), strict=True):
            check(found, expected(model, prompt, params, max_tokens, min_tokens), params)
            num_cached += found[0].num_cached_tokens or 0
    assert num_cached > 0
    engine.close()
