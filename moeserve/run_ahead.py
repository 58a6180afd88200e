"""Planning a token before it is known: the plan in flight will draw it, and the device hands it to the next one."""

from __future__ import annotations

from moeserve.plan_draft import PlanDraft
from moeserve.request import Request
from moeserve.request_memory import RequestMemory


def plan_drawn(request: Request, draft: PlanDraft, before: PlanDraft, memory: RequestMemory) -> None:
    """Plans the token that the plan `before` will draw for a request, if it is sure to go on with that token.

    Only for plain requests: what is banned or penalised depends on tokens not known yet. It never preempts: after the
    commit the request has its turn like every other.
    """
    if not request.is_plain or request.num_output_tokens + 1 >= request.sampling.max_tokens:
        return
    drawn_by = before.sampled_place(request)
    if drawn_by is None or draft.budgets[request.rank] <= 0:
        return
    new = memory.grow(request, 1)
    if new is not None:
        draft.plans[request.rank].zeroed_blocks.extend(new)
        draft.add_drawn(request, drawn_by)
