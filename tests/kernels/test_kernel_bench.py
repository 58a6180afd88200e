"""`python -m benchmarks.kernels` where there is no GPU: one sentence, or correctness alone."""

import math

import pytest
import torch

from benchmarks.kernels.__main__ import NO_GPU, main
from benchmarks.kernels.measure import WrongResultError, checked

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, capsys):
    assert main(["--out-dir", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == NO_GPU + "\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.kernel_change
def test_interpreted_it_checks_every_family(capsys):
    assert main(["--interpret"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 27
    assert all(line.startswith("ok ") for line in lines)


def test_a_check_that_cannot_run_is_told_of_and_does_not_pass(capsys):
    def fails():
        raise RuntimeError("out of\nresource")

    def races():
        raise WrongResultError("two runs differ")

    found = [checked("norm", fails), checked("norm", races), checked("norm", lambda: math.nan)]
    assert [check.name for check in found] == ["norm (RuntimeError: out of resource)", "norm (two runs differ)", "norm"]
    assert not any(check.passed for check in found)
    assert "Traceback" in capsys.readouterr().err
