"""Layers over GPUs, and shards of each layer; the devices are CPUs under Triton's interpreter, over gloo."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.test_expert_parallel import ranks_of
from tests.e2e.test_expert_parallel_gpu import SMALL, complete_all
from tests.support.saved_models import saved_model
from tests.support.service import ROOT, is_alive, service, wait_until
from tests.support.slot_bytes import slots_on_gpu
from tests.support.tiny_model import write_model_dir

WAYS = ("--pipeline-parallel-size", "--tensor-parallel-size")
GPUS = ("--device", "cuda", "--engine-timeout", "20", "--max-restarts", "0")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("made for the interpreter")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/support/interpreted_gpu:{ROOT}")


# With experts and without; layers with a window and sinks, of which a stage may have one; norms over all heads.
@pytest.mark.kernel_change
@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3", "gpt_oss", pytest.param("olmoe", marks=pytest.mark.long)])
@pytest.mark.parametrize("way", WAYS)
def test_two_gpus_that_share_layers_say_what_a_cpu_says(case: str, way: str, tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    write_model_dir(model)
    saved_model(case, model)
    with service(model, tmp_path / "one", *SMALL) as one:
        expected = complete_all(one)
    with service(model, tmp_path / "two", *SMALL, *GPUS, way, "2") as two:
        for _ in range(2):
            assert complete_all(two) == expected
        pids = ranks_of(two)
        two.process.send_signal(signal.SIGTERM)
        assert two.end() == 0
        assert two.leaves_nothing()
        wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.kernel_change
@pytest.mark.parametrize("way", WAYS)
def test_a_gpus_rank_that_dies_in_the_middle_of_decodes_is_named(way: str, tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    write_model_dir(model)
    saved_model("qwen3", model)
    with service(model, tmp_path / "two", *SMALL, *GPUS, way, "2") as two:
        pids = ranks_of(two)
        events = two.stream(max_tokens=20)
        next(events)
        os.kill(pids[1], signal.SIGKILL)
        assert "error" in list(events)[-1]
        assert two.end() == 1
        assert f"Rank 1 (process {pids[1]})" in two.errors.read_text()
        assert two.leaves_nothing()


@pytest.mark.kernel_change
def test_shards_with_few_slots_for_experts_and_kv_on_disk_say_what_a_cpu_says(tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    write_model_dir(model)
    saved_model("qwen3_moe", model)
    with service(model, tmp_path / "one", *SMALL) as one:
        expected = complete_all(one)
    tiers = ("--expert-memory", str(slots_on_gpu(model, 3)), "--kv-disk-path", str(tmp_path / "kv"))
    for life in ("0", "1"):
        with service(model, tmp_path / life, *SMALL, *GPUS, "--tensor-parallel-size", "2", *tiers) as two:
            assert complete_all(two) == expected
