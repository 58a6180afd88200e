"""From what a client asks of the prompt cache to token counts of its prompts, which the engine understands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
    """Return the wish of each prompt (token ids); None, at no cost, where the request asks nothing of the cache."""
    options = request.cache
    if options.seconds is None and not options.breakpoints and not options.report:
        return None
    wishes = []
    for prompt, token_ids in zip(request.prompts, prompts, strict=True):
        retentions = [] if options.seconds is None else [(len(token_ids), options.seconds)]
        if isinstance(prompt, ChatPrompt):
            for num_messages, seconds in options.breakpoints:
                retentions.append((await _prefix_length(services, prompt, num_messages, token_ids, facts), seconds))
        kept = tuple((num_tokens, seconds) for num_tokens, seconds in retentions if num_tokens)
        wishes.append(CacheWish(kept, identity.retention_share, options.report))
    return wishes


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
