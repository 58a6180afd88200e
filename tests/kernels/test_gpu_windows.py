"""The GPU's runner reads layers with a sliding window through window blocks as the CPU's does."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moeserve.device import KvBudget
from moeserve.model.families import build_spec, load_config
from moeserve.model.gpu_model import GpuSettings, compute_largest_step, kv_blocks, make_runner
from moeserve.model.kv_pool import KVPool, kv_block_bytes
from moeserve.model.runner import ModelRunner
from moeserve.model.weights import load_decoder
from moeserve.plan import Request, SamplingParams
from moeserve.rank import ObservedRunner
from moeserve.scheduler import Scheduler
from moeserve.steps import LocalExecutor, Runner, Steps
from radix_cache import PrefixCache
from tests.support.gpu_decoder import build_gpu_decoder
from tests.support.tiny_models import build

pytestmark = pytest.mark.kernel_change
MAX_LEN, BLOCK_SIZE, MAX_SEQS, MAX_TOKENS, WINDOW = 32, 2, 3, 8, 4
TOGETHER = KvBudget(24, MAX_LEN)
APART = KvBudget(24, MAX_LEN, num_window_blocks=9, window=WINDOW)
PROMPTS = [[3, 14, 15, 92, 65, 35, 89, 7, 9], [3, 14, 15, 92, 65, 35, 89, 7, 9, 11], [27, 18]]
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build("gpt_oss", num_hidden_layers=2, num_local_experts=4, sliding_window=WINDOW).save_pretrained(directory)
    return directory


def serve(runner: Runner, kv: KvBudget, *, depth: int) -> tuple[list[list[int]], list[int]]:
    """Two requests, then one that goes on from the first one's end. Tokens, and how many were cached."""
    cache = PrefixCache(kv.num_blocks, BLOCK_SIZE, num_window_blocks=kv.num_window_blocks, window=kv.window)
    scheduler = Scheduler(
        [cache],
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_queued_reqs=9,
        max_model_len=MAX_LEN,
        run_ahead=depth > 0,
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
    decoder = load_decoder(model_dir, spec, max_model_len=MAX_LEN)
    expected = serve(
        ModelRunner(decoder, KVPool(spec.kv_layers, TOGETHER.num_blocks, BLOCK_SIZE, torch.float32)), TOGETHER, depth=0
    )
    assert expected[1] == [0, 8, 0]
    for eager, depth in ((True, 0), (False, 1)):
        on_device = build_gpu_decoder(
            model_dir, spec, dtype=torch.float32, device=device, max_tokens=MAX_TOKENS, max_model_len=MAX_LEN
        )
        settings = GpuSettings(BLOCK_SIZE, MAX_SEQS, MAX_TOKENS, MAX_LEN, None, 0.9, eager)
        compute_largest_step(on_device, settings)
        assert serve(make_runner(on_device, APART, settings), APART, depth=depth) == expected


def test_window_blocks_come_out_of_the_memory_for_kv(model_dir: Path) -> None:
    spec = build_spec(load_config(model_dir))
    memory = 40 * kv_block_bytes(spec.kv_layers, BLOCK_SIZE, torch.float32)
    settings = GpuSettings(BLOCK_SIZE, MAX_SEQS, MAX_TOKENS, None, None, 0.9, True)
    kv, kv_bytes = kv_blocks(replace(spec, max_position=64), torch.float32, settings, memory)
    # Three requests of four blocks each and a step of four more.
    assert kv == KvBudget(64, 64, num_window_blocks=16, window=WINDOW)
    assert kv_bytes == memory
