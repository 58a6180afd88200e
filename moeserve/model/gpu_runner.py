"""Executes plans on a GPU: prompts in steps of their own making, decode steps by replaying a captured graph.

`launch` returns as soon as the step is on the device's queue, and the next plan may be launched before the results are
read: it finds the tokens that this one draws on the device.

A replay costs one launch where a step of its own costs hundreds. Kernel variants are those of the captured size, and
rows beyond the step's are padding. All graphs share one memory pool, so the largest is captured first. With several
ranks a graph holds what they send each other: all capture the same sizes in the same order, and replay the same size in
the same step, one without rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from experts.routing_tap import RoutingTap
from kernels.transfer import to_host
from moeserve.model.decoder import Decoder, ForwardBatch, KvPools
from moeserve.model.gpu_batches import AttentionLimits, DecodeBatch, DecodeTensors, StepBatches
from moeserve.model.kv_pool import KVPool
from moeserve.model.sampler import SampledStep, sample_step
from moeserve.model.step_arrays import StepArrays, StepShape, padded_size, step_arrays
from moeserve.model.token_masks import MaskSource, begin_masks
from moeserve.plan import StepPlan, StepResult, wanted_logits

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

# How the host waits for a place in the device's queue.
Wait = Callable[[torch.cuda.Event], None]

_WARM_UP_ROUNDS = 2


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device's queue. `event` is behind everything that `result` reads; None where nothing is queued.

    sampled: None for a step without rows. routing: of the step's rows, on its way to the host; None if nobody listens.
    """

    plan: StepPlan
    sampled: SampledStep | None
    event: torch.cuda.Event | None
    wait: Wait = torch.cuda.Event.synchronize
    routing: StepRouting | None = None

    @property
    def done(self) -> bool:
        return self.event is None or self.event.query()

    def result(self) -> StepResult:
        """Waits for the device."""
        if self.event is not None:
            self.wait(self.event)
        results = [] if self.sampled is None else self.sampled.results()
        return StepResult(self.plan.step, results, self.routing)


