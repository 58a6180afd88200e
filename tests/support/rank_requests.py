"""Requests that several ranks on GPUs are asked, and the engine's loop over whatever computes them.

Prompts come one after the other, so that at first one rank has nothing to do; the third finds the first's prefix.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path

import torch

from experts.memory.file import round_to_page
from moeserve.config import ServeConfig
from moeserve.device import KvBudget
from moeserve.engine.experts.gpu_memory import slot_layouts
from moeserve.model.gpu.kernels import expert_storage, kv_dtype_of
from moeserve.model.kv_pool import kv_block_bytes
from moeserve.model.spec import DecoderSpec
from moeserve.plan import Request, SamplingParams
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import Executor, Steps
from moeserve.settings.weights import parse_quantization
from radix_cache import PrefixCache

MAX_LEN, NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS, MAX_TOKENS = 32, 24, 4, 4, 8
# Seconds that ranks may be apart.
TIMEOUT = 120
ARRIVALS = {
    0: [[3, 14, 15, 92, 65, 35, 89, 79, 32]],
    2: [[27, 18], [3, 14, 15, 92, 65, 35, 89, 7]],
    4: [[41, 42, 43, 44, 45, 46]],
}
# By request: its tokens, each with its log probability.
Said = list[list[tuple[int, float]]]


@dataclass(frozen=True)
class RankCase:
    """model: its folder. shape: of dispatch. redundant: replicas of experts. The others as the settings of serving.

    num_slots: of each layer, filled from disk; None for all experts of a rank. moves: whether experts change places
    meanwhile. eager: as `--enforce-eager`. ahead: whether steps are planned before the one before is done.
    num_requests, max_tokens: how many arrive, and how much each is told.
    """

    model: str
    shape: str = "alltoall"
    redundant: int = 0
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    num_slots: int | None = None
    prefetch: str = "off"
    moves: bool = False
    eager: bool = False
    ahead: bool = True
    num_requests: int = sum(map(len, ARRIVALS.values()))
    max_tokens: int = 3

    def config(self, spec: DecoderSpec, num_ranks: int) -> ServeConfig:
        kv_dtype = kv_dtype_of(self.kv_cache_dtype)
        return ServeConfig(
            device="cuda",
            dtype="float32",
            expert_parallel_size=num_ranks,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=MAX_TOKENS,
            max_model_len=MAX_LEN,
            kv_cache_memory=NUM_BLOCKS * kv_block_bytes(spec.kv_layers, BLOCK_SIZE, kv_dtype or torch.float32),
            enforce_eager=self.eager,
            dispatch=self.shape,
            kv_cache_dtype=self.kv_cache_dtype,
            quantization=self.quantization,
            expert_memory=None if self.num_slots is None else self._slot_bytes(spec, self.num_slots),
            expert_prefetch=self.prefetch,
            expert_policy="lru",
            expert_store_dir=None if self.num_slots is None else str(Path(self.model).parent / "store"),
            # All experts are read from disk where some may move.
            rebalance_interval=0 if self.num_slots is None else 1000,
            engine_timeout=2.5 * TIMEOUT,
        )

    def _slot_bytes(self, spec: DecoderSpec, num_slots: int) -> int:
        storage = expert_storage(spec, torch.float32, parse_quantization(self.quantization).experts)
        return num_slots * len(spec.moe_layers) * round_to_page(slot_layouts(spec, torch.float32, storage).num_bytes)


def serve(case: RankCase, kv: KvBudget, num_ranks: int, executor: Executor, depth: int | None = None) -> Said:
    """The answers to the requests by ranks with this much memory each. depth: as the case says if None."""
    depth = int(case.ahead) if depth is None else depth
    scheduler = Scheduler(
        [
            PrefixCache(kv.num_blocks, BLOCK_SIZE, num_window_blocks=kv.num_window_blocks, window=kv.window)
            for _ in range(num_ranks)
        ],
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_queued_reqs=9,
        max_model_len=MAX_LEN,
        run_ahead=depth > 0,
    )
    steps = Steps(scheduler, executor, depth)
    sampling = SamplingParams(max_tokens=case.max_tokens, temperature=0.0, logprobs=0)
    said: Said = []
    for turn in range(100):
        for prompt in ARRIVALS.get(turn, ())[: case.num_requests - len(said)]:
            scheduler.add(Request(f"{len(said)}", array("i", prompt), sampling))
            said.append([])
        outputs = steps.advance()
        if outputs is None and turn > max(ARRIVALS):
            break
        for output in outputs or ():
            assert output.error is None
            if output.token_id is not None and output.logprobs is not None:
                said[int(output.request.request_id)].append((output.token_id, output.logprobs.logprob))
    scheduler.check_idle()
    return said
