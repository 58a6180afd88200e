"""The check that a GPU passes before `--device auto` takes it: in the interpreter it passes, and wrong numbers fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

NAMES = ("qwen3_moe", "gpt_oss", "qwen3_next")
MODELS = [
    pytest.param(name, marks=pytest.mark.kernel_change if name == NAMES[0] else pytest.mark.long) for name in NAMES
]


@pytest.fixture
def gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The GPU, or the interpreter in its place."""
    pytest.importorskip("structlog")  # A machine that is lent to test kernels has nothing that serves.
    if device.type != "cuda":
        monkeypatch.setattr("moeserve.engine.memory_plan.cuda_absence", lambda _: None)
        for module in ("moeserve.engine.assemble", "moeserve.engine.gpu_check.check"):
            monkeypatch.setattr(f"{module}.current_gpu", lambda: device)
    return device


@pytest.mark.kernel_change
def test_kernels_agree_with_their_references(gpu: torch.device) -> None:
    from moeserve.engine.gpu_check.check import run_checks

    found = list(run_checks(lambda name: "tiny" not in name))
    assert len(found) == 9
    assert [check.name for check in found if check.fault] == []


@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_model_answers_as_was_recorded(name: str, gpu: torch.device) -> None:
    from moeserve.engine.gpu_check.check import run_checks

    (check,) = run_checks(lambda checked: checked.endswith(f"tiny {name}"))
    assert check.fault == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_still_answers_as_was_recorded(name: str, tmp_path: Path) -> None:
    pytest.importorskip("structlog")
    from moeserve.engine.gpu_check import models

    assert set(models.CONFIGS) == set(NAMES)
    folder = models.write_model(models.CONFIGS[name], tmp_path)
    assert models.answers(folder, "cpu") == models.expected_tokens()[name]


def test_wrong_numbers_other_tokens_and_faults_are_told_and_the_next_check_is_made(
    gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moeserve.engine.gpu_check import kernels, models
    from moeserve.engine.gpu_check.check import run_checks

    def broken() -> float:
        raise ZeroDivisionError("no kernel image")

    compared = [("norms", lambda: 0.5), ("experts", broken), ("prompts", lambda: kernels.TOLERANCE)]
    monkeypatch.setattr("moeserve.engine.gpu_check.check.comparisons", lambda _: iter(compared))
    monkeypatch.setattr("moeserve.engine.gpu_check.models.answers", lambda *_: [[1, 2]])
    other = {name: [[1, 2] if name == "gpt_oss" else [2, 1]] for name in models.CONFIGS}
    (tmp_path / "expected").write_text(json.dumps(other))
    monkeypatch.setattr(models, "EXPECTED", tmp_path / "expected")
    faults = {check.name: check.fault for check in run_checks()}
    assert faults == {
        "norms": "relative error 5.0e-01, 2e-02 allowed",
        "experts": "ZeroDivisionError: no kernel image",
        "prompts": "",
        "tokens of a tiny qwen3_moe": "tokens [[1, 2]] instead of [[2, 1]]",
        "tokens of a tiny gpt_oss": "",
        "tokens of a tiny qwen3_next": "tokens [[1, 2]] instead of [[2, 1]]",
    }
