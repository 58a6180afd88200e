"""A step while it is planned: the chunks of each rank's plan, and the facts about them that the commit needs."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from math import inf

from moeserve.plan import Chunk, ChunkExtras, ChunkResult, Request, StateUse, StepPlan, StepResult, WindowTable
from moeserve.scheduling.cost_model import CostModel, StepSize
from moeserve.scheduling.open_prompts import ScheduledPrompts
from moeserve.scheduling.pacing import LEAST_PROMPT_TOKENS, StepBound

NO_DRAFTS = array("i")


class PlanDraft:
    """Collects the chunks of one step, one plan per rank. The scheduler keeps it until the step is committed.

    `requests[i]` belongs to the chunk that was added i-th, so the requests of rank r are in the order of
    `plans[r].chunks`. `prompts` are the requests that lacked more than one token. `budgets[r]` is the
    number of tokens that still fit into the plan of rank r, of `budget` in all, `sizes[r]` the size of that plan so
    far. `duplicates` are (rank, block ids) that this plan may be the last to read.
    """

    def __init__(self, step: int, budget: int, num_ranks: int, *, tells_following: bool) -> None:
        """tells_following: chunks that are not sampled have the token behind them."""
        self._tells_following = tells_following
        self.plans = [StepPlan(step, [], array("i")) for _ in range(num_ranks)]
        self.requests: list[Request] = []
        self.prompts = ScheduledPrompts()
        self._has_all_decodes = False
        self.budget = budget
        self.budgets = [budget] * num_ranks
        self.sizes = [StepSize() for _ in range(num_ranks)]
        self.duplicates: list[tuple[int, list[int]]] = []
        # By rank, the places of requests' tokens among all that are sampled; None until they are asked for.
        self._sampled: list[dict[str, int] | None] = [None] * num_ranks
        # The prediction of the step's seconds and, by rank, their limit and the rows that fit whatever they take.
        self._cost = CostModel()
        self._limits = [inf] * num_ranks
        self._least = [0] * num_ranks

    @property
    def is_full(self) -> bool:
        return max(self.budgets) <= 0

    def zero(self, rank: int, blocks: Sequence[int], windows: Sequence[int]) -> None:
        """Have the step clear blocks, and window blocks, that requests of a rank have newly leased."""
        self.plans[rank].zeroed_blocks.extend(blocks)
        self.plans[rank].zeroed_windows.extend(windows)

    def copy(self, rank: int, source: int, target: int) -> None:
        """Have the step copy a block of a rank to another one before it computes. No source may be another's target."""
        self.plans[rank].copied_blocks.extend((source, target))

    def continues(self, request: Request) -> bool:
        """Return whether the step computes tokens of a request that ran before it, and not of its prompt."""
        return request.request_id not in self.prompts and request in self.requests

    def add(
        self,
        request: Request,
        count: int,
        state: StateUse | None,
        window: WindowTable | None,
        drafts: array[int] = NO_DRAFTS,
    ) -> Chunk:
        """Plan the next `count` known tokens of a request that has leased blocks for them. Return the chunk.

        drafts: to follow the last known token.
        """
        start = request.num_computed_tokens + request.num_scheduled_tokens
        end = start + count
        token_ids = request.token_ids
        lease = request.lease
        assert lease is not None
        request.num_scheduled_tokens += count
        sampling = request.sampling if end == len(token_ids) else None
        extras = None if request.is_plain else _chunk_extras(request, start, end, len(drafts))
        chunk = Chunk(request.request_id, token_ids[start:end], start, lease.block_ids, sampling, extras)
        if drafts:
            chunk.token_ids += drafts
            chunk.num_drafts = len(drafts)
        if self._tells_following and sampling is None:
            chunk.following = token_ids[end]
        chunk.state, chunk.window = state, window
        self._append(request, chunk)
        return chunk

    def add_next(self, requests: Sequence[Request], counts: Sequence[int], drafts: Mapping[str, array[int]]) -> None:
        """Plan the last known tokens of plain requests without recurrent state and window blocks, which have slots.

        counts: by request, one more than the number of its drafts. drafts: by request id, those to follow.
        """
        plans, budgets = self.plans, self.budgets
        rows, attended = [size.rows for size in self.sizes], [size.attended for size in self.sizes]
        for request, count in zip(requests, counts, strict=True):
            rank, lease, start = request.rank, request.lease, request.num_computed_tokens
            assert lease is not None
            request.num_scheduled_tokens = 1
            chunk = Chunk(request.request_id, request.token_ids[start:], start, lease.block_ids, request.sampling)
            if count > 1:
                chunk.token_ids += drafts[request.request_id]
                chunk.num_drafts = count - 1
            plans[rank].chunks.append(chunk)
            budgets[rank] -= count
            rows[rank] += count
            attended[rank] += count * (start + 0.5 * count)
        self.sizes = [StepSize(*size) for size in zip(rows, attended, strict=True)]
        self.requests += requests

    @property
    def size(self) -> StepSize:
        """The size of the busiest rank's plan."""
        return max(self.sizes, key=lambda size: (size.rows, size.attended))

    def end_decodes(self, bound: StepBound) -> None:
        """Record that all further requests are prompts, and bound the time of the step."""
        self._has_all_decodes = True
        self._cost, self._limits = bound.cost, [bound.seconds(size) for size in self.sizes]
        self._least = [size.rows + LEAST_PROMPT_TOKENS for size in self.sizes]

    def room(self, request: Request, count: int) -> int:
        """Return how many of the request's next `count` tokens fit into the step, by tokens and by time."""
        rank = request.rank
        count, limit_s = min(count, self.budgets[rank]), self._limits[rank]
        if limit_s == inf or count <= 0:
            return count
        fitting = self._cost.rows_within(limit_s, count, self.sizes[rank], request.num_planned_tokens)
        return max(fitting, min(count, self._least[rank] - self.sizes[rank].rows))

    def claim(self, request: Request, count: int) -> int:
        """Return the request's `room`, and take nothing else into its rank's plan if time cuts it short."""
        fitting, budget = self.room(request, count), self.budgets[request.rank]
        if fitting < min(count, budget):
            self.budgets[request.rank] = fitting
        return fitting

    def set_half_aside(self) -> tuple[list[int], list[float], list[int]]:
        """Halve the room that is left in the step. Return what `take_back` needs."""
        halves, limits, least = [budget - budget // 2 for budget in self.budgets], self._limits, self._least
        self.budgets = [budget - half for budget, half in zip(self.budgets, halves, strict=True)]
        so_far = [self._cost.seconds(size.rows, size.attended) for size in self.sizes]
        self._limits = [min(limit, (limit + s) / 2) for limit, s in zip(limits, so_far, strict=True)]
        self._least = [(rows + size.rows) // 2 for rows, size in zip(least, self.sizes, strict=True)]
        return halves, limits, least

    def take_back(self, set_aside: tuple[list[int], list[float], list[int]]) -> None:
        halves, self._limits, self._least = set_aside
        self.budgets = [budget + half for budget, half in zip(self.budgets, halves, strict=True)]

    def add_unsampled(
        self, request: Request, drawn_by: int, state: StateUse | None, window: WindowTable | None
    ) -> Chunk:
        """Plan the token of a request that is number `drawn_by` among the tokens that the previous plan will sample.

        Return the chunk.
        """
        lease = request.lease
        assert lease is not None
        start = request.num_planned_tokens
        request.num_scheduled_tokens += 1
        extras = None if request.is_plain else _unsampled_extras(request)
        chunk = Chunk(request.request_id, array("i", [0]), start, lease.block_ids, request.sampling, extras, drawn_by)
        chunk.state, chunk.window = state, window
        self._append(request, chunk)
        return chunk

    def _append(self, request: Request, chunk: Chunk) -> None:
        rank, count = request.rank, len(chunk.token_ids)
        self.plans[rank].chunks.append(chunk)
        self.requests.append(request)
        if self._has_all_decodes:
            self.prompts.add(request)
        self.budgets[rank] -= count
        size = self.sizes[rank]
        size.rows += count
        size.attended += count * (chunk.start + 0.5 * count)

    def rows(self, results: Sequence[StepResult]) -> list[Iterator[tuple[Chunk, ChunkResult]]]:
        """Return, per rank, its chunks with their results. Raise ValueError if `results` do not fit the plans."""
        for plan, result in zip(self.plans, results, strict=True):
            if result.step != plan.step or len(result.chunks) != len(plan.chunks):
                raise ValueError(f"step {plan.step} and the result of step {result.step} do not belong together")
        return [zip(plan.chunks, result.chunks, strict=True) for plan, result in zip(self.plans, results, strict=True)]

    def sampled_place(self, request: Request) -> int | None:
        """Return the place of the request's token among the tokens that its rank's plan, which is whole, samples.

        None if it has none there, or may have several.
        """
        places = self._sampled[request.rank]
        if places is None:
            places = self._sampled[request.rank] = _sampled_places(self.plans[request.rank])
        return places.get(request.request_id)


def _sampled_places(plan: StepPlan) -> dict[str, int]:
    """Return by request the place of the only token that is sampled for it, among all that the plan samples."""
    places, num_sampled = dict[str, int](), 0
    for chunk in plan.chunks:
        if chunk.sampling is not None:
            if not chunk.num_drafts:
                places[chunk.request_id] = num_sampled
            num_sampled += 1 + chunk.num_drafts
    return places


def _unsampled_extras(request: Request) -> ChunkExtras | None:
    """Return the further inputs of the chunk of a token that is not drawn yet; None for none."""
    sampling = request.sampling
    is_banned = request.num_output_tokens + 1 < sampling.min_tokens
    if not (is_banned or sampling.penalises):
        return None
    return ChunkExtras(
        history=request.token_ids[:] if sampling.penalises else None,
        num_prompt_tokens=request.num_prompt_tokens,
        banned_token_ids=sampling.stop_token_ids if is_banned else (),
    )


def _chunk_extras(request: Request, start: int, end: int, num_drafts: int) -> ChunkExtras | None:
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
        num_banned_rows=min(1 + num_drafts, sampling.min_tokens - request.num_output_tokens) if is_banned else 1,
    )
