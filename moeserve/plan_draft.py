"""A plan in the making, with the requests behind its rows."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from moeserve.plan import Chunk, ChunkExtras, ChunkResult, StepPlan, StepResult
from moeserve.request import Request


class PlanDraft:
    """Collects the chunks of one step, one plan per rank. The scheduler keeps it until the step's results have come.

    `requests` are those behind all chunks, in the order in which they were added: those of rank r are the requests of
    `plans[r].chunks`. The first `num_decodes` lacked one token, the others are prompts. `budgets[r]` is the number of
    tokens that still fit into the plan of rank r. `duplicates` are (rank, block ids) that this plan may be the last to
    read.
    """

    __slots__ = ("budgets", "duplicates", "num_decodes", "plans", "requests")

    def __init__(self, step: int, budget: int, num_ranks: int) -> None:
        self.plans = [StepPlan(step, [], array("i")) for _ in range(num_ranks)]
        self.requests: list[Request] = []
        self.num_decodes = 0
        self.budgets = [budget] * num_ranks
        self.duplicates: list[tuple[int, list[int]]] = []

    @property
    def is_full(self) -> bool:
        return max(self.budgets) <= 0

    @property
    def prompts(self) -> list[Request]:
        return self.requests[self.num_decodes :]

    def add(self, request: Request, count: int) -> None:
        """Plans the next `count` known tokens of a request that has leased blocks for them."""
        start = request.num_planned_tokens
        end = start + count
        token_ids = request.token_ids
        lease = request.lease
        assert lease is not None
        request.num_scheduled_tokens += count
        sampling = request.sampling if end == len(token_ids) else None
        extras = None if request.is_plain else chunk_extras(request, start, end)
        chunk = Chunk(request.request_id, token_ids[start:end], start, lease.block_ids, sampling, extras)
        chunk.annotation, request.annotation = request.annotation, None
        self.plans[request.rank].chunks.append(chunk)
        self.requests.append(request)
        self.budgets[request.rank] -= count

    def add_drawn(self, request: Request, drawn_by: int) -> None:
        """Plans the token that the plan before will draw for a plain request, as its sampled chunk `drawn_by`."""
        lease = request.lease
        assert lease is not None
        start = request.num_planned_tokens
        request.num_scheduled_tokens += 1
        chunk = Chunk(request.request_id, array("i", [0]), start, lease.block_ids, request.sampling, None, drawn_by)
        self.plans[request.rank].chunks.append(chunk)
        self.requests.append(request)
        self.budgets[request.rank] -= 1

    def rows(self, results: Sequence[StepResult]) -> list[Iterator[tuple[Chunk, ChunkResult]]]:
        """Per rank its chunks with what came of them. Raises ValueError for results of another shape."""
        for plan, result in zip(self.plans, results, strict=True):
            if result.step != plan.step or len(result.chunks) != len(plan.chunks):
                raise ValueError(f"step {plan.step} and the result of step {result.step} do not belong together")
        return [zip(plan.chunks, result.chunks, strict=True) for plan, result in zip(self.plans, results, strict=True)]

    def sampled_place(self, request: Request) -> int | None:
        """The request's place among the sampled chunks of its rank's plan; None if it has none there."""
        place = 0
        for chunk in self.plans[request.rank].chunks:
            if chunk.sampling is not None:
                if chunk.request_id == request.request_id:
                    return place
                place += 1
        return None


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