class GpuModelRunner:
    """Owns a decoder and its KV memory. Of requests it keeps the tokens that the last step has drawn, no more."""

    def __init__(
        self,
        computes: HeardDecoder,
        kv_pool: KVPool,
        batches: StepBatches,
        *,
        decode: DecodeSteps | None,
        wait: Wait = torch.cuda.Event.synchronize,
        grammars: MaskSource | None = None,
    ) -> None:
        """computes: over `kv_pool`. decode: lasting batches for decode steps; None makes every step anew
        (`--enforce-eager`). wait: for a step; a rank of several does not wait forever. grammars: without any, a request
        that has one fails."""
        self._computes = computes
        self._kv_pool = kv_pool
        self._batches = batches
        self._decode = decode
        self._wait = wait
        self._grammars = grammars
        self._drawn: Tensor | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queues a step. What it reads on the device belongs to it until it is done: launch at most one more before.

        Blocks are not cleared when they change hands: no kernel reads a slot that its sequence has not written.
        """
        if not plan.chunks:
            return LaunchedStep(plan, None, _mark(self._serve_others()), self._wait)
        masks = begin_masks(self._grammars, plan.chunks)
        arrays = step_arrays(plan.chunks, self._kv_pool.block_size)
        logit_rows, places = wanted_logits(plan.chunks)
        scores_prompts = any(chunk.extras is not None and chunk.extras.prompt_targets for chunk in plan.chunks)
        computed = self._forward(arrays, logit_rows, with_logits=not scores_prompts)
        routing = None if computed.routing is None else computed.routing.on_host()
        # The device computes the forward meanwhile.
        allowed = None if masks is None else masks.result()
        sampled = sample_step(self._computes.decoder, plan.chunks, places, computed.states, computed.logits, allowed)
        if sampled.drawn is not None:
            self._drawn = sampled.drawn.token_ids
        return LaunchedStep(plan, sampled, _mark(computed.states), self._wait, routing)

    def close(self) -> None:
        """Gives up what was captured."""
        if self._decode is not None:
            self._decode.release()

    def _forward(self, arrays: StepArrays, logit_rows: list[int], *, with_logits: bool) -> Computed:
        size = None if self._decode is None else self._decode.size_of(arrays, len(logit_rows))
        if self._decode is not None and size is not None:
            return self._decode.run(arrays, self._drawn, size)
        return self._computes(self._batches.make(arrays, logit_rows, self._drawn), with_logits=with_logits)

    def _serve_others(self) -> Tensor:
        """A step of several ranks in which this one has no rows; a graph of theirs has padding here."""
        no_rows = StepArrays()
        size = None if self._decode is None else self._decode.size_of(no_rows, 0)
        if self._decode is not None and size is not None:
            return self._decode.run(no_rows, None, size).states
        return self._computes.decoder.serve_others()


def _mark(queued: Tensor) -> torch.cuda.Event | None:
    if queued.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(frozen=True, slots=True)
class StepRouting:
    """What the gates of a step chose: copied from the device without waiting, read with the step's result.

    ids: [R, k], of one layer after the other. In a padded batch each layer has `num_padded` rows, of which the first
    `num_rows` are the step's; otherwise all are, and both are 0.
    """

    ids: Tensor
    num_padded: int = 0
    num_rows: int = 0

    def __bytes__(self) -> bytes:
        """See `experts.routing.unpack`. Only of ids on the host."""
        ids = self.ids
        if self.num_padded:
            ids = ids.view(-1, self.num_padded, ids.shape[1])[:, : self.num_rows]
        data: bytes = ids.numpy().tobytes()
        return data

    def on_host(self) -> StepRouting:
        """A copy that arrives in the order of the stream: read it after an event behind it."""
        return StepRouting(to_host(self.ids), self.num_padded, self.num_rows)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a forward leaves on the device, of the wanted rows: states [S, H] behind the last norm, and logits
    [S, vocab], None where they are made of some states at a time. routing: None if nobody listens."""

    states: Tensor
    logits: Tensor | None
    routing: StepRouting | None = None

    def of_first(self, num_rows: int) -> Computed:
        """Of a batch of decodes that is padded from a row on."""
        routing = self.routing
        if routing is not None:
            routing = StepRouting(routing.ids, self.states.shape[0], num_rows)
        return Computed(self.states[:num_rows], None if self.logits is None else self.logits[:num_rows], routing)


class HeardDecoder:
    """A decoder over its KV memory, and what hears its gates, if something does."""

    def __init__(self, decoder: Decoder, kv_pools: KvPools, tap: RoutingTap | None = None) -> None:
        self.decoder = decoder
        self._kv_pools, self._tap = kv_pools, tap

    def __call__(self, batch: ForwardBatch, *, with_logits: bool = True) -> Computed:
        """See `Decoder.states`. A graph can record it: replayed, it writes the same tensors anew."""
        decoder, routing = self.decoder, None
        if self._tap is None:
            states = decoder.states(batch, self._kv_pools)
        else:
            self._tap.clear()
            states = decoder.states(batch, self._kv_pools)
            ids = self._tap.take().joined()
            routing = None if ids is None else StepRouting(ids)
        return Computed(states, decoder.logits(states) if with_logits else None, routing)


class Traffic(Protocol):
    """What one graph sends to other ranks."""

    def recorded(self) -> AbstractContextManager[None]:
        """The graph is captured inside."""

    def replayed(self) -> AbstractContextManager[None]:
        """It is launched inside."""


