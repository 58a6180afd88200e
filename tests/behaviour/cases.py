"""Models, prompts and requests whose answers are frozen, and how bits are written down."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any, NamedTuple

Record = dict[str, list[Any]]
"""Of each prompt: its new `tokens`, digests of the `bits` of their log probabilities, how many tokens were `cached`.

Or digests of the bytes of a script's `plans`.
"""

VOCAB_SIZE = 128


class Model(NamedTuple):
    """expert_memory: of fewer experts than there are, in bytes; dispatch: of rows between two ranks."""

    expert_memory: int
    dispatch: str
    few_slots_on_gpu: bool


def _bytes_of(experts_per_layer: int, layers: int, ffn: int, biases: bool = False) -> int:
    """Three matrices of `ffn` x 64 in float32, in pages of 4 KiB."""
    pages = 3 * 64 * ffn * 4 // 4096 + biases
    return experts_per_layer * layers * pages * 4096


# By the names of tests/support/tiny_models.py.
MODELS = {
    "qwen3_moe": Model(_bytes_of(3, 2, 32), "alltoall", True),
    "qwen2_moe": Model(_bytes_of(4, 1, 32), "allgather", False),
    "gpt_oss": Model(_bytes_of(3, 3, 96, biases=True), "alltoall", True),
    "glm4_moe": Model(_bytes_of(2, 2, 32), "allgather", False),
    "deepseek_v3-yarn": Model(_bytes_of(3, 2, 32), "alltoall", False),
    "granitemoe": Model(_bytes_of(2, 3, 96), "allgather", True),
}


def _prompt(length: int, offset: int) -> list[int]:
    return [(7 * place * place + 13 * place + offset) % 120 + 3 for place in range(length)]


# Longer than every window, and the first one than the context that yarn stretches; the last begins as the first does.
PROMPTS = [_prompt(45, 0), _prompt(9, 31), [*_prompt(25, 0), *_prompt(5, 70)]]
# A request to the interpreter's GPU costs a second for every few tokens.
SHORT_PROMPTS = [_prompt(11, 0), [*_prompt(6, 0), 77]]
# The last one fills a KV block of the usual size, so that asked again it is found.
DEMO_TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea, there lived a fisherman who could not swim. One morning he",
]
# Every step that changes logits before a draw has work to do.
SAMPLING: dict[str, Any] = {
    "temperature": 1.3,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": {7: 1.5, 11: -2.0},
    "seed": 6,
}


def bits_of(logprob: float, top: Iterable[tuple[Any, float]]) -> str:
    """Eight digits for the exact value of every log probability given, in the order of the tokens."""
    values = "".join(f"{token!r} {value.hex()}\n" for token, value in sorted(top))
    return sha256(f"{float(logprob).hex()}\n{values}".encode()).hexdigest()[:8]
