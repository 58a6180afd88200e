"""Logits of the GPU's decoder and of the CPU's for the same requests, through paged memory."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.model.decoder import Decoder, StepDecoder
from moeserve.model.gpu.batches import Batches, StepBatches, native_limits
from moeserve.model.kv_pool import KVPool
from moeserve.model.state_pool import StatePool
from moeserve.model.step_arrays import step_arrays
from moeserve.plan import Chunk, StateUse
from tests.support.paged_runner import PagedRunner

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, MAX_TOKENS = 4, 16, 32, 16
LENGTHS = (9, 5)
# A prompt, then prompts of both in chunks, then a decode beside a prompt, then both decode.
STEPS = ([(0, 0, 5)], [(0, 5, 7), (1, 0, 3)], [(0, 7, 8), (1, 3, 4)], [(0, 8, 9), (1, 4, 5)])


def two_requests() -> list[list[int]]:
    """As long as `STEPS` go."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, 128, (length,), generator=generator).tolist() for length in LENGTHS]


def gpu_logits(decoder: Decoder, requests: Sequence[list[int]], kv_dtype: torch.dtype | None = None) -> list[Tensor]:
    """[len(tokens), vocab_size] of each request on the CPU, computed in `STEPS` over pools full of NaN."""
    # Prompts of five and three tokens are computed otherwise than prompts of one and two.
    limits = native_limits(decoder.spec, BLOCK_SIZE, MAX_LEN, decoder.dtype, decoder.device, kv_dtype, max_extend=2)
    return logits_in_steps(decoder, StepBatches(limits, max_seqs=4), requests, kv_dtype)


def logits_in_steps(
    decoder: StepDecoder, batches: Batches, requests: Sequence[list[int]], kv_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Do as `gpu_logits`, with batches of this maker."""
    spec, dtype, device = decoder.spec, decoder.dtype, decoder.device
    pools = KVPool(spec.kv_layers, NUM_BLOCKS, BLOCK_SIZE, kv_dtype or dtype, device)
    for pair in pools.layers:
        for pool in pair:
            if pool is not None:
                pool.copy_(torch.full(pool.shape, torch.nan))
    states = None
    if spec.state_layers:
        states = StatePool(spec.state_layers, len(requests) + 1, dtype, device)
        for layer in states.layers:
            for state in layer:
                state.fill_(torch.nan)
    blocks = list(range(NUM_BLOCKS))
    random.Random(0).shuffle(blocks)
    tables = [array("i", [blocks.pop() for _ in range(3)]) for _ in requests]
    found = [torch.full((len(tokens), spec.vocab_size), torch.nan) for tokens in requests]
    for step in STEPS:
        chunks = [
            Chunk(
                str(r),
                array("i", requests[r][start:end]),
                start,
                tables[r],
                None,
                state=None if states is None else StateUse(r + 1),
            )
            for r, start, end in step
        ]
        arrays = step_arrays(chunks, BLOCK_SIZE)
        with torch.inference_mode():
            if states is not None:
                states.begin(chunks)
            batch = batches.make(arrays, range(arrays.num_rows), None)
            logits = decoder.forward(batch, decoder.arrange_pools(pools.layers, states)).float().cpu()
        row = 0
        for request, start, end in step:
            found[request][start:end] = logits[row : row + end - start]
            row += end - start
    return found


def cpu_logits(decoder: Decoder, requests: Sequence[list[int]]) -> list[Tensor]:
    """As `gpu_logits`, from the decoder on the CPU."""
    runner = PagedRunner(decoder, requests, BLOCK_SIZE)
    return [runner.step([(number, 0, len(tokens))]) for number, tokens in enumerate(requests)]


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of two lists of logits, as a share of the largest logit; NaN where there is one."""
    scale = max(1.0, *(logits.abs().max().item() for logits in expected))
    return (torch.cat(list(found)) - torch.cat(list(expected))).abs().max().item() / scale