class Peers(Protocol):
    """The other ranks, which compute every step together with this one. All call the same in the same order.

    decode_size: of the lasting batch that the step is computed in which has begun, the same on all ranks; None where
    each makes a batch of its own.
    """

    @property
    def decode_size(self) -> int | None: ...

    def begin_alike(self, shape: StepShape) -> None:
        """A step that is not captured begins, of the same shape on every rank."""

    def begin_decodes(self, size: int) -> None:
        """A step in lasting batches of `size` rows begins."""

    def traffic(self) -> Traffic:
        """For the graph of the batch that has begun."""

    def wait_for(self, event: torch.cuda.Event) -> None:
        """As long as ranks may be apart, and no longer."""

    def wait_for_device(self) -> None:
        """For everything queued, as long."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, the tensors that it writes, and what it sends to other ranks; None without any."""

    graph: torch.cuda.CUDAGraph
    computed: Computed
    traffic: Traffic | None

    def replay(self) -> Computed:
        with self.traffic.replayed() if self.traffic is not None else nullcontext():
            self.graph.replay()
        return self.computed


class DecodeSteps:
    """Lasting batches of some sizes. Until `capture`, and on a CPU under the interpreter, they are computed as they
    are; captured ones are replayed."""

    def __init__(
        self, computes: HeardDecoder, limits: AttentionLimits, sizes: Sequence[int], peers: Peers | None = None
    ) -> None:
        """sizes: ascending, see `capture_sizes`. peers: the other ranks, if there are any."""
        self._computes, self._sizes, self._peers = computes, tuple(sizes), peers
        tensors = DecodeTensors(limits, self._sizes[-1])
        self._batches = {size: DecodeBatch(limits, size, tensors) for size in self._sizes}
        self._graphs: dict[int, _Captured] = {}

    def size_of(self, arrays: StepArrays, num_logit_rows: int) -> int | None:
        """Of the batch that a step is computed in; None for one of its own. Ranks have agreed on it when it began."""
        if self._peers is not None:
            return self._peers.decode_size
        is_decode = arrays.max_query_len == 1 and num_logit_rows == arrays.num_rows
        return padded_size(arrays.num_rows, self._sizes) if is_decode else None

    def run(self, arrays: StepArrays, drawn: Tensor | None, size: int) -> Computed:
        """A step whose chunks, at most `size`, have one token each. What it gives lasts until the next replay."""
        batch = self._batches[size]
        batch.load(arrays, drawn)
        captured = self._graphs.get(size)
        computed = self._compute(batch) if captured is None else captured.replay()
        return computed.of_first(arrays.num_rows)

    @torch.inference_mode()
    def capture(self) -> None:
        """Records a graph per size, largest first. The batches hold padding alone then: nothing is written to KV."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        for size in reversed(self._sizes):
            if self._peers is not None:
                self._peers.begin_decodes(size)
            self._warm_up(self._batches[size], stream)
            self._graphs[size] = self._captured(self._batches[size], pool, stream)

    def release(self) -> None:
        """Gives the graphs up. A group of ranks cannot be left while graphs hold its collectives."""
        self._graphs.clear()

    def _warm_up(self, batch: DecodeBatch, stream: torch.cuda.Stream) -> None:
        """Compiling, tuning, the matrix library's workspaces and connections of ranks cannot happen inside a graph."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_ROUNDS):
                self._compute(batch)
        torch.cuda.current_stream().wait_stream(stream)

    def _captured(self, batch: DecodeBatch, pool: _POOL_HANDLE, stream: torch.cuda.Stream) -> _Captured:
        graph, peers = torch.cuda.CUDAGraph(), self._peers
        if peers is None:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                return _Captured(graph, self._compute(batch), None)
        # To begin a capture torch waits for the device without end.
        peers.wait_for_device()
        traffic = peers.traffic()
        # Threads of the collectives and of migrations are no part of it, and may call CUDA meanwhile.
        with traffic.recorded(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            return _Captured(graph, self._compute(batch), traffic)

    def _compute(self, batch: DecodeBatch) -> Computed:
        batch.update_works()
        return self._computes(batch.batch)
