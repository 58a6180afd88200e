"""Requests whose thoughts have a budget: once it is spent, the end of the thought follows, whatever is sampled."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.plan import Request
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.parts import Part
from moeserve.thoughts import BudgetedThought


class ThoughtBudgets(Part):
    """Follows the thoughts of these requests."""

    def __init__(self) -> None:
        self._thoughts: dict[str, BudgetedThought] = {}

    def enter(self, request: Request) -> bool:
        budget = request.asked.thought
        if budget is None:
            return False
        # Tokens that an earlier life of the engine has sampled belong to the answer, too.
        output = request.token_ids[request.num_prompt_tokens :]
        self._thoughts[request.request_id] = BudgetedThought(budget, output)
        return True

    def needs_token(self, request: Request) -> bool:
        return self._thoughts[request.request_id].may_be_due_next

    def most_drafts(self, request: Request, most: int) -> int:
        """Return no draft that would follow the end of a thought."""
        return min(most, self._thoughts[request.request_id].num_free - 1)

    def forced(self, request: Request) -> Sequence[int]:
        return self._thoughts[request.request_id].due

    def appended(self, request: Request, token_id: int) -> None:
        self._thoughts[request.request_id].push(token_id)

    def left(self, output: RequestOutput) -> None:
        self._thoughts.pop(output.request.request_id, None)
