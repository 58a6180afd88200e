"""Several ranks on GPUs give the tokens of one on a CPU. Here: Triton's interpreter, and gloo in place of NCCL."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
import torch

from moeserve.executor import LocalExecutor
from moeserve.kv_pool import KVPool
from moeserve.model_runner import ModelRunner
from moeserve.models.families import build_spec
from moeserve.models.hf_config import load_config
from moeserve.models.weights import load_decoder
from moeserve.request import Request, SamplingParams
from moeserve.scheduler import Scheduler
from moeserve.step_loop import PlainSteps
from radix_cache import PrefixCache
from tests.support.tiny_models import save

ROOT = Path(__file__).resolve().parents[2]
ARRIVED = [[3, 14, 15, 92, 65, 35, 89, 79, 32], [27, 18], [3, 14, 15, 92, 65, 35, 89, 7], [41, 42, 43, 44, 45, 46]]


def tokens_of_ranks(folder: Path, num_ranks: int, rendezvous: Path, shape: str, redundant: int) -> list[list[int]]:
    """What every rank says, all the same."""
    arguments = [str(num_ranks), str(folder), str(rendezvous), shape, str(redundant)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.support.gpu_rank", str(rank), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    said = []
    for rank in ranks:
        out, errors = rank.communicate(timeout=280)
        assert rank.returncode == 0, errors[-3000:]
        said.append(json.loads(out.splitlines()[-1]))
    assert all(tokens == said[0] for tokens in said)
    return said[0]


def tokens_of_cpu(folder: Path) -> list[list[int]]:
    spec = build_spec(load_config(folder))
    runner = ModelRunner(load_decoder(folder, spec, max_model_len=32), KVPool(spec.kv_layers, 24, 4, torch.float32))
    scheduler = Scheduler(
        [PrefixCache(24, 4)], max_num_seqs=4, max_num_batched_tokens=8, max_num_queued_reqs=9, max_model_len=32
    )
    for number, prompt in enumerate(ARRIVED):
        scheduler.add(Request(f"{number}", array("i", prompt), SamplingParams(max_tokens=3, temperature=0.0)))
    tokens: list[list[int]] = [[] for _ in ARRIVED]
    steps = PlainSteps(scheduler, LocalExecutor(runner))
    while (outputs := steps.advance()) is not None:
        for output in outputs:
            if output.token_id is not None:
                tokens[int(output.request.request_id)].append(output.token_id)
    return tokens


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks here are for the interpreter")
@pytest.mark.parametrize(
    ("case", "shape", "redundant"),
    [
        ("qwen3_moe", "alltoall", 0),
        ("glm4_moe", "allgather", 0),
        pytest.param("qwen3_moe", "allgather", 4, marks=pytest.mark.long),
        pytest.param("glm4_moe", "alltoall", 4, marks=pytest.mark.long),
    ],
)
def test_two_ranks_give_the_tokens_of_one_and_of_the_cpu(tmp_path: Path, case: str, shape: str, redundant: int) -> None:
    folder = tmp_path / case
    folder.mkdir()
    save(case, folder)
    expected = tokens_of_cpu(folder)
    assert tokens_of_ranks(folder, 2, tmp_path / "two", shape, redundant) == expected
    if shape == "alltoall":
        assert tokens_of_ranks(folder, 1, tmp_path / "one", shape, 0) == expected
