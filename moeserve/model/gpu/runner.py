"""Compute plans on a GPU: steps with prompts launch each kernel, decode steps replay a captured graph.

`launch` returns as soon as the step is on the device's queue. The next plan may be launched before the results of this
plan are read: it takes the sampled tokens from the device.

A replay costs one launch instead of hundreds. It uses the kernel variants of the captured size and pads the step's rows
to it. All graphs share one memory pool, so the largest is captured first. With several ranks a graph contains the
exchange of rows: all ranks capture the same sizes in the same order and replay the same size in the same step, even a
rank without rows. Graphs of a stage lie between the rows that come and those that go: these travel beside replays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from experts.routing.tap import RoutingTap
from kernels.transfer import to_host
from moeserve.model.decoder import ForwardBatch, KvPools, StepDecoder
from moeserve.model.gpu.batches import AttentionLimits, Batches, DecodeBatch, DecodeTensors
from moeserve.model.kv_pool import KVPool
from moeserve.model.sampler import SampledStep, sample_step
from moeserve.model.spec import Progress, silent
from moeserve.model.state_pool import StatePool
from moeserve.model.step_arrays import StepArrays, StepShape, padded_size, step_arrays
from moeserve.plan import ChunkResult, StepPlan, StepResult, wanted_logits

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

    from experts.parallel.collectives import Traffic

# Makes the host wait for an event on the device.
Wait = Callable[[torch.cuda.Event], None]

_WARM_UP_ROUNDS = 2
_NO_MEMORY = "the GPU had no memory for this prompt beside the others of its step"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device's queue.

    sampled: None for a step without rows. event: comes after everything that `result` reads; None on a CPU. routing: of
    the step's rows, on its way to the host; None without a tap. num_left_out: the plan's last chunks, for which the
    device had no memory. begun: comes before everything that the step computes.
    """

    plan: StepPlan
    sampled: SampledStep | None
    event: torch.cuda.Event | None
    wait: Wait = torch.cuda.Event.synchronize
    routing: StepRouting | None = None
    num_left_out: int = 0
    begun: torch.cuda.Event | None = None

    @property
    def done(self) -> bool:
        return self.event is None or self.event.query()

    def result(self) -> StepResult:
        """Wait for the device and return the step's result."""
        seconds, waited_s = None, 0.0
        if self.event is not None and self.begun is not None:
            began = time.perf_counter()
            self.wait(self.event)
            waited_s = time.perf_counter() - began
            seconds = self.begun.elapsed_time(self.event) / 1000
        results = [] if self.sampled is None else self.sampled.results()
        results += [ChunkResult(error=_NO_MEMORY)] * self.num_left_out
        return StepResult(self.plan.step, results, self.routing, seconds=seconds, waited_s=waited_s)


