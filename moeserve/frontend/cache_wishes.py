"""From what a client asks of the prompt cache to token counts of its prompts, which the engine understands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeserve.frontend import limits
from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest, ModelFacts
from moeserve.frontend.http import ApiError
from moeserve.frontend.keys import Identity
from moeserve.frontend.services import Services
from moeserve.plan import CacheWish


async def cache_wishes(
    services: Services,
    request: GenerateRequest,
    prompts: Sequence[list[int]],
    facts: ModelFacts,
    identity: Identity,
) -> list[CacheWish] | None:
    """Return the wish of each prompt (token ids); None, at no cost, where nothing is asked of the cache."""
    options = request.cache
    if options.seconds is None and not options.breakpoints and not options.report and not facts.keeps_states:
        return None
    wishes = []
    for prompt, token_ids in zip(request.prompts, prompts, strict=True):
        retentions = [] if options.seconds is None else [(len(token_ids), options.seconds)]
        if isinstance(prompt, ChatPrompt):
            for num_messages, seconds in options.breakpoints[-limits.MAX_CACHE_BREAKPOINTS :]:
                retentions.append((await _prefix_length(services, prompt, num_messages, token_ids, facts), seconds))
        kept = tuple((num_tokens, seconds) for num_tokens, seconds in retentions if num_tokens)
        borders: tuple[int, ...] = ()
        if facts.keeps_states and isinstance(prompt, ChatPrompt):
            borders = await _borders(services, prompt, token_ids, facts)
        wishes.append(CacheWish(kept, identity.retention_share, options.report, borders, identity.is_admin))
    return wishes


async def _borders(services: Services, prompt: ChatPrompt, token_ids: list[int], facts: ModelFacts) -> tuple[int, ...]:
    """Return the tokens before which tools and system messages end, and before which the answer's head begins.

    Other conversations begin with the same system messages. The next turn of this one may have another head before the
    answer: many templates leave out reasoning that was opened there.
    """
    borders = []
    num_first = next(
        (index for index, one in enumerate(prompt.messages) if one["role"] not in ("system", "developer")), 0
    )
    if num_first or prompt.tools:
        borders.append(await _prefix_length(services, prompt, num_first, token_ids, facts))
    if prompt.add_generation_prompt:
        short = replace(prompt, messages=[{"role": "user", "content": "."}], tools=(), continue_final=False)
        try:
            whole = await services.encode(short, facts)
            head = whole[len(await services.encode(replace(short, add_generation_prompt=False), facts)) :]
        except ApiError:
            head = []
        if head and token_ids[-len(head) :] == head:
            borders.append(len(token_ids) - len(head))
    return tuple(border for border in borders if border)


async def _prefix_length(
    services: Services, prompt: ChatPrompt, num_messages: int, token_ids: list[int], facts: ModelFacts
) -> int:
    """Count the tokens of the prompt that its tools and first messages determine.

    They are what the prompt has in common with these messages rendered alone: a template may write the end of a
    conversation in another way than its middle. Templates that refuse them alone leave no prefix to retain.
    """
    if num_messages >= len(prompt.messages):
        return len(token_ids)
    head = replace(prompt, messages=prompt.messages[:num_messages], add_generation_prompt=False)
    try:
        alone = await services.encode(head, facts)
    except ApiError:
        return 0
    limit = min(len(alone), len(token_ids))
    return next((index for index in range(limit) if alone[index] != token_ids[index]), limit)
