"""Has a formatter write whole answers, while other work of the event loop goes on."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

from moeserve.frontend.dialects.internal import Delta, Formatter
from moeserve.frontend.relay.answer import Answer

TOKENS_AT_ONCE = 256  # with log probabilities, in one write
# Lets one long answer work in a turn of the event loop, and any number of others.
Turns = AbstractAsyncContextManager[None]


async def completed(formatter: Formatter, choices: list[Delta], answer: Answer, long_answers: Turns) -> bytes:
    """Return the body of an answer. Other work of the event loop goes on between its parts."""
    writing = formatter.complete(choices, answer.usage)
    num_tokens = sum(len(choice.tokens) + len(choice.prompt) for choice in choices)
    turns: Turns = nullcontext() if num_tokens <= TOKENS_AT_ONCE else long_answers
    while True:
        async with turns:
            try:
                next(writing)
            except StopIteration as done:
                body: bytes = done.value
                return body
            await asyncio.sleep(0)
