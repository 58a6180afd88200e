"""Over HTTP, with drafts and without, random requests have the same answers: with stop strings, tools, forms of the
answer, log probabilities and predictions, on one rank and on two, with recurrent states and with an MTP layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.saved_models import saved_model
from tests.support.service import Service, service, settle
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_model import EOS, SPECIALS, TEMPLATE, write_model_dir

NUM_REQUESTS = 10
NUM_IN_LONG_SUITE = 1_000
TOGETHER = 8
TWO_RANKS = ("--expert-parallel-size", "2", "--engine-timeout", "60")
SHORT = {("attention", "two ranks"), ("states", "one rank"), ("mtp", "one rank")}
TOOL = {"type": "object", "properties": {"city": {"enum": ["Bern", "Basel"]}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": TOOL}} for name in ("weather", "forecast")]
FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": TOOL}}
LETTERS = {str(code): 5 for code in range(97, 103)}


def draw(random: Random) -> dict[str, Any]:
    """Return a random request whose prompt repeats itself."""
    piece = "".join(random.choices("abcdef", k=random.randrange(3, 9)))
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": piece * random.randrange(1, 6)}],
        "max_tokens": random.choice([1, 9, 30, 60]),
        "temperature": random.choice([0.0, 0.0, 0.4, 1.2]),
        "seed": random.randrange(50),
        "n": random.choice([1, 1, 3]),
        "stream": random.random() < 0.3,
        "ignore_eos": random.random() < 0.5,
        "frequency_penalty": random.choice([0.0, 0.0, 0.4]),
        "logit_bias": random.choice([None, LETTERS, LETTERS]),
        "logprobs": random.random() < 0.3,
    }
    match random.randrange(5):
        case 0:
            body |= {"tools": TOOLS, "tool_choice": random.choice(["auto", "required"])}
        case 1:
            body["response_format"] = FORM
        case 2:
            body["prediction"] = {"type": "content", "content": piece * 9}
        case _:
            body["stop"] = ["".join(random.choices("abcdef", k=random.randrange(1, 4))) for _ in range(2)]
    return body


def ask(running: Service, body: dict[str, Any]) -> Any:
    """Return what an answer says, without names drawn for it and without counts of drafts."""
    if not body["stream"]:
        answer = running.http.post("/v1/chat/completions", json=body)
        return answer.status_code, [_plain(choice) for choice in answer.json().get("choices", [answer.json()])]
    deltas: dict[int, list[Any]] = {}
    with running.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    deltas.setdefault(choice["index"], []).append(choice)
    return answer.status_code, [_joined(deltas[index]) for index in sorted(deltas)]


def _plain(choice: dict[str, Any]) -> dict[str, Any]:
    for call in (choice.get("message") or {}).get("tool_calls") or []:
        call.pop("id")
    return choice


def _joined(choices: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    """Return the text, the calls, the log probabilities and the end of a streamed choice, however it was cut."""
    calls = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls") or []]
    named = [call["name"] for call in calls if call.get("name")]
    arguments = "".join(call.get("arguments") or "" for call in calls)
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    logprobs = [entry for choice in choices for entry in (choice.get("logprobs") or {}).get("content") or []]
    return text, named, arguments, logprobs, choices[-1]["finish_reason"]


def answers(folder: Path, place: Path, bodies: list[dict[str, Any]], *settings: str) -> tuple[list[Any], float]:
    """Return all answers of a service, each body asked twice, and how many drafts were right."""
    with service(folder, place, *settings) as running, ThreadPoolExecutor(TOGETHER) as pool:
        found = [*pool.map(lambda body: ask(running, body), bodies), *pool.map(lambda body: ask(running, body), bodies)]
        settle(running)
        name = "moeserve_draft_accepted_tokens_total"
        lines = running.http.get("/metrics").text.splitlines()
        return found, sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.parametrize(
    "count", [NUM_REQUESTS, pytest.param(NUM_IN_LONG_SUITE, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(kind, settings, id=f"{kind}-{name}", marks=() if (kind, name) in SHORT else pytest.mark.long)
        for kind in ("attention", "states", "mtp")
        for name, settings in {"one rank": (), "two ranks": TWO_RANKS}.items()
    ],
)
def test_random_requests_have_the_same_answers_with_drafts_and_without(
    kind: str, settings: tuple[str, ...], count: int, tmp_path: Path
) -> None:
    if kind == "attention":
        folder = write_tiny_checkpoint(tmp_path / "m")
    else:
        folder = write_model_dir(tmp_path / "m", TEMPLATE, SPECIALS)
        fields = {"vocab_size": 256 + len(SPECIALS), "eos_token_id": EOS, "max_position_embeddings": 4096}
        saved_model("mtp-glm4_moe" if kind == "mtp" else "qwen3_5_moe_text", folder, **fields)
    random = Random(f"{kind} {settings}")
    bodies = [draw(random) for _ in range(count)]
    plain, num_right = answers(folder, tmp_path / "none", bodies, "--speculative-config", "none", *settings)
    assert num_right == 0
    method = "mtp" if kind == "mtp" else "suffix"
    drafted, num_right = answers(folder, tmp_path / method, bodies, "--speculative-config", method, *settings)
    assert num_right > 0
    assert drafted == plain
    assert [said for status, said in plain if status != 200] == []
