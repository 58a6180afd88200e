"""The driver that proves a service on a GPU meets no error of its own: it runs here in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_serve.__main__ import main
from benchmarks.gpu_serve.stages import STAGES
from tests.support.forking import popen


@pytest.mark.kernel_change
@pytest.mark.timeout(900)
def test_every_stage_of_the_driver_passes_in_the_interpreter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--interpret", "--out-dir", str(tmp_path), "--time-limit", "900"], popen)
    table = (tmp_path / "serve-interpreter.md").read_text()
    assert code == 0, table
    assert capsys.readouterr().out.count("passed") == len(STAGES)
    assert "| texts as with all resident | 2 of 2 |" in table


def test_the_driver_says_in_a_sentence_that_no_gpu_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absence = "this build of torch has no CUDA; make venv TORCH=cuda installs one that has"
    monkeypatch.setattr("benchmarks.gpu_serve.__main__.cuda_absence", lambda _: absence)
    assert main(["--out-dir", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"Error: {absence}.\n"
    assert not (tmp_path / "out").exists()
