"""What is sent: conversations made from a seed. Pure.

Two runs with the same (seed, run number) send the same text, to any server; any other pair has another beginning, so
that nothing is found in a prefix cache from the run before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeserve.bench.words import text

# 900 words and a chat template make about 1000 tokens.
_PREFIX_WORDS = 900


@dataclass(frozen=True, slots=True)
class Conversation:
    """One user: `questions` are asked in turn, each with the whole history before it.

    `variant` names what a request of this conversation measures; records are summarised per variant.
    `cold`: nothing of the first prompt can be cached, unless this seed was used on the server before.
    """

    variant: str
    system: str | None
    questions: tuple[str, ...]
    cold: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations of which at most `concurrency` wait for an answer at any time."""

    name: str
    concurrency: int
    max_tokens: int
    conversations: tuple[Conversation, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths and counts that a user may change; words where not said otherwise."""

    num_agents: int = 8
    num_turns: int = 3
    agents_at_once: int = 4
    system_words: int = 1000
    question_words: int = 40
    prefix_repetitions: int = 5
    sweep: tuple[int, ...] = (1, 4, 16)
    output_tokens: int | None = None

    def max_tokens(self, usual: int) -> int:
        """The output tokens per request of a workload that usually has `usual`."""
        return self.output_tokens or usual


def agents(shape: Shape, seed: int, run: int) -> list[Workload]:
    """Agents that share one long system prompt and each ask several questions, with the growing history."""
    system = text(shape.system_words, seed, run, "agents")
    conversations = tuple(
        Conversation(
            variant="",
            system=system,
            questions=tuple(
                text(shape.question_words, seed, run, "agents", agent, turn) for turn in range(shape.num_turns)
            ),
            cold=agent == 0,
        )
        for agent in range(shape.num_agents)
    )
    return [Workload("agents", shape.agents_at_once, shape.max_tokens(48), conversations)]


def stream(shape: Shape, seed: int, run: int) -> list[Workload]:
    """One stream, nothing beside it."""
    return [Workload("stream", 1, shape.max_tokens(96), _independent(1, "", shape, seed, run, "stream"))]


def streams(shape: Shape, seed: int, run: int) -> list[Workload]:
    """Sixteen streams at once with nothing in common."""
    return [Workload("streams", 16, shape.max_tokens(64), _independent(16, "", shape, seed, run, "streams"))]


def prefix_ttft(shape: Shape, seed: int, run: int) -> list[Workload]:
    """Time to first token of about 1000 tokens: cold, then with another question after the same prefix."""
    conversations = []
    for repetition in range(shape.prefix_repetitions):
        prefix = text(_PREFIX_WORDS, seed, run, "prefix", repetition)
        for variant in ("cold", "cached"):
            question = text(8, seed, run, "prefix", repetition, variant)
            conversations.append(Conversation(variant, prefix, (question,), cold=variant == "cold"))
    return [Workload("prefix-ttft", 1, shape.max_tokens(8), tuple(conversations))]


def sweep(shape: Shape, seed: int, run: int) -> list[Workload]:
    """The independent requests of `streams` at several concurrencies, two requests for each place."""
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
    "stream": stream,
    "streams": streams,
    "prefix-ttft": prefix_ttft,
    "sweep": sweep,
}


def _independent(count: int, variant: str, shape: Shape, seed: int, run: int, label: str) -> tuple[Conversation, ...]:
    return tuple(
        Conversation(variant, None, (text(shape.question_words, seed, run, label, index),), cold=True)
        for index in range(count)
    )
