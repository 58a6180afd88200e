"""`--device cuda` with two ranks as a user starts it; the devices are CPUs under Triton's interpreter, over gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moeserve.model.families import build_spec, load_config
from tests.e2e.test_expert_parallel import RESTLESS, ranks_of
from tests.support.saved_models import saved_model
from tests.support.service import ROOT, Service, is_alive, service, wait_until
from tests.support.slot_bytes import slots_on_gpu
from tests.support.tiny_model import write_model_dir

PROMPTS = [[3, 14, 15, 9, 26, 5], [27, 18], [3, 14, 15, 9, 26, 7, 8]]
LIMITS = ("--max-model-len", "32", "--max-num-batched-tokens", "8", "--max-num-seqs", "4", "--block-size", "4")
SMALL = (*LIMITS, "--dtype", "float32", "--kv-cache-memory", "64KiB")
RANKS = ("--device", "cuda", "--expert-parallel-size", "2", "--engine-timeout", "20", "--dispatch", "alltoall")
RANKS += ("--max-restarts", "0")
NUM_SLOTS = 3


@pytest.fixture(autouse=True)
def no_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("made for the interpreter")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("m")
    write_model_dir(folder)
    saved_model("qwen3_moe", folder)
    return folder


def answer_to(running: Service, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    answer = running.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def complete(running: Service, prompt: list[int]) -> str:
    text: str = answer_to(running, prompt)["choices"][0]["text"]
    return text


def complete_all(running: Service) -> list[str]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda prompt: complete(running, prompt), PROMPTS))


@pytest.fixture
def expected(model: Path, tmp_path: Path) -> Iterator[list[str]]:
    """Return the answers of one rank on the CPU."""
    with service(model, tmp_path / "one", *SMALL) as one:
        yield complete_all(one)


@pytest.mark.kernel_change
def test_two_ranks_with_few_slots_say_what_a_cpu_says_and_a_killed_one_is_named(
    model: Path, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/support/interpreted_gpu:{ROOT}")
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    spec, size = build_spec(load_config(model)), slots_on_gpu(model, NUM_SLOTS)
    bounded = ("--expert-memory", str(size), "--expert-prefetch", "gate")
    with service(model, tmp_path / "two", *SMALL, *RANKS, *bounded) as two:
        pids = ranks_of(two)
        assert len(pids) == 2
        assert complete_all(two) == expected
        told = two.http.get("/v1/experts").json()
        assert told["strategy"]["dispatch"] == "alltoall"
        assert told["strategy"]["prefetch"] == {"source": "gate", "is_on": True}
        assert [len(layers) for layers in told["residency"]["resident"]] == [len(spec.moe_layers)] * 2
        assert all(len(layer) == NUM_SLOTS for layers in told["residency"]["resident"] for layer in layers)
        os.kill(pids[1], signal.SIGKILL)
        assert two.end() == 1
        assert f"Rank 1 (process {pids[1]})" in two.errors.read_text()
        assert two.leaves_nothing()
        wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.kernel_change
def test_two_ranks_replay_decodes_and_one_that_dies_in_the_middle_of_them_is_named(
    model: Path, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/support/interpreted_gpu:{ROOT}")
    with service(model, tmp_path / "two", *SMALL, *RANKS, "--dispatch", "auto") as two:
        pids = ranks_of(two)
        assert complete_all(two) == expected
        events = two.stream(max_tokens=20)
        next(events)
        os.kill(pids[1], signal.SIGKILL)
        assert "error" in list(events)[-1]
        assert two.end() == 1
        assert f"Rank 1 (process {pids[1]})" in two.errors.read_text()
        assert two.leaves_nothing()
        wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.long
def test_two_ranks_place_experts_anew_and_say_the_same(
    model: Path, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/support/interpreted_gpu:{ROOT}")
    with service(model, tmp_path / "two", *SMALL, *RANKS, *RESTLESS) as two:
        # With a trace, choices are counted after every step.
        two.http.post("/v1/experts/trace", json={"action": "start"})
        for _ in range(3):
            assert complete_all(two) == expected
        assert two.http.get("/v1/experts").json()["rebalancing"]["num_experts_loaded"] > 0


@pytest.mark.kernel_change
def test_the_ranks_of_gpus_share_what_each_has_written_to_disk(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/support/interpreted_gpu:{ROOT}")
    prompts = [[number, *range(3, 15 + 4 * number)] for number in range(3)]
    disk = ("--kv-disk-path", str(tmp_path / "kv"))
    with service(model, tmp_path / "one", *SMALL) as one:
        expected = [complete(one, prompt) for prompt in prompts]
    with service(model, tmp_path / "0", *SMALL, *RANKS, *disk) as two:
        with ThreadPoolExecutor(len(prompts)) as pool:
            cold = list(pool.map(lambda prompt: answer_to(two, prompt), prompts))
        assert [answer["choices"][0]["text"] for answer in cold] == expected
        num_blocks = [(len(prompt) + 2) // 4 for prompt in prompts]
        wait_until(lambda: two.http.get("/v1/cache").json()["disk"]["blocks"] == sum(num_blocks))
        # Prompts differ in length: find one that rank 1 computed. The next life's first request lives on rank 0.
        listed = two.http.get("/v1/cache").json()["prefixes"]
        ends = {entry["prefix_tokens"] for entry in listed if entry["id"].startswith("1.")}
        chosen = next(number for number, count in enumerate(num_blocks) if 4 * count in ends)
    with service(model, tmp_path / "1", *SMALL, *RANKS, *disk) as two:
        warm = answer_to(two, prompts[chosen])
        found, computed = warm["choices"][0], cold[chosen]["choices"][0]
        assert found["text"] == computed["text"]
        # A GPU's bits depend on the rows of a step.
        assert found["logprobs"]["token_logprobs"] == pytest.approx(computed["logprobs"]["token_logprobs"], abs=1e-4)
        on_disk = (len(prompts[chosen]) - 1) // 4 * 4
        assert warm["usage"]["cached_tokens_details"] == {"device": 0, "host": 0, "disk": on_disk}
        assert two.http.get("/v1/cache").json()["prefixes"][0]["id"].startswith("0.")
