"""The GPU's runner keeps recurrent states and window blocks as the CPU's does: padded batches, planning ahead."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from moeserve.device import KvBudget, StateDemand
from moeserve.engine.rank import ObservedRunner
from moeserve.model.families import build_spec, load_config
from moeserve.model.gpu.model import GpuSettings, compute_largest_step, kv_blocks, make_runner
from moeserve.model.kv_pool import KVPool, kv_block_bytes
from moeserve.model.runner import ModelRunner
from moeserve.model.spec import DecoderSpec
from moeserve.model.state_pool import StatePool, state_row_bytes
from moeserve.model.weights import load_decoder
from moeserve.plan import Request, SamplingParams
from moeserve.scheduling.request_states import StatePolicy
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import LocalExecutor, Runner, Steps
from radix_cache import PrefixCache
from tests.support.gpu_decoder import build_gpu_decoder
from tests.support.tiny_models import build

pytestmark = pytest.mark.kernel_change
MAX_LEN, MAX_SEQS, MAX_TOKENS, WINDOW = 32, 3, 8, 4
PROMPTS = [[3, 14, 15, 92, 65, 35, 89, 7, 9], [3, 14, 15, 92, 65, 35, 89, 7, 9, 11], [27, 18]]
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A tiny model, and the memory that the runner of each device has."""

    model: str
    fields: dict[str, object]
    block_size: int
    on_cpu: KvBudget
    on_gpu: KvBudget


STATES = KvBudget(24, MAX_LEN, num_state_slots=3, num_snapshots=2)
RECURRENT = Case(
    "qwen3_next",
    {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4},
    4,
    STATES,
    STATES,
)
WINDOWS = Case(
    "gpt_oss",
    {"num_hidden_layers": 2, "num_local_experts": 4, "sliding_window": WINDOW},
    2,
    KvBudget(24, MAX_LEN),
    KvBudget(24, MAX_LEN, num_window_blocks=9, window=WINDOW),
)


def save(case: Case, directory: Path) -> DecoderSpec:
    build(case.model, **case.fields).save_pretrained(directory)
    return build_spec(load_config(directory))


def settings(case: Case, *, eager: bool = True, states: StateDemand | None = None) -> GpuSettings:
    return GpuSettings(case.block_size, MAX_SEQS, MAX_TOKENS, MAX_LEN, None, 0.9, eager, states=states)


def serve(runner: Runner, kv: KvBudget, block_size: int, *, depth: int) -> tuple[list[list[int]], list[int]]:
    """Compute two requests, then one that goes on from the first one's end. Return tokens, and how many were cached."""
    num_slots = kv.num_state_slots
    cache = PrefixCache(
        kv.num_blocks,
        block_size,
        snapshot_rows=range(num_slots, kv.num_state_rows) if num_slots else None,
        num_window_blocks=kv.num_window_blocks,
        window=kv.window,
    )
    scheduler = Scheduler(
        [cache],
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_queued_reqs=9,
        max_model_len=MAX_LEN,
        run_ahead=depth > 0,
        states=StatePolicy(num_slots, min_gain=1) if num_slots else None,
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


@pytest.mark.parametrize("case", [RECURRENT, WINDOWS], ids=lambda case: case.model)
def test_both_loops_and_both_kinds_of_batches_give_the_tokens_of_the_cpu(
    case: Case, tmp_path: Path, device: torch.device
) -> None:
    spec = save(case, tmp_path)
    states = StatePool(spec.state_layers, case.on_cpu.num_state_rows, torch.float32) if spec.state_layers else None
    on_cpu = ModelRunner(
        load_decoder(tmp_path, spec, max_model_len=MAX_LEN),
        KVPool(spec.kv_layers, case.on_cpu.num_blocks, case.block_size, torch.float32),
        state_pool=states,
    )
    expected = serve(on_cpu, case.on_cpu, case.block_size, depth=0)
    assert expected[1] == [0, 8, 0]
    for eager, depth in ((True, 0), (False, 1)):
        decoder = build_gpu_decoder(
            tmp_path, spec, dtype=torch.float32, device=device, max_tokens=MAX_TOKENS, max_model_len=MAX_LEN
        )
        on_gpu = settings(case, eager=eager)
        compute_largest_step(decoder, on_gpu)
        assert serve(make_runner(decoder, case.on_gpu, on_gpu), case.on_gpu, case.block_size, depth=depth) == expected


def test_states_come_out_of_the_memory_for_kv(tmp_path: Path) -> None:
    spec = save(RECURRENT, tmp_path)
    row_bytes = state_row_bytes(spec.state_layers, torch.float32)
    block_bytes = kv_block_bytes(spec.kv_layers, RECURRENT.block_size, torch.float32)
    demand = StateDemand(row_bytes, MAX_SEQS, 5 * row_bytes)
    memory = (MAX_SEQS + 5) * row_bytes + 40 * block_bytes
    found = kv_blocks(spec, torch.float32, settings(RECURRENT, states=demand), memory)
    assert found == KvBudget(40, MAX_LEN, 3, 5)


def test_window_blocks_come_out_of_the_memory_for_kv(tmp_path: Path) -> None:
    spec = replace(save(WINDOWS, tmp_path), max_position=64)
    memory = 40 * kv_block_bytes(spec.kv_layers, WINDOWS.block_size, torch.float32)
    whole_context = replace(settings(WINDOWS), max_model_len=None)
    # Three requests of four blocks each and a step of four more.
    expected = KvBudget(64, 64, num_window_blocks=16, window=WINDOW)
    assert kv_blocks(spec, torch.float32, whole_context, memory) == expected
