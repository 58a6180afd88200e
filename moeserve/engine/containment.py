"""An executor that keeps a fault to the requests that cause it.

If a step fails as a whole, by an exception of its runner, its halves are computed again, and each half that fails is
halved again, down to single requests. Computing a chunk again is safe: it writes the same keys and values into the same
slots, and draws the same token. Chunks of one step do not read each other's slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import structlog

from experts.errors import ExpertStoreError
from moeserve.plan import Chunk, ChunkResult, Computed, SamplingParams, StepPlan, StepResult, WindowTable
from moeserve.scheduling.steps import Runner

log = structlog.get_logger(__name__)


class ContainingExecutor:
    """Computes the plans of the only rank, in this process, one step at a time.

    The runner's steps must be complete when they are launched, as on a CPU. An error of the runner is raised only if
    requests do not cause it: if a harmless request fails too.
    """

    def __init__(self, runner: Runner, block_size: int, begin: Callable[[Sequence[StepPlan]], None]) -> None:
        """begin: called with each part of a step before the part is computed again."""
        self._runner = runner
        self._block_size = block_size
        self._begin = begin

    def launch(self, plans: Sequence[StepPlan]) -> Computed[list[StepResult]]:
        (plan,) = plans
        try:
            result = self._runner.launch(plan).result()
        except ExpertStoreError:
            # Weights are missing for any request.
            raise
        except Exception as error:
            result = StepResult(plan.step, self._contain(plan, error))
        return Computed([result])

    def check(self) -> None:
        """Do nothing: no other rank can be missing."""

    def _contain(self, plan: StepPlan, error: Exception) -> list[ChunkResult]:
        log.error("step_failed", step=plan.step, requests=len(plan.chunks), exc_info=error)
        results = self._compute_apart(plan, error)
        if not any(result.error is None for result in results) and not self._can_compute(plan):
            raise error
        guilty = [chunk.request_id for chunk, result in zip(plan.chunks, results, strict=True) if result.error]
        log.error("step_contained", step=plan.step, failed_requests=guilty)
        return results

    def _compute_apart(self, plan: StepPlan, error: Exception) -> list[ChunkResult]:
        """Return the results of the chunks of a plan that failed as a whole with `error`."""
        if len(plan.chunks) <= 1:
            return [ChunkResult(error=f"its step failed: {type(error).__name__}: {error}") for _ in plan.chunks]
        middle = len(plan.chunks) // 2
        results: list[ChunkResult] = []
        for part in (part_of(plan, plan.chunks[:middle]), part_of(plan, plan.chunks[middle:])):
            try:
                results += self._compute(part).chunks
            except Exception as of_part:
                results += self._compute_apart(part, of_part)
        return results

    def _can_compute(self, plan: StepPlan) -> bool:
        """Return whether one greedy token can be computed, in a block that a request of the failed plan writes to.

        The request has ended, so no request will read the block before it is cleared.
        """
        for chunk in plan.chunks:
            place = (chunk.start + len(chunk.token_ids) - 1) // self._block_size
            block = chunk.block_table[place]
            greedy = SamplingParams(max_tokens=1, temperature=0.0)
            harmless = Chunk("", array("i", [0]), 0, array("i", [block]), greedy)
            if chunk.window is not None:
                harmless.window = WindowTable(0, array("i", [chunk.window.blocks[place - chunk.window.first]]))
            try:
                return self._compute(StepPlan(plan.step, [harmless])).chunks[0].error is None
            except Exception:
                return False
        return False

    def _compute(self, part: StepPlan) -> StepResult:
        self._begin([part])
        return self._runner.launch(part).result()


def part_of(plan: StepPlan, chunks: list[Chunk]) -> StepPlan:
    """Return the plan of some chunks of a plan. It clears only their blocks: other blocks may be written by now.

    Nor does it copy to blocks of other chunks. A target that no chunk names gets its copy with each part.
    """
    own = {block for chunk in chunks for block in chunk.block_table}
    others = {block for chunk in plan.chunks for block in chunk.block_table} - own
    pairs = zip(plan.copied_blocks[::2], plan.copied_blocks[1::2], strict=True)
    windows = {block for chunk in chunks if chunk.window is not None for block in chunk.window.blocks}
    return StepPlan(
        plan.step,
        chunks,
        array("i", (block for block in plan.zeroed_blocks if block in own)),
        array("i", (block for block in plan.zeroed_windows if block in windows)),
        array("i", (block for pair in pairs if pair[1] not in others for block in pair)),
    )
