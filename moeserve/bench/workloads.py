"""The conversations that are sent to a server, made from a seed, and sending them.

Two runs with the same (seed, run number) send the same text, to any server; any other pair has another beginning, so
that nothing is found in a prefix cache from the run before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log
from random import Random
from time import perf_counter

from moeserve.bench.client import Answer, ChatClient, Message, RequestFailed, Response
from moeserve.bench.metrics import RequestRecord

# 900 words and a chat template make about 1000 tokens.
_PREFIX_WORDS = 900
_SENTENCE_WORDS = (8, 14)
# Sessions of coding agents, by the medians of their traces: 43 turns, a request of 142,000 tokens of which more than
# 96 % are cached, an answer of 444, less than a second from an answer to the next request. A first prompt of 19,000
# words and 5,000 new ones a turn make the middle request that long.
_TRACE_TURNS, _TRACE_SYSTEM_WORDS, _TRACE_NEW_WORDS, _TRACE_OUTPUT = 43, 19_000, 5_000, 444
_TRACE_GAP_S = 0.5
_TRACE_SPREAD = 1.0  # of the logarithm of what a tool gives: most results are short, some very long


@dataclass(frozen=True, slots=True)
class Conversation:
    """One user: `questions` are asked in turn, each with the whole history before it.

    `variant` names what a request measures; records are summarised per variant. `cold`: of the workload's cold
    conversations one at least finds nothing of its first prompt cached, unless the server has seen this seed before.
    `gap_s`: seconds between an answer and the next question.
    """

    variant: str
    system: str | None
    questions: tuple[str, ...]
    cold: bool
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations. At most `concurrency` of them wait for an answer at any time."""

    name: str
    concurrency: int
    max_tokens: int
    conversations: tuple[Conversation, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths and counts that a user may change; lengths are in words unless named otherwise."""

    num_agents: int = 8
    num_turns: int | None = None
    agents_at_once: int = 4
    system_words: int = 1000
    question_words: int = 40
    prefix_repetitions: int = 5
    sweep: tuple[int, ...] = (1, 4, 16)
    output_tokens: int | None = None
    scale: float = 1.0

    def turns(self, usual: int) -> int:
        """Return the questions of each agent in a workload that usually has `usual`."""
        return self.num_turns or usual

    def scaled(self, count: int) -> int:
        return max(1, round(count * self.scale))

    def max_tokens(self, usual: int) -> int:
        """Return the output tokens per request of a workload that usually has `usual`."""
        return self.output_tokens or usual


def agents(shape: Shape, seed: int, run: int) -> list[Workload]:
    """Agents that share one long system prompt and each ask several questions, with the growing history."""
    system = seeded_text(shape.system_words, seed, run, "agents")
    conversations = tuple(
        Conversation(
            variant="",
            system=system,
            questions=tuple(
                seeded_text(shape.question_words, seed, run, "agents", agent, turn) for turn in range(shape.turns(3))
            ),
            cold=True,
        )
        for agent in range(shape.num_agents)
    )
    return [Workload("agents", shape.agents_at_once, shape.max_tokens(48), conversations)]


def traces(shape: Shape, seed: int, run: int) -> list[Workload]:
    """Sessions of coding agents as their traces are, with one system prompt; lengths are scaled, turns are not."""
    system = seeded_text(shape.scaled(_TRACE_SYSTEM_WORDS), seed, run, "traces")
    random = Random(f"{seed}/{run}/traces")
    # The mean of the lengths is what a turn adds.
    middle = log(shape.scaled(_TRACE_NEW_WORDS)) - _TRACE_SPREAD**2 / 2

    def result(agent: int, turn: int) -> str:
        num_words = max(1, round(random.lognormvariate(middle, _TRACE_SPREAD)))
        return seeded_text(num_words, seed, run, "traces", agent, turn)

    conversations = tuple(
        Conversation(
            variant="",
            system=system,
            questions=tuple(result(agent, turn) for turn in range(shape.turns(_TRACE_TURNS))),
            cold=True,
            gap_s=_TRACE_GAP_S,
        )
        for agent in range(shape.num_agents)
    )
    return [Workload("traces", shape.agents_at_once, shape.max_tokens(shape.scaled(_TRACE_OUTPUT)), conversations)]


def stream(shape: Shape, seed: int, run: int) -> list[Workload]:
    return [Workload("stream", 1, shape.max_tokens(96), _independent(1, "", shape, seed, run, "stream"))]


def streams(shape: Shape, seed: int, run: int) -> list[Workload]:
    """Sixteen streams at once with nothing in common."""
    return [Workload("streams", 16, shape.max_tokens(64), _independent(16, "", shape, seed, run, "streams"))]


def prefix_ttft(shape: Shape, seed: int, run: int) -> list[Workload]:
    """Time to first token of about 1000 tokens: cold, then with another question after the same prefix."""
    conversations = []
    for repetition in range(shape.prefix_repetitions):
        prefix = seeded_text(_PREFIX_WORDS, seed, run, "prefix", repetition)
        for variant in ("cold", "cached"):
            question = seeded_text(8, seed, run, "prefix", repetition, variant)
            conversations.append(Conversation(variant, prefix, (question,), cold=variant == "cold"))
    return [Workload("prefix-ttft", 1, shape.max_tokens(8), tuple(conversations))]


def sweep(shape: Shape, seed: int, run: int) -> list[Workload]:
    """The independent requests of `streams` at several concurrencies, two requests per place."""
    return [
        Workload(
            "sweep",
            level,
            shape.max_tokens(64),
            _independent(2 * level, f"{level} at once", shape, seed, run, f"sweep{level}"),
        )
        for level in shape.sweep
    ]


WORKLOADS: dict[str, Callable[[Shape, int, int], list[Workload]]] = {
    "agents": agents,
    "traces": traces,
    "stream": stream,
    "streams": streams,
    "prefix-ttft": prefix_ttft,
    "sweep": sweep,
}


def _independent(count: int, variant: str, shape: Shape, seed: int, run: int, label: str) -> tuple[Conversation, ...]:
    return tuple(
        Conversation(variant, None, (seeded_text(shape.question_words, seed, run, label, index),), cold=True)
        for index in range(count)
    )


async def run_workload(client: ChatClient, workload: Workload) -> list[RequestRecord]:
    """Run all conversations at once and return a record per request.

    Places are handed out first come, first served, one request at a time. So agents take turns: with 8 of them and 4
    places, each waits for a place before its next question.
    """
    places = asyncio.Semaphore(workload.concurrency)
    tasks = [
        asyncio.create_task(_converse(client, conversation, workload.max_tokens, places))
        for conversation in workload.conversations
    ]
    return [record for records in await asyncio.gather(*tasks) for record in records]


async def _converse(
    client: ChatClient, conversation: Conversation, max_tokens: int, places: asyncio.Semaphore
) -> list[RequestRecord]:
    messages: list[Message] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    records: list[RequestRecord] = []
    for turn, question in enumerate(conversation.questions):
        messages.append({"role": "user", "content": question})
        if turn and conversation.gap_s:
            await asyncio.sleep(conversation.gap_s)
        async with places:
            record, text = await _ask(client, messages, max_tokens, conversation, cold=conversation.cold and turn == 0)
        records.append(record)
        if record.error is not None:
            num_left = len(conversation.questions) - turn - 1
            records += [_not_sent(conversation.variant, record.ended_at)] * num_left
            break
        messages.append({"role": "assistant", "content": text})
    return records


async def _ask(
    client: ChatClient, messages: list[Message], max_tokens: int, conversation: Conversation, *, cold: bool
) -> tuple[RequestRecord, str]:
    began = perf_counter()
    try:
        response, answer = await client.chat(messages, max_tokens)
    except RequestFailed as error:
        return RequestRecord(conversation.variant, cold, began, perf_counter(), error=str(error)), ""
    return record_of(response, answer, conversation.variant, cold=cold), answer.text


def record_of(response: Response, answer: Answer, variant: str = "", *, cold: bool = False) -> RequestRecord:
    return RequestRecord(
        variant,
        cold,
        sent_at=response.sent_at,
        ended_at=response.ended_at,
        event_times=answer.event_times,
        prompt_tokens=answer.prompt_tokens,
        output_tokens=len(answer.event_times) if answer.output_tokens is None else answer.output_tokens,
        cached_tokens=answer.cached_tokens,
    )


def _not_sent(variant: str, at: float) -> RequestRecord:
    return RequestRecord(variant, False, at, at, error="not sent: an earlier turn of the conversation failed")


def seeded_text(num_words: int, *seed: object) -> str:
    """Return `num_words` words in sentences: the same for equal seed parts, with another beginning for any others.

    Most words of `words.txt` are one token in the vocabularies in use, so that a length in words is close to a length
    in tokens; the exact number of tokens is always taken from the server's `usage`.
    """
    vocabulary = _vocabulary()
    random = Random("/".join(map(str, seed)))
    sentences = []
    while num_words > 0:
        words = random.choices(vocabulary, k=min(num_words, random.randint(*_SENTENCE_WORDS)))
        num_words -= len(words)
        sentences.append(" ".join(words).capitalize() + ".")
    return " ".join(sentences)


@cache
def _vocabulary() -> tuple[str, ...]:
    return tuple(files("moeserve.bench").joinpath("words.txt").read_text("utf-8").split())
