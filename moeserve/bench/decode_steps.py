"""Whole decode steps of random requests: the scheduler, the runner and its lasting batches, in this process."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.gpu.tuning import MoeConfigs
from moeserve.bench.random_model import qwen3_moe_spec, random_decoder
from moeserve.cuda.decoder import GpuDecoder
from moeserve.cuda.expert_kernels import expert_configs, expert_storage
from moeserve.cuda.gpu_model import GpuSettings, make_runner
from moeserve.cuda.runner import GpuModelRunner
from moeserve.executor import LocalLauncher
from moeserve.kv_budget import KvBudget
from moeserve.models.spec import DecoderSpec
from moeserve.request import Request, SamplingParams
from moeserve.scheduler import Scheduler
from moeserve.step_loop import OverlappedSteps
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
    """Of the scheduler and the runner. Blocks are as many as the load needs."""

    block_size: int
    max_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens and seconds of the steps in which all requests decode, and the positions a request has in their middle."""

    tokens: int
    seconds: float
    context: int


def measure(
    sizes: dict[str, int],
    loads: Sequence[Load],
    limits: Limits,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[Load, DecoderSpec, Throughput]]:
    """One load after the other: weights of these sizes (see `qwen3_moe_spec`) are made once, KV memory for each.

    Computes in bf16 on a GPU, in fp32 elsewhere.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    max_len = max(max_model_len(load, limits) for load in loads)
    spec = qwen3_moe_spec(**sizes, max_position=max_len)
    configs = expert_configs(spec, expert_storage(spec, dtype), device)
    with torch.inference_mode():
        decoder = random_decoder(
            spec, dtype, device, max_tokens=limits.max_batched_tokens, max_model_len=max_len, configs=configs
        )
    for load in loads:
        runner = _make_runner(decoder, load, limits, configs)
        yield load, spec, decode(runner, spec.vocab_size, load, limits, clock)
        del runner
        if device.type == "cuda":
            torch.cuda.empty_cache()


def max_model_len(load: Load, limits: Limits) -> int:
    """Positions of a request at its end: those that are admitted first go on while the others' prompts are computed."""
    budget = limits.max_batched_tokens - load.batch
    if budget < 1:
        raise ValueError(f"{load.batch} requests leave no room for prompts in {limits.max_batched_tokens} tokens")
    return load.prompt + -(-load.batch * load.prompt // budget) + load.steps + 2 * _MARGIN


def _num_blocks(load: Load, limits: Limits) -> int:
    return load.batch * (-(-max_model_len(load, limits) // limits.block_size) + 1)


def _make_runner(decoder: GpuDecoder, load: Load, limits: Limits, configs: MoeConfigs | None) -> GpuModelRunner:
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
    return make_runner(decoder, KvBudget(_num_blocks(load, limits), length), settings, configs)


def decode(
    runner: GpuModelRunner, vocab_size: int, load: Load, limits: Limits, clock: Callable[[], float]
) -> Throughput:
    """Computes the prompts, then times steps in which every request gets a token; greedy, without an end token."""
    length = max_model_len(load, limits)
    scheduler = Scheduler(
        [PrefixCache(_num_blocks(load, limits), limits.block_size)],
        max_num_seqs=load.batch,
        max_num_batched_tokens=limits.max_batched_tokens,
        max_num_queued_reqs=load.batch,
        max_model_len=length,
        run_ahead=True,
    )
    steps = OverlappedSteps(scheduler, LocalLauncher(runner))
    draw = random.Random(load.batch)
    sampling = SamplingParams(max_tokens=length - load.prompt, temperature=0.0)
    for number in range(load.batch):
        prompt = array("i", (draw.randrange(vocab_size) for _ in range(load.prompt)))
        scheduler.add(Request(str(number), prompt, sampling))
    counts = [0] * load.batch

    def advance() -> int | None:
        """Tokens that came of a turn; None at the end."""
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
    begin, context = clock(), load.prompt + sum(counts) // load.batch
    tokens = sum(advance() or 0 for _ in range(load.steps))
    seconds = clock() - begin
    while advance() is not None:
        pass
    scheduler.check_idle()
    return Throughput(tokens, seconds, context + load.steps // 2)
