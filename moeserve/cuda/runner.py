"""Executes plans on a GPU: prompts in steps of their own making, decode steps by replaying a captured graph.

`launch` returns as soon as the step is on the device's queue, and the next plan may be launched before the results are
read: it finds the tokens that this one draws on the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.transfer import to_device
from moeserve.cuda.batches import StepBatches
from moeserve.cuda.decode_graphs import DecodeSteps
from moeserve.cuda.routing import Computed, HeardDecoder, StepRouting
from moeserve.cuda.step_arrays import StepArrays, step_arrays
from moeserve.model.kv_pool import KVPool
from moeserve.model.sampler import Drawn, ScoredTokens, draw_tokens
from moeserve.plan import ChunkResult, StepPlan, StepResult, wanted_logits

# How the host waits for a place in the device's queue.
Wait = Callable[[torch.cuda.Event], None]


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device's queue. `done` is behind everything that `result` reads; None where nothing is queued.

    routing: of the step's rows, on its way home; None if nobody listens.
    """

    plan: StepPlan
    drawn: Drawn | None
    prompt_logprobs: dict[int, ScoredTokens]
    done: torch.cuda.Event | None
    wait: Wait = torch.cuda.Event.synchronize
    routing: StepRouting | None = None

    def is_done(self) -> bool:
        return self.done is None or self.done.query()

    def result(self) -> StepResult:
        """Waits for the device."""
        if self.done is not None:
            self.wait(self.done)
        drawn = iter(() if self.drawn is None else self.drawn.results())
        results = []
        for number, chunk in enumerate(self.plan.chunks):
            result = next(drawn) if chunk.sampling is not None else ChunkResult()
            if number in self.prompt_logprobs:
                result.prompt_logprobs = self.prompt_logprobs[number].all()
            results.append(result)
        return StepResult(self.plan.step, results, self.routing)


class GpuModelRunner:
    """Owns a decoder and its KV memory. Of requests it keeps the tokens that the last step has drawn, no more."""

    def __init__(
        self,
        decoder: HeardDecoder,
        kv_pool: KVPool,
        batches: StepBatches,
        *,
        decode: DecodeSteps | None,
        wait: Wait = torch.cuda.Event.synchronize,
    ) -> None:
        """decoder: over `kv_pool`. decode: lasting batches for decode steps; None makes every step anew
        (`--enforce-eager`). wait: for a step; a rank of several does not wait forever."""
        self._decoder = decoder
        self._kv_pool = kv_pool
        self._batches = batches
        self._decode = decode
        self._wait = wait
        self._drawn: Tensor | None = None

    def run(self, plan: StepPlan) -> StepResult:
        """One forward over all chunks, waited for; mutates the KV pool."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queues a step. What it reads on the device belongs to it until it is done: launch at most one more before.

        Blocks are not cleared when they change hands: no kernel reads a slot that its sequence has not written.
        """
        if not plan.chunks:
            return LaunchedStep(plan, None, {}, _mark(self._serve_others()), self._wait)
        arrays = step_arrays(plan.chunks, self._kv_pool.block_size)
        logit_rows, places = wanted_logits(plan.chunks)
        scored = [
            (number, chunk.extras.prompt_targets, chunk.extras.num_top_logprobs)
            for number, chunk in enumerate(plan.chunks)
            if chunk.extras is not None and chunk.extras.prompt_targets
        ]
        computed = self._forward(arrays, logit_rows, with_logits=not scored)
        routing = None if computed.routing is None else computed.routing.at_home()
        sampled = [chunk for chunk in plan.chunks if chunk.sampling is not None]
        last = [place[-1] for chunk, place in zip(plan.chunks, places, strict=True) if chunk.sampling is not None]
        drawn = None
        if sampled:
            drawn = draw_tokens(self._decoder.ops, self._logits(computed, last, len(logit_rows)), sampled)
            self._drawn = drawn.token_ids
        prompt_logprobs = {}
        for number, targets, num_top in scored:
            states = computed.states[places[number].start : places[number].start + len(targets)]
            prompt_logprobs[number] = ScoredTokens(self._decoder.logits, states, targets, num_top)
        return LaunchedStep(plan, drawn, prompt_logprobs, _mark(computed.states), self._wait, routing)

    def _forward(self, arrays: StepArrays, logit_rows: list[int], *, with_logits: bool) -> Computed:
        size = None if self._decode is None else self._decode.size_of(arrays, len(logit_rows))
        if self._decode is not None and size is not None:
            return self._decode.run(arrays, self._drawn, size)
        return self._decoder(self._batches.make(arrays, logit_rows, self._drawn), with_logits=with_logits)

    def _logits(self, computed: Computed, rows: list[int], num_wanted: int) -> Tensor:
        """[R, vocab] of some of the wanted rows."""
        of_wanted = computed.states if computed.logits is None else computed.logits
        if len(rows) < num_wanted:
            of_wanted = of_wanted[to_device(array("q", rows), of_wanted.device)]
        return self._decoder.logits(of_wanted) if computed.logits is None else of_wanted

    def _serve_others(self) -> Tensor:
        """A step of several ranks in which this one has no rows; a graph of theirs has padding here."""
        no_rows = StepArrays()
        size = None if self._decode is None else self._decode.size_of(no_rows, 0)
        if self._decode is not None and size is not None:
            return self._decode.run(no_rows, None, size).states
        return self._decoder.serve_others()

    def close(self) -> None:
        """Gives up what was captured."""
        if self._decode is not None:
            self._decode.release()


def _mark(queued: Tensor) -> torch.cuda.Event | None:
    if queued.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
