"""The GPU's runner keeps recurrent states as the CPU's does: slots, snapshots, padded batches, planning ahead."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch

from moeserve.device import KvBudget, StateDemand
from moeserve.model.families import build_spec, load_config
from moeserve.model.gpu_model import GpuSettings, compute_largest_step, kv_blocks, make_runner
from moeserve.model.kv_pool import KVPool, kv_block_bytes
from moeserve.model.runner import ModelRunner
from moeserve.model.state_pool import StatePool, state_row_bytes
from moeserve.model.weights import load_decoder
from moeserve.plan import Request, SamplingParams
from moeserve.rank import ObservedRunner
from moeserve.request_states import StatePolicy
from moeserve.scheduler import Scheduler
from moeserve.steps import LocalExecutor, Runner, Steps
from radix_cache import PrefixCache
from tests.support.gpu_decoder import build_gpu_decoder
from tests.support.tiny_models import build

pytestmark = pytest.mark.kernel_change
MAX_LEN, NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS, MAX_TOKENS = 32, 24, 4, 3, 8
NUM_SLOTS, NUM_SNAPSHOTS = 3, 2
PROMPTS = [[3, 14, 15, 92, 65, 35, 89, 7, 9], [3, 14, 15, 92, 65, 35, 89, 7, 9, 11], [27, 18]]
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build(
        "qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], num_experts=4
    ).save_pretrained(directory)
    return directory


def serve(runner: Runner, *, depth: int) -> tuple[list[list[int]], list[int]]:
    """Two requests, then one that goes on from the first one's snapshot. Tokens, and how many were cached."""
    cache = PrefixCache(NUM_BLOCKS, BLOCK_SIZE, snapshot_rows=range(NUM_SLOTS, NUM_SLOTS + NUM_SNAPSHOTS))
    scheduler = Scheduler(
        [cache],
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_queued_reqs=9,
        max_model_len=MAX_LEN,
        run_ahead=depth > 0,
        states=StatePolicy(NUM_SLOTS, min_gain=1),
    )
    steps = Steps(scheduler, LocalExecutor(ObservedRunner(runner)), depth)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    cached = [0] * len(PROMPTS)
    for numbers in ((0, 2), (1,)):
        for number in numbers:
            scheduler.add(Request(f"{number}", array("i", PROMPTS[number]), GREEDY))
        while (outputs := steps.advance()) is not None:
            for output in outputs:
                assert output.error is None
                if output.token_id is not None:
                    number = int(output.request.request_id)
                    tokens[number].append(output.token_id)
                    cached[number] = output.request.num_cached_tokens
    scheduler.check_idle()
    return tokens, cached


def test_both_loops_and_both_kinds_of_batches_give_the_tokens_of_the_cpu(model_dir: Path, device: torch.device) -> None:
    spec = build_spec(load_config(model_dir))
    on_cpu = ModelRunner(
        load_decoder(model_dir, spec, max_model_len=MAX_LEN),
        KVPool(spec.kv_layers, NUM_BLOCKS, BLOCK_SIZE, torch.float32),
        state_pool=StatePool(spec.state_layers, NUM_SLOTS + NUM_SNAPSHOTS, torch.float32),
    )
    expected = serve(on_cpu, depth=0)
    assert expected[1] == [0, 8, 0]
    for eager, depth in ((True, 0), (False, 1)):
        decoder = build_gpu_decoder(
            model_dir, spec, dtype=torch.float32, device=device, max_tokens=MAX_TOKENS, max_model_len=MAX_LEN
        )
        settings = GpuSettings(BLOCK_SIZE, MAX_SEQS, MAX_TOKENS, MAX_LEN, None, 0.9, eager)
        compute_largest_step(decoder, settings)
        budget = KvBudget(NUM_BLOCKS, MAX_LEN, NUM_SLOTS, NUM_SNAPSHOTS)
        assert serve(make_runner(decoder, budget, settings), depth=depth) == expected


def test_states_come_out_of_the_memory_for_kv(model_dir: Path) -> None:
    spec = build_spec(load_config(model_dir))
    row_bytes, block_bytes = (
        state_row_bytes(spec.state_layers, torch.float32),
        kv_block_bytes(spec.kv_layers, BLOCK_SIZE, torch.float32),
    )
    memory = (MAX_SEQS + 5) * row_bytes + 40 * block_bytes
    demand = StateDemand(row_bytes, MAX_SEQS, 5 * row_bytes)
    settings = GpuSettings(BLOCK_SIZE, MAX_SEQS, MAX_TOKENS, MAX_LEN, None, 0.9, True, states=demand)
    assert kv_blocks(spec, torch.float32, settings, memory) == (KvBudget(40, MAX_LEN, 3, 5), 40 * block_bytes)
