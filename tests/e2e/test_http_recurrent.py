"""A service of a model with recurrent layers generates transformers' tokens over HTTP, cold, cached and in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.saved_models import generated, saved_model
from tests.support.service import Service, service
from tests.support.tiny_model import SPECIALS, TEMPLATE, write_model_dir

MAX_TOKENS = 16
SHARED = Random(1).choices(range(1, 250), k=70)
PROMPTS = [SHARED, [*SHARED[:64], 5, 6, 7], [*SHARED[:33], 9], [8] * 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model_dir(tmp_path_factory.mktemp("model"), TEMPLATE, SPECIALS)
    saved_model("qwen3_5_moe_text", folder, vocab_size=256 + len(SPECIALS))
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """The tokens that transformers generates."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.decode(tokens) for tokens in generated(folder, PROMPTS, MAX_TOKENS)]


@pytest.fixture(scope="module")
def running(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(folder, tmp_path_factory.mktemp("service"), "--max-num-batched-tokens", "64") as started:
        yield started


def ask(running: Service, prompt: list[int]) -> tuple[str, int]:
    """The text and how many tokens of the prompt were cached."""
    body = {"model": "m", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = running.http.post("/v1/completions", json=body).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_tokens_are_those_of_transformers_cold_and_cached(running: Service, expected: list[str]) -> None:
    assert ask(running, PROMPTS[0]) == (expected[0], 0)
    # An equal prompt goes on from the state at its last block border.
    assert ask(running, PROMPTS[0]) == (expected[0], 64)
    assert ask(running, PROMPTS[1]) == (expected[1], 64)


def test_tokens_are_those_of_transformers_beside_other_requests(running: Service, expected: list[str]) -> None:
    order = [0, 3, 2, 1, 3, 0, 2, 1]
    with ThreadPoolExecutor(len(order)) as pool:
        answers = list(pool.map(lambda number: ask(running, PROMPTS[number])[0], order))
    assert answers == [expected[number] for number in order]


@pytest.mark.long
def test_ranks_keep_the_states_of_their_own_requests(
    folder: Path, expected: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    order = [0, 3, 2, 1, 3, 0, 2, 1]
    with service(folder, tmp_path_factory.mktemp("ranks"), "--expert-parallel-size", "2") as two:
        for _ in range(2):
            with ThreadPoolExecutor(len(order)) as pool:
                answers = list(pool.map(lambda number: ask(two, PROMPTS[number])[0], order))
            assert answers == [expected[number] for number in order]
