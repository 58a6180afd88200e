"""Budgets of thought over whole services with a tiny random model that the template has think: exact in every dialect,
whatever else a request asks for, with drafts, on two ranks, and over the death of the model process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any

import pytest

from tests.support.service import Service, children_of, descendants, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_model import TEMPLATE

END = "</think>"
MESSAGE = "So."
THINKING_TEMPLATE = TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|><think>\n{% endif")
SETTINGS = ("--max-model-len", "1024", "--max-restarts", "1000", "--reasoning-effort-budgets", '{"low": 6, "high": 11}')
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# Some of the thousand requests are sent every time.
PARTS = [range(40), pytest.param(range(40, 1000), marks=pytest.mark.long)]
FAMILIES = {
    "plain": ("--speculative-config", "suffix"),
    "message": ("--reasoning-budget-message", MESSAGE, "--reasoning-budget", "9"),
    "tight": ("--kv-cache-memory", "256KiB"),  # 1,024 tokens
    "ranks": ("--expert-parallel-size", "2", "--engine-timeout", "60"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Service]]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("m"), THINKING_TEMPLATE)
    with service(model, tmp_path_factory.mktemp("s"), *SETTINGS, *FAMILIES[request.param]) as started:
        yield request.param, started


@dataclass(frozen=True)
class Ask:
    """A request, the budget that it should have, and how many tokens it may have."""

    path: str
    body: dict[str, Any]
    budget: int | None
    max_tokens: int
    num_thinking: int  # choices whose prompts end inside a thought
    idle: str | None  # the field of an effort that has no budget, and that the template does not read

    def inside(self, message: str) -> int:
        """The tokens inside a thought that nothing but the budget or the length ends. A token is a byte."""
        if self.budget is None:
            return self.max_tokens
        whole = self.budget + len(message)
        # A cut end is no end.
        return whole if self.max_tokens >= whole + len(END) else self.max_tokens


def draw(random: Random, default: int | None) -> Ask:
    """A random request in a random dialect."""
    path = random.choice(["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
    max_tokens = random.choice([1, 5, 12, 20, 40])
    body: dict[str, Any] = {"model": "m", "seed": random.randrange(99), "temperature": 1.0, "ignore_eos": True}
    body["stream"] = random.random() < 0.4
    said = [{"role": "user", "content": "say " + "abc" * random.randrange(9)}]
    budget = random.choice([None, 0, 1, 2, 7, 15, 30])
    field = random.choice(["thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens"])
    effort, efforts = random.choice(["low", "high", "medium"]), {"low": 6, "high": 11, "medium": default}
    num_thinking = 1
    by_effort = path != "/v1/completions" and budget is None and random.random() < 0.6
    if budget is not None:
        body[field] = budget
    if path != "/v1/messages":
        # A model that begins the marker by itself has a token less inside.
        body["logit_bias"] = {str(ord("<")): -100}
    match path:
        case "/v1/chat/completions":
            num_thinking = random.choice([1, 1, 3])
            body |= {"messages": said, "max_tokens": max_tokens, "n": num_thinking}
            body |= {"reasoning_effort": effort} if by_effort else {}
            body |= {"logprobs": True} if random.random() < 0.3 else {}
            body |= {"stream_options": {"include_usage": True}} if body["stream"] else {}
            if random.random() < 0.3:
                body["tools"] = [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}]
                body["tool_choice"] = random.choice(["auto", "required"])
            elif random.random() < 0.3:
                form = {"name": "form", "schema": TOOL}
                body["response_format"] = {"type": "json_schema", "json_schema": form}
        case "/v1/completions":
            n, prompts = (
                random.choice([1, 1, 3]),
                random.choice([["a<think>"], ["a"], ["a<think>b", "</think>", "<think>"]]),
            )
            body |= {"prompt": prompts, "max_tokens": max_tokens, "n": n}
            body |= {"logprobs": 0} if random.random() < 0.3 else {}
            body |= {"stream_options": {"include_usage": True}} if body["stream"] else {}
            num_thinking = n * sum(prompt.rfind("<think>") > prompt.rfind("</think>") for prompt in prompts)
        case "/v1/messages":
            body |= {"messages": said, "max_tokens": max_tokens}
            body |= {"output_config": {"effort": effort}} if by_effort else {}
            if budget and random.random() < 0.5:
                body["thinking"] = {"type": "enabled", "budget_tokens": body.pop(field)}
        case _:
            body |= {"input": said, "max_output_tokens": max_tokens, "store": False}
            body |= {"reasoning": {"effort": effort}} if by_effort else {}
    if budget is None:
        budget = efforts[effort] if by_effort else default
    efforts_by_path = {"/v1/chat/completions": "reasoning_effort", "/v1/messages": "output_config.effort"}
    idle = efforts_by_path.get(path, "reasoning.effort") if by_effort and effort == "medium" else None
    return Ask(path, body, budget, max_tokens, num_thinking, idle)


def reasoning_tokens(answer: Any) -> int | None:
    """The count of an answer or of one of its events, None if it has none."""
    usage = answer.get("usage") or (answer.get("response") or {}).get("usage") or {}
    details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    found = details.get("reasoning_tokens", details.get("thinking_tokens"))
    return None if found is None else int(found)


def send(running: Service, ask: Ask) -> list[Any]:
    """The answer, or the events of its stream."""
    response = running.http.post(ask.path, json=ask.body)
    assert response.status_code == 200, (ask, response.text)
    assert response.headers.get("x-moeserve-ignored") == ask.idle
    if not ask.body["stream"]:
        return [response.json()]
    # Only line feeds end lines of a stream.
    lines = response.content.decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def check(running: Service, ask: Ask, message: str) -> None:
    answers = send(running, ask)
    told = [count for answer in answers if (count := reasoning_tokens(answer)) is not None]
    assert told, (ask, answers[-1])
    if ask.path == "/v1/messages" and not message and begins_the_end(running, ask):
        ask = replace(ask, budget=ask.budget and ask.budget - 1)
    assert told[-1] == ask.num_thinking * ask.inside(message), ask


def begins_the_end(running: Service, ask: Ask) -> bool:
    """Whether the last token of the budget is the first one of the marker, as the same chat shows it."""
    if not ask.budget:
        return False
    same = {name: ask.body[name] for name in ("model", "messages", "seed", "temperature", "ignore_eos")}
    same |= {"max_tokens": ask.budget, "thinking_token_budget": -1, "logprobs": True}
    answer = running.http.post("/v1/chat/completions", json=same).json()
    return bool(answer["choices"][0]["logprobs"]["content"][-1]["bytes"] == [ord("<")])


def kill_engine(running: Service) -> None:
    """Kill the process that computes."""
    engine = next(iter(descendants(children_of(running.process.pid)["worker"])), None)
    if engine is not None:
        os.kill(engine, signal.SIGKILL)


def test_a_rendered_request_tells_its_budget(running: tuple[str, Service]) -> None:
    name, served = running
    default = 9 if name == "message" else None
    said = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (("/v1/chat/completions", said), ("/v1/completions", {"prompt": ["<think>", "a"]})):
        for budget, told in ((None, default), (0, 0), (5, 5), (-1, None)):
            asked = {"model": "m", **body} | ({} if budget is None else {"thinking_token_budget": budget})
            rendered = served.http.post(f"{path}/render", json=asked).json()
            for one in rendered if isinstance(rendered, list) else [rendered]:
                assert one["sampling_params"]["thinking_token_budget"] == told


def test_an_answer_of_a_form_has_no_thoughts_in_text_completions(running: tuple[str, Service]) -> None:
    _, served = running
    body = {"model": "m", "prompt": "<think>", "max_tokens": 9, "thinking_token_budget": 2, "guided_choice": ["yes"]}
    answer = served.http.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"] == "yes"
    assert answer.headers["x-moeserve-ignored"] == "thinking_token_budget"


def num_preempted(served: Service) -> float:
    return served.figure("moeserve_preemptions_total")


@pytest.mark.parametrize("numbers", PARTS, ids=len)
def test_budgets_are_exact_in_every_dialect(running: tuple[str, Service], numbers: range) -> None:
    name, served = running
    message, default = (MESSAGE, 9) if name == "message" else ("", None)
    asks = [draw(Random(f"{name} {number}"), default) for number in numbers]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda ask: check(served, ask, message), asks))


def test_budgets_are_exact_in_answers_that_give_their_memory_to_others(running: tuple[str, Service]) -> None:
    name, served = running
    if name != "tight":
        pytest.skip("memory suffices")

    def long_ask(number: int) -> Ask:
        body = {"model": "m", "prompt": f"{number}<think>", "max_tokens": 300, "ignore_eos": True, "seed": number}
        body |= {"thinking_token_budget": 25 * number, "logit_bias": {str(ord("<")): -100}, "stream": False}
        return Ask("/v1/completions", body, 25 * number, 300, 1, None)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda number: check(served, long_ask(number), ""), range(10)))
    wait_until(lambda: num_preempted(served) > 0)


@pytest.mark.parametrize("numbers", [range(20), pytest.param(range(20, 400), marks=pytest.mark.long)], ids=len)
def test_budgets_are_exact_while_model_processes_die(running: tuple[str, Service], numbers: range) -> None:
    name, served = running
    if name not in ("plain", "tight"):
        pytest.skip("two families suffice; a group of ranks ends as a whole")
    asks = [draw(Random(f"death {name} {number}"), None) for number in numbers]
    with ThreadPoolExecutor(8) as pool:
        checks = [pool.submit(check, served, ask, "") for ask in asks]
        for number in range(10, len(asks), 60):
            checks[number].result()
            kill_engine(served)
        for done in checks:
            done.result()
    wait_until(lambda: served.http.get("/ready").status_code == 200)


def test_the_thought_is_that_of_a_free_model_up_to_its_budget_and_the_answer_begins_behind_it(
    running: tuple[str, Service],
) -> None:
    name, served = running
    message = MESSAGE if name == "message" else ""

    def said(**fields: Any) -> bytes:
        body = {"model": "m", "messages": [{"role": "user", "content": "go"}], "seed": 3, "ignore_eos": True}
        answer = served.http.post("/v1/chat/completions", json=body | {"logprobs": True, **fields}).json()
        tokens = answer["choices"][0]["logprobs"]["content"]
        return b"".join(bytes(token["bytes"]) or b"?" for token in tokens)

    free = said(max_tokens=40, thinking_token_budget=-1)
    for budget in (0, 1, 5, 13):
        bound = said(max_tokens=40, thinking_token_budget=budget)
        ended = free[:budget] + (message + END).encode()
        assert bound[: len(ended)] == ended


def answered_over_a_death(served: Service, body: dict[str, Any]) -> list[Any]:
    """The events of a streamed chat whose model process is killed once it has begun."""
    events: list[Any] = []
    with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
        begun, is_killed = b"", False
        for data in response.iter_bytes():
            *lines, begun = (begun + data).split(b"\n")
            events += [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
            if not is_killed and sum(len(event["choices"]) for event in events) > 5:
                kill_engine(served)
                is_killed = True
    wait_until(lambda: served.http.get("/ready").status_code == 200)
    return events


def test_a_thought_goes_on_and_ends_exactly_when_the_model_process_dies(running: tuple[str, Service]) -> None:
    name, served = running
    if name == "ranks":
        pytest.skip("its worker is a group of ranks, whose death the tests of ranks show")
    message = MESSAGE if name == "message" else ""
    budget, max_tokens = 600, 750
    body = {"model": "m", "messages": [{"role": "user", "content": "long"}], "ignore_eos": True}
    body |= {"max_tokens": max_tokens, "thinking_token_budget": budget, "stream": True, "logprobs": True}
    body["stream_options"] = {"include_usage": True}
    events: list[Any] = []
    seeds = count(1)
    # On a busy machine the signal may come when the answer is whole.
    while not events or "resumed" not in events[-1]["usage"]:
        body["seed"] = next(seeds)
        events = answered_over_a_death(served, body)
    # The undisturbed answer comes second: drafts out of the tree give a repeated stream in so few steps that a signal
    # may come too late.
    undisturbed = send(served, Ask("/v1/chat/completions", body, budget, max_tokens, 1, None))

    def tokens(answer: list[Any]) -> list[list[int]]:
        choices = [choice for event in answer for choice in event["choices"] if choice.get("logprobs")]
        return [token["bytes"] for choice in choices for token in choice["logprobs"]["content"]]

    assert tokens(events) == tokens(undisturbed)
    assert reasoning_tokens(events[-1]) == budget + len(message)
