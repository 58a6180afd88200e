"""Budgets of thought in the harmony form, over a whole service with a tiny random model: a grammar has it write the
form's headers, and a bias has it begin with a message in the analysis channel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import Service, service
from tests.support.tiny_checkpoint import write_tiny_checkpoint

SETTINGS = ("--max-model-len", "2048", "--reasoning-parser", "harmony", "--tool-call-parser", "harmony")
FORM = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"]}
OPENING = b"<|channel|>analysis<|message|>"
# The other channels begin with these letters, a marker with the last one; a token is a byte.
BIAS = {str(ord(letter)): -100 for letter in "fc<"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("m"))
    _rename_end(model)
    with service(model, tmp_path_factory.mktemp("s"), *SETTINGS) as started:
        yield started


def _rename_end(model: Path) -> None:
    """Give the token that ends an answer another name: in the harmony form `<|end|>` ends no answer."""
    for file in model.iterdir():
        if file.suffix in (".json", ".jinja"):
            file.write_text(file.read_text().replace("<|end|>", "<|stop|>"))


def asked(**fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}], "seed": 3, "max_tokens": 400}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}}
    return body | {"logit_bias": BIAS, "response_format": form, "logprobs": True} | fields


@pytest.mark.parametrize("budget", [0, 1, 2, 7, 15])
def test_a_thought_ends_at_its_budget_and_the_answer_in_its_form_follows(running: Service, budget: int) -> None:
    free = running.http.post("/v1/chat/completions", json=asked(max_tokens=60)).json()
    answer = running.http.post("/v1/chat/completions", json=asked(thinking_token_budget=budget)).json()
    said, whole = (
        b"".join(bytes(token["bytes"]) or b"?" for token in one["choices"][0]["logprobs"]["content"])
        for one in (free, answer)
    )
    thought = said[: len(OPENING) + budget]
    assert thought.startswith(OPENING)
    assert whole.startswith(thought + b"<|end|><|start|>assistant<|channel|>final<|message|>")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
    assert "city" in json.loads(answer["choices"][0]["message"]["content"])


def test_a_streamed_thought_ends_at_its_budget(running: Service) -> None:
    body = asked(thinking_token_budget=7, stream=True, stream_options={"include_usage": True})
    lines = running.http.post("/v1/chat/completions", json=body).content.decode().split("\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 7
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "city" in json.loads("".join(delta.get("content") or "" for delta in deltas))


def test_a_completion_of_a_prompt_that_ends_inside_a_thought_has_the_rest_of_its_budget(running: Service) -> None:
    letters = {str(letter): 100 for letter in range(ord("a"), ord("z"))}
    body = {"model": "m", "max_tokens": 40, "seed": 3, "temperature": 1, "ignore_eos": True, "logit_bias": letters}

    def said(prompt: str, **fields: Any) -> tuple[str, int]:
        answer = running.http.post("/v1/completions", json={**body, "prompt": prompt, **fields}).json()
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens_details"]["reasoning_tokens"]

    for header in ("<|start|>assistant<|channel|>analysis<|message|>", "<|channel|>analysis <|message|>hm, "):
        free, num_tokens = said(header)
        assert num_tokens == 40
        text, num_tokens = said(header, thinking_token_budget=5)
        assert num_tokens == 5
        assert text.startswith(free[:5] + "<|end|>")
    for header in ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "<|channel|>final<|message|>"):
        assert said(header, thinking_token_budget=5)[1] == 0


def test_an_answer_behind_a_thought_obeys_a_grammar_in_gbnf(running: Service) -> None:
    body = asked(thinking_token_budget=3, ebnf='root ::= ("yes" | "no") [0-9]')
    del body["response_format"]
    answer = running.http.post("/v1/chat/completions", json=body).json()
    assert re.fullmatch("(yes|no)[0-9]", answer["choices"][0]["message"]["content"])
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    refused = running.http.post("/v1/chat/completions", json=body | {"ebnf": 'root ::= ("yes"'})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "ebnf")