class GpuModelRunner:
    """Owns a decoder, its KV memory and the memory of recurrent states.

    Only plans tell their contents, except for the tokens that the last step sampled.
    """

    def __init__(
        self,
        computes: HeardDecoder,
        kv_pool: KVPool,
        batches: Batches,
        *,
        decode: DecodeSteps | None,
        wait: Wait = torch.cuda.Event.synchronize,
        state_pool: StatePool | None = None,
        is_alone: bool = True,
        clears_blocks: bool = False,
        measured: Sequence[tuple[int, float]] = (),
        samples: bool = True,
    ) -> None:
        """computes: a decoder over `kv_pool` and `state_pool`, which is None without recurrent layers. decode: batches
        for decode steps; None launches every step's kernels (`--enforce-eager`). wait: among several ranks, a wait with
        a time limit. is_alone: no other rank computes its part of each step. clears_blocks: clear blocks that changed
        hands, for code that reads slots which it then masks. measured: tokens and seconds of steps with one prompt
        each, see `moeserve.scheduling.pacing.Pace`. samples: see `ModelRunner`.
        """
        self._computes = computes
        self.kv_pool = kv_pool
        self.state_pool = state_pool
        self.measured = measured
        self._batches = batches
        self._decode = decode
        self._wait = wait
        self._clears_blocks = clears_blocks
        # A state that advanced cannot be computed again, nor can rows that other ranks have taken.
        self._can_repeat = is_alone and state_pool is None
        self._samples = samples
        self._drawn: Tensor | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step. Launch at most one more before it is done: until then a step needs its tensors on the device.

        For our kernels blocks need no clearing: none reads a slot that its sequence has not written. A step for
        which memory is short is launched again without its newest prompts, whose results are then errors. Raise
        torch.cuda.OutOfMemoryError if that does not help.
        """
        shortage = ""
        for num_left_out in _prompts_left_out(plan) if self._can_repeat else (0,):
            part = plan if not num_left_out else replace(plan, chunks=plan.chunks[:-num_left_out])
            try:
                launched = self._launch(part) if part.chunks or part is plan else LaunchedStep(part, None, None)
            except torch.cuda.OutOfMemoryError as error:
                shortage = str(error)
            else:
                return launched if part is plan else self._with_left_out(launched, plan, num_left_out)
            # Outside of the handler, where the error no longer holds the tensors of the failed attempt.
            log.warning("step %d lacked GPU memory with %d prompts left out: %s", plan.step, num_left_out, shortage)
            torch.cuda.empty_cache()
        raise torch.cuda.OutOfMemoryError(shortage)

    def _with_left_out(self, launched: LaunchedStep, plan: StepPlan, num_left_out: int) -> LaunchedStep:
        """Return a step without the last chunks of `plan` as the whole plan's.

        A plan that follows may name the tokens of these chunks by their places; its results for them are dropped.
        """
        missing = sum(chunk.num_sampled_rows for chunk in plan.chunks[-num_left_out:])
        if missing:
            blank = torch.zeros(missing, dtype=torch.int64, device=self._computes.decoder.device)
            self._drawn = (
                blank
                if launched.sampled is None or launched.sampled.drawn is None
                else torch.cat([launched.sampled.drawn.token_ids, blank])
            )
        return replace(launched, plan=plan, routing=None, num_left_out=num_left_out)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        begun = _mark(self._computes.decoder.device)
        if plan.copied_blocks:
            self.kv_pool.copy_blocks(plan.copied_blocks)
        if not plan.chunks:
            self._serve_others()
            return LaunchedStep(plan, None, _mark(self._computes.decoder.device), self._wait, begun=begun)
        if self._clears_blocks:
            self.kv_pool.zero_blocks(plan.zeroed_blocks, plan.zeroed_windows)
        arrays = step_arrays(plan.chunks, self.kv_pool.block_size)
        logit_rows, places = wanted_logits(plan.chunks)
        scores_prompts = any(chunk.extras is not None and chunk.extras.prompt_targets for chunk in plan.chunks)
        if self.state_pool is not None:
            self.state_pool.begin(plan.chunks)
        computed = self._forward(arrays, logit_rows, with_logits=self._samples and not scores_prompts)
        if self.state_pool is not None:
            self.state_pool.end(plan.chunks)
        routing = None if computed.routing is None else computed.routing.on_host()
        decoder = self._computes.decoder
        if not self._samples:
            return LaunchedStep(plan, None, _mark(decoder.device), self._wait, routing, begun=begun)
        sampled = sample_step(decoder, plan.chunks, places, computed.states, computed.logits, self._drawn)
        if sampled.drawn is not None:
            self._drawn = sampled.drawn.token_ids
        return LaunchedStep(plan, sampled, _mark(decoder.device), self._wait, routing, begun=begun)

    def close(self) -> None:
        """Release the captured graphs."""
        if self._decode is not None:
            self._decode.release()

    def _forward(self, arrays: StepArrays, logit_rows: list[int], *, with_logits: bool) -> Computed:
        size = None if self._decode is None else self._decode.size_of(arrays, len(logit_rows))
        if self._decode is not None and size is not None:
            return self._decode.run(arrays, self._drawn, size)
        rows = logit_rows if self._samples else range(arrays.num_rows)
        return self._computes(self._batches.make(arrays, rows, self._drawn), with_logits=with_logits)

    def _serve_others(self) -> Tensor:
        """Compute a step in which only other ranks have rows. If they replay a graph, replay it here with padding."""
        no_rows = StepArrays()
        size = None if self._decode is None else self._decode.size_of(no_rows, 0)
        if self._decode is not None and size is not None:
            return self._decode.run(no_rows, None, size).states
        return self._computes.decoder.serve_others()


def _prompts_left_out(plan: StepPlan) -> Iterator[int]:
    """Yield how many of a plan's last chunks to leave out: none, none again with more memory, then more prompts."""
    yield 0
    yield 0
    prompts = (place for place, chunk in enumerate(plan.chunks) if len(chunk.token_ids) > chunk.num_sampled_rows)
    yield from range(1, 1 + len(plan.chunks) - next(prompts, len(plan.chunks)))


