"""A step while it is planned: the chunks of each rank's plan, and the facts about them that the commit needs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

from moeserve.plan import Chunk, ChunkExtras, ChunkResult, Request, StateUse, StepPlan, StepResult, WindowTable


class PlanDraft:
    """Collects the chunks of one step, one plan per rank. The scheduler keeps it until the step is committed.

    `requests[i]` belongs to the chunk that was added i-th, so the requests of rank r are in the order of
    `plans[r].chunks`. The first `num_decodes` requests lacked one token, the others are prompts. `budgets[r]` is the
    number of tokens that still fit into the plan of rank r. `duplicates` are (rank, block ids) that this plan may be
    the last to read.
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

    def zero(self, rank: int, blocks: Sequence[int], windows: Sequence[int]) -> None:
        """Have the step clear blocks, and window blocks, that requests of a rank have newly leased."""
        self.plans[rank].zeroed_blocks.extend(blocks)
        self.plans[rank].zeroed_windows.extend(windows)

    def add(self, request: Request, count: int, state: StateUse | None, window: WindowTable | None) -> None:
        """Plan the next `count` known tokens of a request that has leased blocks for them."""
        start = request.num_planned_tokens
        end = start + count
        token_ids = request.token_ids
        lease = request.lease
        assert lease is not None
        request.num_scheduled_tokens += count
        sampling = request.sampling if end == len(token_ids) else None
        extras = None if request.is_plain else _chunk_extras(request, start, end)
        chunk = Chunk(request.request_id, token_ids[start:end], start, lease.block_ids, sampling, extras)
        chunk.annotation, request.annotation = request.annotation, None
        chunk.state, chunk.window = state, window
        chunk.first_angle = request.first_angle
        self.plans[request.rank].chunks.append(chunk)
        self.requests.append(request)
        self.budgets[request.rank] -= count

    @property
    def size(self) -> tuple[int, float]:
        """The rows of the busiest rank, and the positions that they attend to."""
        sizes = []
        for plan in self.plans:
            attended = sum(len(c.token_ids) * (c.start + 0.5 * len(c.token_ids)) for c in plan.chunks)
            sizes.append((plan.num_tokens, attended))
        return max(sizes)

    def end_decodes(self, prompt_tokens: Callable[[list[Request], int], int]) -> None:
        """Note that all further requests are prompts, and set the budget of each rank for their tokens.

        prompt_tokens: computes this budget from the requests so far and the tokens that are left.
        """
        self.num_decodes = len(self.requests)
        self.budgets = [prompt_tokens(self.requests, budget) for budget in self.budgets]

    def set_half_aside(self) -> list[int]:
        """Halve the budgets; return the other halves, the larger ones, for `take_back`."""
        set_aside = [budget - budget // 2 for budget in self.budgets]
        self.budgets = [budget - half for budget, half in zip(self.budgets, set_aside, strict=True)]
        return set_aside

    def take_back(self, set_aside: list[int]) -> None:
        self.budgets = [budget + half for budget, half in zip(self.budgets, set_aside, strict=True)]

    def add_unsampled(
        self, request: Request, drawn_by: int, state: StateUse | None, window: WindowTable | None
    ) -> None:
        """Plan the token of a plain request that sampled chunk number `drawn_by` of the previous plan will give."""
        lease = request.lease
        assert lease is not None
        start = request.num_planned_tokens
        request.num_scheduled_tokens += 1
        chunk = Chunk(request.request_id, array("i", [0]), start, lease.block_ids, request.sampling, None, drawn_by)
        chunk.state, chunk.window = state, window
        chunk.first_angle = request.first_angle
        self.plans[request.rank].chunks.append(chunk)
        self.requests.append(request)
        self.budgets[request.rank] -= 1

    def rows(self, results: Sequence[StepResult]) -> list[Iterator[tuple[Chunk, ChunkResult]]]:
        """Return, per rank, its chunks with their results. Raise ValueError if `results` do not fit the plans."""
        for plan, result in zip(self.plans, results, strict=True):
            if result.step != plan.step or len(result.chunks) != len(plan.chunks):
                raise ValueError(f"step {plan.step} and the result of step {result.step} do not belong together")
        return [zip(plan.chunks, result.chunks, strict=True) for plan, result in zip(self.plans, results, strict=True)]

    def sampled_place(self, request: Request) -> int | None:
        """Return the request's place among the sampled chunks of its rank's plan; None if it has none there."""
        place = 0
        for chunk in self.plans[request.rank].chunks:
            if chunk.sampling is not None:
                if chunk.request_id == request.request_id:
                    return place
                place += 1
        return None


def _chunk_extras(request: Request, start: int, end: int) -> ChunkExtras | None:
    """Return the further inputs of the chunk `token_ids[start:end]` of a request that is not plain; None for none."""
    sampling = request.sampling
    targets = None
    if request.wants_prompt_logprobs and end > request.num_prompt_logprobs:
        targets = request.token_ids[start + 1 : min(end + 1, request.num_prompt_tokens)]
    is_sampled = end == len(request.token_ids)
    if targets is None and not is_sampled:
        return None
    is_banned = is_sampled and request.num_output_tokens < sampling.min_tokens
    return ChunkExtras(
        history=request.token_ids[:] if is_sampled and sampling.penalises else None,
        num_prompt_tokens=request.num_prompt_tokens,
        banned_token_ids=sampling.stop_token_ids if is_banned else (),
        prompt_targets=targets,
        num_top_logprobs=sampling.prompt_logprobs or 0,
        output=request.token_ids[request.num_prompt_tokens :] if is_sampled and sampling.grammar is not None else None,
    )
