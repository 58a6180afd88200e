"""Beam searches over HTTP find the texts of transformers' own, whole and streamed, alone and beside each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.saved_models import saved_model, searched
from tests.support.service import Service, service
from tests.support.tiny_model import EOS, SPECIALS, TEMPLATE, write_model_dir

MAX_TOKENS = 14
# Tokens that end a text, so that texts have many lengths.
STOPS = [EOS, *range(40, 56)]
PROMPTS = [Random(number).choices(range(1, 250), k=length) for number, length in enumerate((1, 9, 30))]
RULES: list[tuple[int, dict[str, Any]]] = [
    (2, {"length_penalty": 1.0, "early_stopping": False}),
    (4, {"length_penalty": 0.3, "early_stopping": True}),
    (6, {"length_penalty": 1.7, "early_stopping": "never"}),
    (5, {"length_penalty": -0.5, "early_stopping": False}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model_dir(tmp_path_factory.mktemp("model"), TEMPLATE, SPECIALS)
    saved_model("mixtral", folder, vocab_size=256 + len(SPECIALS))
    return folder


@pytest.fixture(scope="module")
def running(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(folder, tmp_path_factory.mktemp("service"), "--block-size", "4") as started:
        yield started


def wanted(folder: Path, prompts: list[list[int]], width: int, n: int, rule: dict[str, Any]) -> list[list[str]]:
    """Return the texts that transformers finds for each prompt, the best first."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    search = {"num_beams": width, "num_return_sequences": n, "eos_token_id": STOPS, **rule}
    found = []
    for sequences in searched(folder, prompts, MAX_TOKENS, search):
        # A text ends with the token that has stopped it.
        lengths = [next((n for n, token in enumerate(own, 1) if token in STOPS), len(own)) for own in sequences]
        found.append([tokenizer.decode(own[:length]) for own, length in zip(sequences, lengths, strict=True)])
    return found


def ask(running: Service, route: str, width: int, n: int, rule: dict[str, Any], **fields: Any) -> list[str]:
    """Return the texts of an answer in the order of their numbers."""
    body = {"model": "m", "max_tokens": MAX_TOKENS, "use_beam_search": True, "best_of": width, "n": n, **rule}
    body |= {"temperature": 0, "stop_token_ids": STOPS, **fields}
    if not body.get("stream"):
        answer = running.http.post(f"/v1/{route}", json=body)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    texts = [""] * n
    with running.http.stream("POST", f"/v1/{route}", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"]["content"] or ""
    return texts


@pytest.mark.parametrize(("width", "rule"), RULES)
def test_searches_beside_each_other_find_the_texts_of_transformers(
    running: Service, folder: Path, width: int, rule: dict[str, Any]
) -> None:
    n = max(1, width // 2)
    expected = wanted(folder, PROMPTS, width, n, rule)
    asked = [(prompt, stream) for prompt in PROMPTS for stream in (False, True)]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = pool.map(lambda one: ask(running, "completions", width, n, rule, prompt=one[0], stream=one[1]), asked)
        assert list(found) == [texts for texts in expected for _ in range(2)]


def test_a_chat_is_searched_as_its_prompt_is(running: Service, folder: Path) -> None:
    messages = [{"role": "user", "content": "Go on."}]
    prompt = running.http.post("/tokenize", json={"model": "m", "messages": messages}).json()["tokens"]
    (expected,) = wanted(folder, [prompt], 4, 3, RULES[0][1])
    for stream in (False, True):
        assert ask(running, "chat/completions", 4, 3, RULES[0][1], messages=messages, stream=stream) == expected
