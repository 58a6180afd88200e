"""Agents with tools, in every dialect and with templates of several families, find what earlier turns have computed.

A tiny random model answers; grammars hold its calls and its answers to what an agent can go on from. Agents send the
conversation back as real clients do: arguments parsed and written anew, in the client's own spacing.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.agent_templates import FAMILIES
from tests.support.service import Service, service
from tests.support.tiny_checkpoint import write_tiny_checkpoint

BLOCK = 16
TURNS = 3
WORDS = {"type": "string", "pattern": "^[a-z]{2,8} [a-z]{2,8}$"}
ANSWER = {
    "type": "object",
    "properties": {"answer": WORDS},
    "required": ["answer"],
    "additionalProperties": False,
}
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": WORDS, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "search": {
        "type": "object",
        "properties": {
            "query": WORDS,
            "filters": {"type": "array", "items": {"enum": ["news", "maps", "ünïcode"]}, "minItems": 1, "maxItems": 3},
            "exact": {"type": "boolean"},
        },
        "required": ["query", "filters", "exact"],
        "additionalProperties": False,
    },
}
CHAT_TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Call {name}.", "parameters": schema}}
    for name, schema in TOOLS.items()
]


@dataclass(frozen=True)
class Call:
    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """An answer of the server: its text and calls, and the counts of its usage."""

    text: str
    calls: list[Call]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Agent(ABC):
    """A client of one dialect: keeps the conversation in the dialect's form."""

    path: str

    def __init__(self, running: Service, system: str) -> None:
        self._running = running
        self._system = system

    def post(self, **fields: Any) -> dict[str, Any]:
        response = self._running.http.post(self.path, json={"model": "m", **fields})
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    @abstractmethod
    def say(self, text: str) -> None:
        """Adds a user's message."""

    @abstractmethod
    def give(self, call: Call, result: str) -> None:
        """Adds the result of a call."""

    @abstractmethod
    def ask(self, *, call: bool, seed: int, parallel: bool = False) -> Reply:
        """Asks for a call, or several if `parallel`, or for an answer, and adds it to the conversation."""


def compact(arguments: Any) -> str:
    """The JSON of a client in JavaScript."""
    return json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)


class ChatAgent(Agent):
    path = "/v1/chat/completions"

    def __init__(self, running: Service, system: str) -> None:
        super().__init__(running, system)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self._system}]

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def give(self, call: Call, result: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call.call_id, "content": result})

    def ask(self, *, call: bool, seed: int, parallel: bool = False) -> Reply:
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANSWER}}
        wanted = {"tool_choice": "required"} if call else {"tool_choice": "none", "response_format": schema}
        fields = {"messages": self.messages, "tools": CHAT_TOOLS, "parallel_tool_calls": parallel, "seed": seed}
        body = self.post(**fields, **wanted)
        message, usage = body["choices"][0]["message"], body["usage"]
        assert body["choices"][0]["finish_reason"] in ("stop", "tool_calls")
        for made in message.get("tool_calls") or ():
            made["function"]["arguments"] = compact(json.loads(made["function"]["arguments"]))
        self.messages.append(message)
        calls = [
            Call(made["id"], made["function"]["name"], json.loads(made["function"]["arguments"]))
            for made in message.get("tool_calls") or ()
        ]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Reply(message["content"] or "", calls, usage["prompt_tokens"], cached, usage["completion_tokens"])


class ResponsesAgent(Agent):
    """Sends the whole conversation every time, and has the server keep nothing."""

    path = "/v1/responses"

    def __init__(self, running: Service, system: str) -> None:
        super().__init__(running, system)
        self.items: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": [{"type": "input_text", "text": text}]})

    def give(self, call: Call, result: str) -> None:
        self.items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})

    def ask(self, *, call: bool, seed: int, parallel: bool = False) -> Reply:
        schema = {"format": {"type": "json_schema", "name": "answer", "strict": True, "schema": ANSWER}}
        body = self.post(
            instructions=self._system,
            tools=[
                {"type": "function", "name": name, "description": f"Call {name}.", "parameters": parameters}
                for name, parameters in TOOLS.items()
            ],
            parallel_tool_calls=parallel,
            seed=seed,
            **({"tool_choice": "required"} if call else {"tool_choice": "none", "text": schema}),
            **self._context(),
        )
        assert body["status"] == "completed"
        self._remember(body)
        calls, texts, usage = [], [], body["usage"]
        for item in body["output"]:
            if item["type"] == "function_call":
                calls.append(Call(item["call_id"], item["name"], json.loads(item["arguments"])))
                item["arguments"] = compact(json.loads(item["arguments"]))
            else:
                texts += [part["text"] for part in item["content"]]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return Reply("".join(texts), calls, usage["input_tokens"], cached, usage["output_tokens"])

    def _context(self) -> dict[str, Any]:
        return {"input": self.items, "store": False}

    def _remember(self, body: dict[str, Any]) -> None:
        self.items += body["output"]


class KeptResponsesAgent(ResponsesAgent):
    """Sends the new items, and the id of the response that they follow."""

    def __init__(self, running: Service, system: str) -> None:
        super().__init__(running, system)
        self._latest: dict[str, Any] = {}

    def _context(self) -> dict[str, Any]:
        return {"input": self.items, **self._latest}

    def _remember(self, body: dict[str, Any]) -> None:
        self.items = []
        self._latest = {"previous_response_id": body["id"]}


