"""How many rows every rank has in a step, known to all, and what follows from that alone. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.cuda.step_arrays import padded_size
from moeserve.plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepRows:
    """num_rows[r], num_logit_rows[r]: of rank r, in all layers and in the last one.

    only_decodes: whether all chunks of all ranks are single tokens whose logits are wanted.
    """

    num_rows: Sequence[int]
    num_logit_rows: Sequence[int]
    only_decodes: bool

    @classmethod
    def of(cls, plans: Sequence[StepPlan]) -> StepRows:
        """plans[r] is what rank r computes."""
        return cls(
            [plan.num_tokens for plan in plans],
            [plan.num_logit_rows for plan in plans],
            all(len(chunk.token_ids) == chunk.num_logit_rows == 1 for plan in plans for chunk in plan.chunks),
        )

    @classmethod
    def alike(cls, num_ranks: int, num_rows: int, num_logit_rows: int) -> StepRows:
        """Every rank computes a step of the same shape, of its own."""
        return cls([num_rows] * num_ranks, [num_logit_rows] * num_ranks, only_decodes=False)

    def captured_size(self, sizes: Sequence[int]) -> int | None:
        """The one of the captured sizes (ascending) that all ranks replay, those with fewer rows or none padded to it.

        None for a step that each rank computes with its own rows.
        """
        return padded_size(max(self.num_rows), sizes) if self.only_decodes else None


def captures_decodes(shape: str, *, eager: bool, all_resident: bool) -> bool:
    """Whether ranks on GPUs replay decode steps; follows from settings alone, so that all ranks do the same.

    shape: of dispatch. Only the sizes of `allgather` need no word from the device; with `auto` decodes take it whatever
    suits the other steps. eager: `--enforce-eager`. all_resident: what the gate chose is not looked at on the host.
    """
    return shape != "alltoall" and all_resident and not eager
