"""A predicted answer over HTTP: the same text in fewer steps, its tokens counted; ignored where no drafts are made."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import Service, children_of, descendants, service
from tests.support.tiny_checkpoint import write_tiny_checkpoint

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Write."}],
    "max_tokens": 120,
    "temperature": 1.0,
    "seed": 5,
    "logit_bias": {str(code): 30 for code in range(97, 123)},
    "ignore_eos": True,
}


def ask(
    running: Service, prediction: str | None, route: str = "chat/completions", **changes: Any
) -> tuple[str, Any, Any]:
    """Return the text, the details of the completion tokens and the headers of an answer with a cache of its own."""
    body = {**CHAT, "cache_salt": os.urandom(8).hex(), **changes}
    if prediction is not None:
        body["prediction"] = {"type": "content", "content": prediction}
    answer = running.http.post(f"/v1/{route}", json=body)
    assert answer.status_code == 200, answer.text
    choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, usage["completion_tokens_details"], answer.headers


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model, settings = write_tiny_checkpoint(tmp_path_factory.mktemp("m")), ("--speculative-config", "suffix")
    with service(model, tmp_path_factory.mktemp("s"), *settings, "--max-model-len", "4096") as running:
        yield running


def test_a_predicted_answer_is_the_same_text_and_its_tokens_are_counted(drafting: Service) -> None:
    assert_predicted(drafting)


def test_two_ranks_use_predictions_too(tmp_path: Path) -> None:
    model, settings = write_tiny_checkpoint(tmp_path / "m"), ("--expert-parallel-size", "2")
    with service(model, tmp_path, "--speculative-config", "suffix", *settings) as running:
        assert_predicted(running)


def assert_predicted(running: Service) -> None:
    """Answers are the same with a right, a partly wrong and a stopped prediction, whose tokens are counted."""
    text, details, _ = ask(running, None)
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)
    again, details, headers = ask(running, text)
    assert again == text
    assert details["accepted_prediction_tokens"] > 90
    assert details["rejected_prediction_tokens"] == 0
    assert "x-moeserve-ignored" not in headers
    again, details, _ = ask(running, text[:40] + "THIS IS NOT IN IT" + text[44:])
    assert again == text
    assert details["accepted_prediction_tokens"] > 60
    assert details["rejected_prediction_tokens"] > 0
    stopped, details, _ = ask(running, text, stop=[text[50:54]])
    assert stopped == text[:50]
    assert details["accepted_prediction_tokens"] > 20
    prompt = {"messages": None, "prompt": "Write."}
    text, _, _ = ask(running, None, "completions", **prompt)
    again, details, _ = ask(running, text, "completions", **prompt)
    assert again == text
    assert details["accepted_prediction_tokens"] > 90


def test_a_predicted_answer_goes_on_after_the_engine_has_died(drafting: Service) -> None:
    long = {"max_tokens": 1500}
    text, _, _ = ask(drafting, None, **long)
    # It is wrong up to the place where the engine dies, so that this place is there.
    prediction = "~" * 200 + text[1000:]
    body = {**CHAT, **long, "stream": True, "stream_options": {"include_usage": True}}
    body["prediction"] = {"type": "content", "content": prediction}
    # On a busy machine the signal may come when the answer is whole, or nearly so.
    for _ in range(20):
        said, usage = answered_over_a_death(drafting, body | {"cache_salt": os.urandom(8).hex()})
        assert said == text
        num_accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
        if "resumed" in usage and num_accepted > 250:
            return
    pytest.fail("no answer used its prediction after the engine had died")


def answered_over_a_death(running: Service, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the text and the usage of a streamed chat whose engine is killed at the twentieth piece."""
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    with running.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        events = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
        for event in map(json.loads, events):
            usage = event.get("usage") or usage
            if event["choices"]:
                pieces.append(event["choices"][0]["delta"].get("content") or "")
            if len(pieces) == 20:
                engine = next(iter(descendants(children_of(running.process.pid)["worker"])), None)
                if engine is not None:
                    os.kill(engine, signal.SIGKILL)
    return "".join(pieces), usage


def test_a_prediction_is_ignored_and_the_answer_says_so_where_no_drafts_are_made(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "m")
    with service(model, tmp_path, "--speculative-config", "none") as running:
        text, _, _ = ask(running, None)
        again, details, headers = ask(running, text)
        assert again == text
        assert headers["x-moeserve-ignored"] == "prediction"
        assert details["accepted_prediction_tokens"] == 0


def test_a_beam_search_ignores_a_prediction_and_says_so(drafting: Service) -> None:
    body = {"model": "m", "prompt": "Write.", "max_tokens": 5, "n": 2, "temperature": 0, "use_beam_search": True}
    plain, predicted = (
        drafting.http.post("/v1/completions", json={**body, **field})
        for field in ({}, {"prediction": {"type": "content", "content": "abc"}})
    )
    assert plain.status_code == predicted.status_code == 200
    assert predicted.json()["choices"] == plain.json()["choices"]
    assert predicted.headers["x-moeserve-ignored"] == "prediction"
