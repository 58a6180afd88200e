"""From a client's wishes for the prompt cache to token counts of its prompts, which the engine understands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from moeserve.frontend import limits
from moeserve.frontend.dialects.internal import CacheOptions, ChatPrompt
from moeserve.frontend.http import ApiError

Encode = Callable[[ChatPrompt], Sequence[int]]
Retentions = tuple[tuple[int, float], ...]


def asks_cache(options: CacheOptions, *, keeps_states: bool) -> bool:
    """Return whether a request needs a `CacheWish` for each prompt."""
    return options.seconds is not None or bool(options.breakpoints) or options.report or keeps_states


def marked_lengths(
    prompt: ChatPrompt | str | list[int],
    token_ids: Sequence[int],
    options: CacheOptions,
    encode: Encode,
    *,
    keeps_states: bool,
) -> tuple[Retentions, tuple[int, ...]]:
    """Return the prefixes of a prompt to retain and the borders in it, see `CacheWish`.

    encode: gives the token ids of other conversations; may raise ApiError.
    """
    retentions = [] if options.seconds is None else [(len(token_ids), options.seconds)]
    borders: tuple[int, ...] = ()
    if isinstance(prompt, ChatPrompt):
        for num_messages, seconds in options.breakpoints[-limits.MAX_CACHE_BREAKPOINTS :]:
            retentions.append((_prefix_length(prompt, num_messages, token_ids, encode), seconds))
        if keeps_states:
            borders = _borders(prompt, token_ids, encode)
    kept = tuple((num_tokens, seconds) for num_tokens, seconds in retentions if num_tokens)
    return kept, borders


def _borders(prompt: ChatPrompt, token_ids: Sequence[int], encode: Encode) -> tuple[int, ...]:
    """Return the tokens before which tools and system messages end, and before which the answer's head begins.

    Other conversations begin with the same system messages. The next turn of this one may have another head before the
    answer: many templates leave out reasoning that was opened there.
    """
    borders = []
    num_first = next(
        (index for index, one in enumerate(prompt.messages) if one["role"] not in ("system", "developer")), 0
    )
    if num_first or prompt.tools:
        borders.append(_prefix_length(prompt, num_first, token_ids, encode))
    if prompt.add_generation_prompt:
        short = replace(prompt, messages=[{"role": "user", "content": "."}], tools=(), continue_final=False)
        with suppress(ApiError):
            head = encode(short)[len(encode(replace(short, add_generation_prompt=False))) :]
            if head and token_ids[-len(head) :] == head:
                borders.append(len(token_ids) - len(head))
    return tuple(border for border in borders if border)


def _prefix_length(prompt: ChatPrompt, num_messages: int, token_ids: Sequence[int], encode: Encode) -> int:
    """Count the tokens of the prompt that its tools and first messages determine.

    They are what the prompt has in common with these messages rendered alone: a template may write the end of a
    conversation in another way than its middle. Templates that refuse them alone leave no prefix to retain.
    """
    if num_messages >= len(prompt.messages):
        return len(token_ids)
    head = replace(prompt, messages=prompt.messages[:num_messages], add_generation_prompt=False)
    try:
        alone = encode(head)
    except ApiError:
        return 0
    limit = min(len(alone), len(token_ids))
    return next((index for index in range(limit) if alone[index] != token_ids[index]), limit)