def _mark(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True, slots=True)
class StepRouting:
    """The gates' choices in a step, copied from the device without waiting and read with the step's result.

    ids: [R, k], layer after layer. In a padded batch each layer has `num_padded` rows; the first `num_rows` of them
    belong to the step. Otherwise both are 0, and all rows belong to the step.
    """

    ids: Tensor
    num_padded: int = 0
    num_rows: int = 0

    def __bytes__(self) -> bytes:
        """Return the bytes for `experts.routing.choices.unpack`. The ids must be on the host."""
        ids = self.ids
        if self.num_padded:
            ids = ids.view(-1, self.num_padded, ids.shape[1])[:, : self.num_rows]
        data: bytes = ids.numpy().tobytes()
        return data

    def on_host(self) -> StepRouting:
        """Queue a copy to the host and return it. Read it after an event that follows on the stream."""
        return StepRouting(to_host(self.ids), self.num_padded, self.num_rows)


@dataclass(frozen=True, slots=True)
class Computed:
    """The outputs of a forward on the device, for the rows that need logits.

    states: [S, H], after the last norm. logits: [S, vocab], None if the sampler computes them for a few states at a
    time. routing: None without a tap.
    """

    states: Tensor
    logits: Tensor | None
    routing: StepRouting | None = None

    def of_first(self, num_rows: int) -> Computed:
        """Return the outputs of a padded decode batch without its padding."""
        routing = self.routing
        if routing is not None:
            routing = StepRouting(routing.ids, self.states.shape[0], num_rows)
        return Computed(self.states[:num_rows], None if self.logits is None else self.logits[:num_rows], routing)


class HeardDecoder:
    """A decoder with its KV memory, and the tap that observes its gates, if there is one."""

    def __init__(self, decoder: StepDecoder, kv_pools: KvPools, tap: RoutingTap | None = None) -> None:
        self.decoder = decoder
        self.kv_pools, self._tap = kv_pools, tap

    def __call__(self, batch: ForwardBatch, *, with_logits: bool = True) -> Computed:
        """Compute a batch. A graph can record this; its replay writes the same tensors. See `Decoder.states`."""
        decoder, routing = self.decoder, None
        if self._tap is None:
            states = decoder.states(batch, self.kv_pools)
        else:
            self._tap.clear()
            states = decoder.states(batch, self.kv_pools)
            ids = self._tap.take().joined()
            routing = None if ids is None else StepRouting(ids)
        return Computed(states, decoder.logits(states) if with_logits and decoder.gives_logits else None, routing)


class Peers(Protocol):
    """The other ranks, which compute every step together with this one. All make the same calls in the same order."""

    def size_for(self, own: int | None) -> int | None:
        """Return the size of the decode batch for the step that has begun, the same on all ranks; None if each rank
        makes a batch for its own rows. own: the size that suits this rank's rows.
        """

    def begin_alike(self, shape: StepShape) -> None:
        """Begin a step that is not captured and has the same shape on every rank."""

    def begin_decodes(self, size: int) -> None:
        """Begin a step in the decode batches of `size` rows."""

    def decoding(self, size: int) -> AbstractContextManager[None]:
        """Return a context to compute or replay a decode batch of `size` rows in."""

    def recorded(self) -> AbstractContextManager[Traffic]:
        """Return a context to capture a graph in; it yields the graph's exchange of rows."""

    def replayed(self, recorded: Traffic) -> AbstractContextManager[None]:
        """Return a context to launch a graph in."""

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for an event, at most as long as ranks may be behind each other."""

    def wait_for_device(self) -> None:
        """Wait for everything queued, with the same limit."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, the tensors that it writes, and the context to launch it in, which counts its exchange of rows."""

    graph: torch.cuda.CUDAGraph
    computed: Computed
    replayed: Callable[[], AbstractContextManager[None]]

    def replay(self) -> Computed:
        with self.replayed():
            self.graph.replay()
        return self.computed


