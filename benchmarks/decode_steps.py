"""Whole decode steps of random requests: the scheduler and the runner with its lasting batches, in this process."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import SupportsBytes

import torch

from benchmarks.random_decoder import qwen3_moe_spec, random_decoder
from experts.routing.choices import RoutingShape, unpack
from experts.routing.tap import RoutingTap
from kernels.gpu.moe_config import MoeConfigs
from moeserve.device import KvBudget
from moeserve.model.decoder import Decoder
from moeserve.model.gpu.kernels import expert_configs, expert_storage
from moeserve.model.gpu.model import GpuSettings, make_runner
from moeserve.model.gpu.runner import GpuModelRunner
from moeserve.model.spec import DecoderSpec
from moeserve.plan import Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import LocalExecutor, RanksObserver, Steps
from radix_cache import PrefixCache

# Tokens of a request before and behind the steps that are timed.
_MARGIN = 8


@dataclass(frozen=True, slots=True)
class Load:
    """`batch` requests of `prompt` random tokens; `steps` decode steps of all of them are timed."""

    batch: int
    prompt: int
    steps: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the scheduler and the runner. There are as many blocks as the load needs."""

    block_size: int
    max_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens and seconds of the steps in which all requests decode, the positions of a request in the middle of them,
    and how many distinct experts a layer's tokens chose, on average over layers and steps."""

    tokens: int
    seconds: float
    context: int
    distinct_experts: float


class DecodeBench:
    """A model of random weights, made with the first load and kept, and KV memory for one load after the other.

    Computes in bf16 on a GPU, in fp32 elsewhere.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        loads: Sequence[Load],
        limits: Limits,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """sizes: see `qwen3_moe_spec`. loads: the loads to run. Raise ValueError if one does not fit."""
        self._limits, self._device, self._clock = limits, device, clock
        self._max_len = max(max_model_len(load, limits) for load in loads)
        self.spec = qwen3_moe_spec(**sizes, max_position=self._max_len)
        assert self.spec.moe is not None
        self._tap = RoutingTap(len(self.spec.moe_layers), self.spec.moe.num_experts)
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._configs = expert_configs(self.spec, expert_storage(self.spec, self._dtype), device)
        self._decoder: Decoder | None = None

    def run(self, load: Load) -> Throughput:
        """Run a load in KV memory of its own."""
        if self._device.type == "cuda":
            # Free the memory that the load before has left.
            torch.cuda.empty_cache()
        if self._decoder is None:
            self._decoder = self._make_decoder()
        runner = _make_runner(self._decoder, load, self._limits, self._configs, self._tap)
        return decode(runner, self.spec, load, self._limits, self._clock)

    @torch.inference_mode()
    def _make_decoder(self) -> Decoder:
        return random_decoder(
            self.spec,
            self._dtype,
            self._device,
            max_tokens=self._limits.max_batched_tokens,
            max_model_len=self._max_len,
            configs=self._configs,
            observers=[self._tap],
        )


def max_model_len(load: Load, limits: Limits) -> int:
    """Return the positions of a request at its end: the first requests decode while other prompts are computed."""
    budget = limits.max_batched_tokens - load.batch
    if budget < 1:
        raise ValueError(f"{load.batch} requests leave no room for prompts in {limits.max_batched_tokens} tokens")
    return load.prompt + -(-load.batch * load.prompt // budget) + load.steps + 2 * _MARGIN


def _num_blocks(load: Load, limits: Limits) -> int:
    return load.batch * (-(-max_model_len(load, limits) // limits.block_size) + 1)


def _make_runner(
    decoder: Decoder, load: Load, limits: Limits, configs: MoeConfigs | None, tap: RoutingTap
) -> GpuModelRunner:
    length = max_model_len(load, limits)
    settings = GpuSettings(
        block_size=limits.block_size,
        max_num_seqs=load.batch,
        max_num_batched_tokens=limits.max_batched_tokens,
        max_model_len=length,
        kv_cache_memory=None,
        gpu_memory_utilization=0.9,
        enforce_eager=False,
    )
    return make_runner(decoder, KvBudget(_num_blocks(load, limits), length), settings, configs, tap=tap)


class _RoutingKept(RanksObserver):
    """Keeps the routing of its steps in their order."""

    def __init__(self) -> None:
        self.routings: list[SupportsBytes | None] = []

    def end(self, plans: Sequence[StepPlan], results: Sequence[StepResult]) -> None:
        self.routings.append(results[0].routing)

    def distinct_experts(self, first: int, end: int, spec: DecoderSpec, batch: int) -> float:
        """Return the mean per layer over the steps first ... end - 1, with one row of every request in each."""
        assert spec.moe is not None
        shape = RoutingShape(spec.num_layers, spec.moe.num_experts, spec.moe.gate.top_k)
        counts = []
        for routing in self.routings[first:end]:
            assert routing is not None
            ids = unpack(bytes(routing), shape, batch, range(batch))
            counts += [len(set(layer.ravel().tolist())) for layer in ids]
        return sum(counts) / len(counts)


def decode(
    runner: GpuModelRunner, spec: DecoderSpec, load: Load, limits: Limits, clock: Callable[[], float]
) -> Throughput:
    """Compute the prompts, then time steps in which every request gets a token; without an end token.

    Tokens are drawn at temperature 1, so that no request runs in circles and gates choose as they would for a text.
    """
    length = max_model_len(load, limits)
    scheduler = Scheduler(
        [PrefixCache(_num_blocks(load, limits), limits.block_size)],
        max_num_seqs=load.batch,
        max_num_batched_tokens=limits.max_batched_tokens,
        max_num_queued_reqs=load.batch,
        max_model_len=length,
        run_ahead=True,
    )
    kept = _RoutingKept()
    steps = Steps(scheduler, LocalExecutor(runner), depth=1, observers=[kept])
    draw = random.Random(load.batch)
    for number in range(load.batch):
        prompt = array("i", (draw.randrange(spec.vocab_size) for _ in range(load.prompt)))
        sampling = SamplingParams(max_tokens=length - load.prompt, temperature=1.0, seed=number)
        scheduler.add(Request(str(number), prompt, sampling))
    counts = [0] * load.batch

    def advance() -> int | None:
        """Return the number of tokens of a turn; None at the end."""
        outputs = steps.advance()
        if outputs is None:
            return None
        tokens = 0
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.token_id is not None:
                counts[int(output.request.request_id)] += 1
                tokens += 1
        return tokens

    # The second token of each: nothing of a prompt is on the device's queue any more.
    while min(counts) < 2:
        advance()
    first, context = len(kept.routings), load.prompt + sum(counts) // load.batch
    begin = clock()
    tokens = sum(advance() or 0 for _ in range(load.steps))
    seconds, end = clock() - begin, len(kept.routings)
    while advance() is not None:
        pass
    scheduler.check_idle()
    distinct = kept.distinct_experts(first, end, spec, load.batch)
    return Throughput(tokens, seconds, context + load.steps // 2, distinct)
