"""A plan in the making, with the requests behind its rows."""

from __future__ import annotations

from array import array

from moeserve.plan import Chunk, ChunkExtras, StepPlan
from moeserve.request import Request


class PlanDraft:
    """Collects the chunks of one step, one plan per rank. The scheduler keeps it until the step's results have come.

    `requests` are those behind all chunks, in the order in which they were added: those of rank r are the requests of
    `plans[r].chunks`. The first `num_decodes` lacked one token, the others are prompts. `budgets[r]` is the number of
    tokens that still fit into the plan of rank r.
    """

    __slots__ = ("budgets", "num_decodes", "plans", "requests")

    def __init__(self, step: int, budget: int, num_ranks: int) -> None:
        self.plans = [StepPlan(step, [], array("i")) for _ in range(num_ranks)]
        self.requests: list[Request] = []
        self.num_decodes = 0
        self.budgets = [budget] * num_ranks

    @property
    def is_full(self) -> bool:
        return max(self.budgets) <= 0

    @property
    def prompts(self) -> list[Request]:
        return self.requests[self.num_decodes :]

    def add(self, request: Request, count: int) -> None:
        """Plans the next `count` tokens of a request that has leased blocks for them."""
        start = request.num_computed_tokens
        end = start + count
        token_ids = request.token_ids
        lease = request.lease
        assert lease is not None
        request.num_scheduled_tokens = count
        sampling = request.sampling if end == len(token_ids) else None
        extras = None if request.is_plain else chunk_extras(request, start, end)
        chunk = Chunk(request.request_id, token_ids[start:end], start, lease.block_ids, sampling, extras)
        self.plans[request.rank].chunks.append(chunk)
        self.requests.append(request)
        self.budgets[request.rank] -= count


def chunk_extras(request: Request, start: int, end: int) -> ChunkExtras | None:
    """What the chunk `token_ids[start:end]` of a request that is not plain needs besides; None for nothing."""
    sampling = request.sampling
    targets = None
    if request.wants_prompt_logprobs and end > request.num_prompt_logprobs:
        targets = request.token_ids[start + 1 : min(end + 1, request.num_prompt_tokens)]
    is_sampled = end == len(request.token_ids)
    if targets is None and not is_sampled:
        return None
    is_banned = is_sampled and request.num_output_tokens < sampling.min_tokens
    return ChunkExtras(
        history=request.token_ids[:] if is_sampled and sampling.needs_history else None,
        num_prompt_tokens=request.num_prompt_tokens,
        banned_token_ids=sampling.stop_token_ids if is_banned else (),
        prompt_targets=targets,
        num_top_logprobs=sampling.prompt_logprobs or 0,
    )
