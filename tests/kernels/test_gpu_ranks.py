"""Several ranks on GPUs give the tokens of one on a CPU. Here: Triton's interpreter, and gloo in place of NCCL."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.device import KvBudget
from moeserve.model.kv_pool import KVPool
from moeserve.model.runner import ModelRunner
from moeserve.model.weights import load_decoder
from moeserve.scheduling.steps import LocalExecutor
from tests.support.checkpoints import spec_of
from tests.support.rank_requests import MAX_LEN, RankCase, Said, serve
from tests.support.tiny_models import save

pytestmark = [
    pytest.mark.kernel_change,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks here are for the interpreter"),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="ranks meet through deepspeed"),
]
ROOT = Path(__file__).resolve().parents[2]
# As many requests, and tokens for each, as are enough for both ranks to compute at once.
FEW = {"num_requests": 2, "max_tokens": 2}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"model": "qwen3_moe", "num_requests": 3, "max_tokens": 2},
    "gathered": {"model": "glm4_moe", "shape": "allgather", "eager": True, "ahead": False, **FEW},
    "replayed": {"model": "glm4_moe", "shape": "allgather"},
    "fp8-kv": {"model": "qwen3_moe", "kv_cache_dtype": "fp8_e4m3", **FEW},
    "int4": {"model": "qwen3_moe", "shape": "allgather", "quantization": "experts=int4", **FEW},
    "int4-moved": {"model": "qwen3_moe", "shape": "allgather", "quantization": "experts=int4", "moves": True, **FEW},
    "int4-slots": {
        "model": "qwen3_moe",
        "shape": "allgather",
        "quantization": "experts=int4",
        "moves": True,
        "num_slots": 3,
        "prefetch": "gate",
        **FEW,
    },
}
REPLICAS: dict[str, dict[str, Any]] = {
    "gathered": {"model": "qwen3_moe", "shape": "allgather", "redundant": 4},
    "sent": {"model": "glm4_moe", "redundant": 4},
}


def said_by_ranks(cases: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, Said]:
    """The results of both ranks in each case. folder: of the models, by name."""
    asked = [{**case, "model": str(folder / case["model"])} for case in cases.values()]
    arguments = ["2", str(folder / f"meeting-{len(cases)}"), json.dumps(asked)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.support.gpu_rank", str(rank), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = []
    for rank in ranks:
        out, errors = rank.communicate(timeout=280)
        assert rank.returncode == 0, errors[-3000:]
        said.append(json.loads(out.splitlines()[-1]))
    assert said[0] == said[1]
    return dict(zip(cases, said[0], strict=True))


def tokens_of(said: Said) -> list[list[int]]:
    return [[token for token, _ in request] for request in said]


def logprobs_of(said: Said) -> list[float]:
    return [logprob for request in said for _, logprob in request]


def said_on_cpu(case: Mapping[str, Any], folder: Path) -> Said:
    asked = RankCase(**{**case, "model": str(folder / case["model"])})
    spec = spec_of(Path(asked.model))
    runner = ModelRunner(
        load_decoder(Path(asked.model), spec, max_model_len=MAX_LEN), KVPool(spec.kv_layers, 24, 4, torch.float32)
    )
    return serve(asked, KvBudget(24, MAX_LEN), 1, LocalExecutor(runner), depth=0)


def said_by_one_gpu(case: Mapping[str, Any], folder: Path, device: torch.device) -> Said:
    asked = RankCase(**{**case, "model": str(folder / case["model"])})
    spec = spec_of(Path(asked.model))
    # They serve with what a machine with a GPU may lack.
    from moeserve.engine.assemble import load_rank
    from moeserve.engine.memory_plan import ModelPlan

    plan = ModelPlan(spec, torch.float32, KvBudget(0, 0), 0, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeserve.engine.assemble.current_gpu", lambda: device)
        one = load_rank(Path(asked.model), plan, asked.config(spec, 1), lambda _: None).start()
    return serve(asked, one.model.kv, 1, LocalExecutor(one.runner))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3_moe", "glm4_moe"):
        (folder / name).mkdir()
        save(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def of_two(models: Path) -> dict[str, Said]:
    return said_by_ranks(CASES, models)


def test_two_ranks_give_the_tokens_of_the_cpu(models: Path, of_two: dict[str, Said]) -> None:
    for name in ("plain", "replayed"):
        assert tokens_of(of_two[name]) == tokens_of(said_on_cpu(CASES[name], models))


def test_decodes_in_lasting_batches_planned_ahead_say_what_steps_of_their_own_do(of_two: dict[str, Said]) -> None:
    eager, replayed = of_two["gathered"], of_two["replayed"]
    shorter = [request[:2] for request in replayed[: len(eager)]]
    assert tokens_of(eager) == tokens_of(shorter)
    assert logprobs_of(eager) == pytest.approx(logprobs_of(shorter), abs=1e-5)


@pytest.mark.parametrize("name", ["fp8-kv", "int4"])
def test_two_ranks_quantise_as_one_gpu_does(
    name: str, of_two: dict[str, Said], models: Path, device: torch.device
) -> None:
    found, expected = of_two[name], said_by_one_gpu(CASES[name], models, device)
    assert tokens_of(found) == tokens_of(expected)
    assert logprobs_of(found) == pytest.approx(logprobs_of(expected), abs=1e-5)
    # Rounding shows.
    assert abs(of_two["plain"][0][0][1] - found[0][0][1]) > 1e-3


def test_fewer_slots_than_experts_of_a_rank_change_no_bit(of_two: dict[str, Said]) -> None:
    assert of_two["int4-slots"] == of_two["int4-moved"]


def test_experts_that_change_ranks_while_serving_change_no_token(of_two: dict[str, Said]) -> None:
    moved, stayed = of_two["int4-moved"], of_two["int4"]
    assert tokens_of(moved) == tokens_of(stayed)
    assert logprobs_of(moved) == pytest.approx(logprobs_of(stayed), abs=1e-5)


@pytest.mark.long
def test_replicas_change_no_token(models: Path) -> None:
    for name, said in said_by_ranks(REPLICAS, models).items():
        assert tokens_of(said) == tokens_of(said_on_cpu(REPLICAS[name], models))
