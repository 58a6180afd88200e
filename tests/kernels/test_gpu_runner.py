"""The GPU's runner serves as the CPU's does: the same greedy tokens, by either loop, in new or lasting batches."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch

from moeserve.cuda.build import build_gpu_decoder
from moeserve.cuda.gpu_model import GpuSettings, make_runner
from moeserve.cuda.runner import GpuModelRunner
from moeserve.executor import LocalExecutor, LocalLauncher
from moeserve.kv_budget import KvBudget
from moeserve.kv_pool import KVPool
from moeserve.model_runner import ModelRunner
from moeserve.models.families import build_spec
from moeserve.models.hf_config import load_config
from moeserve.models.weights import load_decoder
from moeserve.request import Request, SamplingParams
from moeserve.scheduler import Scheduler
from moeserve.step_loop import OverlappedSteps, PlainSteps, StepLoop
from radix_cache import PrefixCache
from tests.support.tiny_models import save

MAX_LEN, NUM_BLOCKS, BLOCK_SIZE = 32, 24, 4
PROMPTS = [[3, 14, 15, 92, 65, 35, 89], [3, 14, 15, 92, 65, 7], [27, 18]]
MODELS = ("mixtral", "llama")
GREEDY = [SamplingParams(max_tokens=3, temperature=0.0)] * len(PROMPTS)


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def cpu_tokens(model_dir: Path) -> list[list[int]]:
    spec = build_spec(load_config(model_dir))
    decoder = load_decoder(model_dir, spec, max_model_len=MAX_LEN)
    pool = KVPool(spec.kv_layers, NUM_BLOCKS, BLOCK_SIZE, torch.float32)
    return serve(ModelRunner(decoder, pool), GREEDY, overlapped=False)


def make(model_dir: Path, device: torch.device, *, enforce_eager: bool) -> GpuModelRunner:
    spec = build_spec(load_config(model_dir))
    settings = GpuSettings(BLOCK_SIZE, 4, 16, MAX_LEN, None, 0.9, enforce_eager)
    decoder = build_gpu_decoder(
        model_dir, spec, dtype=torch.float32, device=device, max_tokens=16, max_model_len=MAX_LEN
    )
    return make_runner(decoder, KvBudget(NUM_BLOCKS, MAX_LEN), settings)


def serve(runner: GpuModelRunner | ModelRunner, sampling: list[SamplingParams], *, overlapped: bool) -> list[list[int]]:
    scheduler = Scheduler(
        [PrefixCache(NUM_BLOCKS, BLOCK_SIZE)],
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_num_queued_reqs=9,
        max_model_len=MAX_LEN,
        run_ahead=overlapped,
    )
    steps: StepLoop = PlainSteps(scheduler, LocalExecutor(runner))
    if overlapped:
        assert isinstance(runner, GpuModelRunner)
        steps = OverlappedSteps(scheduler, LocalLauncher(runner))
    for number, (prompt, own) in enumerate(zip(PROMPTS, sampling, strict=True)):
        scheduler.add(Request(f"{number}", array("i", prompt), own))
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while (outputs := steps.advance()) is not None:
        for output in outputs:
            assert output.error is None
            if output.token_id is not None:
                tokens[int(output.request.request_id)].append(output.token_id)
    scheduler.check_idle()
    return tokens


def test_both_loops_and_both_kinds_of_batches_give_the_tokens_of_the_cpu(
    model_dir: Path, cpu_tokens: list[list[int]], device: torch.device
) -> None:
    assert serve(make(model_dir, device, enforce_eager=True), GREEDY, overlapped=False) == cpu_tokens
    assert serve(make(model_dir, device, enforce_eager=False), GREEDY, overlapped=True) == cpu_tokens


def test_draws_biases_penalties_and_log_probabilities(model_dir: Path, device: torch.device) -> None:
    if "llama" not in str(model_dir):
        pytest.skip("sampling does not depend on the model")
    runner = make(model_dir, device, enforce_eager=False)
    wishes = [
        SamplingParams(max_tokens=2, temperature=1.5, top_k=20, top_p=0.9, seed=5, logprobs=2),
        SamplingParams(max_tokens=2, temperature=0.0, logit_bias={77: 1000.0}, prompt_logprobs=1),
        SamplingParams(max_tokens=2, temperature=0.0, repetition_penalty=1e6, logit_bias={41: 50.0}),
    ]
    drawn = serve(runner, wishes, overlapped=False)
    assert drawn[1] == [77, 77]
    assert drawn[2][1] != drawn[2][0] == 41
    assert serve(runner, wishes, overlapped=True) == drawn
