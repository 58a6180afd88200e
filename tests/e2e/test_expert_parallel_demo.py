"""The demo model on two ranks: the greedy texts of one rank, with requests that arrive and leave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moeserve.model.source import resolve_model
from tests.support.service import Service, service

_TOPICS = ("rivers", "bread", "prime numbers", "old ships", "sleep", "maps", "rain", "chess")
_TASKS = ("Explain", "Write a short story about", "List five facts about", "Ask three questions about")


def texts_of(running: Service) -> list[str]:
    """64 greedy tokens for each of 32 prompts, at most 16 at a time."""

    def complete(number: int) -> str:
        prompt = f"{_TASKS[number % 4]} {_TOPICS[number // 4]}.\n"
        body = {"model": "m", "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        answer = running.http.post("/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(complete, range(32)))


@pytest.mark.long
def test_greedy_texts_of_two_ranks_are_those_of_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = Path(resolve_model(None, revision=None, offline=False, progress=lambda *_: None))
    arguments = ("--kv-cache-memory", "256MiB", "--dtype", "float32")
    with service(model, tmp_path_factory.mktemp("one"), *arguments) as one:
        expected = texts_of(one)
    with service(model, tmp_path_factory.mktemp("two"), *arguments, "--expert-parallel-size", "2") as two:
        found = texts_of(two)
    # Texts may part where the two likeliest tokens are within rounding: of a hundred at most one, and so of these none.
    assert [number for number, text in enumerate(expected) if found[number] != text] == []