class MessagesAgent(Agent):
    path = "/v1/messages"

    def __init__(self, running: Service, system: str) -> None:
        super().__init__(running, system)
        self.messages: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def give(self, call: Call, result: str) -> None:
        if self.messages[-1]["role"] != "user":
            self.messages.append({"role": "user", "content": []})
        block = {"type": "tool_result", "tool_use_id": call.call_id, "content": [{"type": "text", "text": result}]}
        self.messages[-1]["content"].append(block)

    def ask(self, *, call: bool, seed: int, parallel: bool = False) -> Reply:
        choice = {"type": "any", "disable_parallel_tool_use": not parallel} if call else {"type": "none"}
        body = self.post(
            system=[{"type": "text", "text": self._system}],
            messages=self.messages,
            max_tokens=3000,
            tools=[
                {"name": name, "description": f"Call {name}.", "input_schema": schema} for name, schema in TOOLS.items()
            ],
            tool_choice=choice,
            seed=seed,
            **({} if call else {"output_config": {"format": {"type": "json_schema", "schema": ANSWER}}}),
        )
        assert body["stop_reason"] in ("end_turn", "tool_use")
        self.messages.append({"role": "assistant", "content": body["content"]})
        calls = [
            Call(block["id"], block["name"], block["input"]) for block in body["content"] if block["type"] == "tool_use"
        ]
        text = "".join(block["text"] for block in body["content"] if block["type"] == "text")
        usage = body["usage"]
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
        return Reply(text, calls, prompt, cached, usage["output_tokens"])


Computed = tuple[list[int], int]
AGENTS: dict[str, type[Agent]] = {
    "chat": ChatAgent,
    "responses": ResponsesAgent,
    "responses-kept": KeptResponsesAgent,
    "messages": MessagesAgent,
}


class Conversation:
    """The same conversation as chat messages, and for each request the prompt and what of it was computed before."""

    def __init__(self, running: Service, system: str, computed: list[Computed]) -> None:
        """computed: the prompts of all earlier requests, with the numbers of their output tokens. Grows."""
        self.allowed = self.cached = 0
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self._running = running
        self._computed = computed

    def prompt(self) -> list[int]:
        response = self._running.http.post("/tokenize", json={"messages": self.messages, "tools": CHAT_TOOLS})
        tokens: list[int] = response.json()["tokens"]
        return tokens

    def note(self, prompt: list[int], reply: Reply) -> None:
        """Counts the tokens that a reply had cached and could have had cached."""
        assert reply.prompt_tokens == len(prompt)
        best = max((self._shared(prompt, *earlier) for earlier in self._computed), default=0)
        self.allowed += min(best, len(prompt) - 1) // BLOCK * BLOCK
        self.cached += reply.cached_tokens
        self._computed.append((prompt, reply.output_tokens))
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": compact(call.arguments)},
                }
                for call in reply.calls
            ]
        self.messages.append(message)

    @staticmethod
    def _shared(prompt: list[int], earlier: list[int], num_output: int) -> int:
        """The tokens that an earlier request has computed of a prompt, if its answer reads as it was written.

        Of the answer's last token nothing is computed.
        """
        pairs = enumerate(zip(prompt, earlier, strict=False))
        differs = next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(prompt), len(earlier)))
        return min(len(prompt), len(earlier) + num_output - 1) if differs == len(earlier) else differs


@dataclass(frozen=True)
class Served:
    """A service, and what it has computed so far."""

    family: str
    running: Service
    computed: list[Computed] = field(default_factory=list)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family = FAMILIES[request.param]
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), family.template, family.specials)
    with service(model, tmp_path_factory.mktemp("service"), "--max-model-len", "8192") as running:
        yield Served(request.param, running)


# Every family with every dialect; all together take long.
PAIRS = [
    pytest.param(family, dialect, marks=[pytest.mark.long] if row != column else [])
    for row, family in enumerate(FAMILIES)
    for column, dialect in enumerate(AGENTS)
]


@pytest.mark.parametrize(("served", "dialect"), PAIRS, indirect=["served"])
def test_every_turn_begins_with_what_earlier_ones_computed(served: Served, dialect: str) -> None:
    running = served.running
    system = f"You are an agent over {dialect}. You look things up before you answer, and you answer in two words."
    agent = AGENTS[dialect](running, system)
    whole = Conversation(running, system, served.computed)
    for turn in range(TURNS):
        question = f"Question {turn}: what is new, and where?"
        agent.say(question)
        whole.messages.append({"role": "user", "content": question})
        prompt = whole.prompt()
        reply = agent.ask(call=True, seed=turn, parallel=turn == 0)
        assert reply.calls
        whole.note(prompt, reply)
        for call in reply.calls:
            result = json.dumps({"found": [call.name, *call.arguments.values()]})
            agent.give(call, result)
            whole.messages.append({"role": "tool", "tool_call_id": call.call_id, "content": result})
        prompt = whole.prompt()
        whole.note(prompt, agent.ask(call=False, seed=turn))
    assert whole.allowed > 1000
    assert 0.95 * whole.allowed <= whole.cached <= whole.allowed