class DecodeSteps:
    """Decode batches of some sizes, in tensors whose addresses never change, and their graphs.

    `run` replays the graph of a captured size. Before `capture`, and on a CPU under the interpreter, it launches the
    kernels.
    """

    def __init__(
        self, computes: HeardDecoder, limits: AttentionLimits, sizes: Sequence[int], peers: Peers | None = None
    ) -> None:
        """sizes: ascending, see `capture_sizes`. peers: None on a single rank."""
        self._computes, self._sizes, self._peers = computes, tuple(sizes), peers
        self._tensors = tensors = DecodeTensors(limits, self._sizes[-1])
        self._batches = {size: DecodeBatch(limits, size, tensors) for size in self._sizes}
        self._graphs: dict[int, _Captured] = {}

    def size_of(self, arrays: StepArrays, num_logit_rows: int) -> int | None:
        """Return the size of the decode batch for a step; None if it needs a batch of its own. Ranks agree on it."""
        is_decode = arrays.max_query_len == 1 and num_logit_rows == arrays.num_rows
        own = padded_size(arrays.num_rows, self._sizes) if is_decode else None
        return own if self._peers is None else self._peers.size_for(own)

    def run(self, arrays: StepArrays, drawn: Tensor | None, size: int) -> Computed:
        """Compute a step of at most `size` chunks of one token. The next replay overwrites the returned tensors."""
        batch = self._batches[size]
        batch.load(arrays, drawn)
        captured = self._graphs.get(size)
        with nullcontext() if self._peers is None else self._peers.decoding(size):
            computed = self._compute(batch) if captured is None else captured.replay()
        return computed.of_first(arrays.num_rows)

    @torch.inference_mode()
    def capture(self, told: Progress = silent) -> None:
        """Capture a graph per size, largest first. The batches hold nothing but padding, so no KV is written."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        for number, size in enumerate(reversed(self._sizes)):
            told("capturing decode steps", number, len(self._sizes))
            if self._peers is not None:
                self._peers.begin_decodes(size)
            self._warm_up(self._batches[size], stream)
            self._graphs[size] = self._capture_batch(self._batches[size], pool, stream)

    def release(self) -> None:
        """Release the graphs. A rank cannot leave its group while graphs hold the group's collectives."""
        self._graphs.clear()

    def _warm_up(self, batch: DecodeBatch, stream: torch.cuda.Stream) -> None:
        """Compile, tune, allocate the matrix library's workspaces and connect ranks: a capture cannot do that."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_ROUNDS):
                self._compute(batch)
        torch.cuda.current_stream().wait_stream(stream)

    def _capture_batch(self, batch: DecodeBatch, pool: _POOL_HANDLE, stream: torch.cuda.Stream) -> _Captured:
        graph, peers = torch.cuda.CUDAGraph(), self._peers
        if peers is None:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                return _Captured(graph, self._compute(batch), nullcontext)
        # Wait with a time limit first: beginning a capture waits for the device without one.
        peers.wait_for_device()
        # Threads of the collectives and of migrations may call CUDA during the capture and are no part of it.
        with (
            peers.recorded() as traffic,
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            return _Captured(graph, self._compute(batch), partial(peers.replayed, traffic))

    def _compute(self, batch: DecodeBatch) -> Computed:
        """Compute a batch into the lasting outputs, so that a graph keeps none of its own."""
        batch.update_works()
        computed, tensors = self._computes(batch.batch), self._tensors
        size, logits = len(computed.states), computed.logits
        if logits is not None:
            logits = tensors.logits[:size].copy_(logits)
        return Computed(tensors.states[:size].copy_(computed.states), logits, computed.routing)
