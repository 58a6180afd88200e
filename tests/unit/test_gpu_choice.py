"""`--device auto`: what makes it take a GPU, what keeps it from one, and what is remembered. No GPU takes part."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import launcher.gpu_choice
from launcher.gpu_choice import Choice, GpuHangs, choose, remember, remembered, run_probe
from launcher.gpu_probe import Checked, Fit, Found, Line
from moeserve.config import ServeConfig

CARD = ["NVIDIA GeForce RTX 4090"]
ON_GPU = ServeConfig(device="cuda", block_size=64)
PASSED = [Found("", 2), Checked("norms", 1.0, ""), Checked("prompts", 2.0, ""), Fit("")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))


class Probe:
    """Tells given lines, and keeps what it was asked."""

    def __init__(self, *lines: Line, hangs: bool = False) -> None:
        self.lines, self.hangs, self.asked = lines, hangs, list[bool]()

    def __call__(self, arguments: list[str]) -> Iterator[Line]:
        self.asked.append("--check" in arguments)
        yield from self.lines
        if self.hangs:
            raise GpuHangs("it told nothing for 180 s while it was checked")


def chosen(probe: Probe, names: list[str] = CARD, config: ServeConfig = ON_GPU) -> Choice:
    return choose(names, Path("model"), config, lambda *_: None, probe)


def test_a_gpu_that_passes_is_taken_and_checked_once_for_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(*PASSED)
    assert chosen(probe) == Choice("cuda", "NVIDIA GeForce RTX 4090 passed its 2 checks in 3 s.")
    assert chosen(Probe(Found("", 0), Fit(""))) == Choice("cuda")
    assert chosen(again := Probe(*PASSED)).device == "cuda"
    assert (probe.asked, again.asked) == ([True], [False])
    monkeypatch.setattr(launcher.gpu_choice, "VERSION", "another")
    assert remembered(CARD) is None
    assert remembered([*CARD, *CARD]) is None


def test_a_gpu_that_fails_is_not_taken_now_nor_at_the_next_start() -> None:
    lines = [
        Found("", 2),
        Checked("norms", 1.0, "relative error 1e-1, 2e-02 allowed"),
        Checked("prompts", 1, ""),
        Fit(""),
    ]
    first = chosen(Probe(*lines))
    assert first.device == "cpu"
    assert first.sentence == (
        "NVIDIA GeForce RTX 4090 is not used: it failed 1 checks, the first of norms: relative error 1e-1, 2e-02 "
        "allowed (moeserve doctor --gpu shows all)."
    )
    assert chosen(Probe(Found("", 0), Fit(""))) == first


def test_a_build_of_torch_without_cuda_a_model_that_does_not_fit_and_a_hang_are_said_in_a_sentence() -> None:
    absence = "this build of torch has no CUDA; make venv TORCH=cuda installs one that has"
    assert chosen(Probe(Found(absence, 0))).sentence == f"NVIDIA GeForce RTX 4090 is not used: {absence}."
    obstacle = "The weights take 56.9 GiB of a GPU; 21.0 GiB can be used."
    assert chosen(Probe(*PASSED[:-1], Fit(obstacle))) == Choice("cpu", f"{CARD[0]} is not used: {obstacle}")
    hung = chosen(Probe(Found("", 2), hangs=True))
    assert hung == Choice("cpu", f"{CARD[0]} is not used: it told nothing for 180 s while it was checked.")


def test_a_check_that_was_cut_off_is_made_again() -> None:
    chosen(Probe(Found("", 2), Checked("norms", 1.0, ""), hangs=True))
    assert remembered(CARD) is None


def test_without_a_card_or_with_several_ranks_nothing_is_asked() -> None:
    probe = Probe(*PASSED)
    assert chosen(probe, names=[]) == Choice("cpu")
    assert chosen(probe, config=ServeConfig(device="cuda", expert_parallel_size=2)) == Choice("cpu")
    assert chosen(probe, config=ServeConfig(device="cuda", pipeline_parallel_size=2)) == Choice("cpu")
    assert probe.asked == []


def test_a_cache_that_is_damaged_or_cannot_be_written_means_another_check(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder belongs")
    remember(CARD, [])
    assert remembered(CARD) is None
    (tmp_path / "cache").unlink()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "gpu-checks.json").write_text("[")
    assert remembered(CARD) is None
    remember(CARD, ["norms: wrong"])
    assert remembered(CARD) == ["norms: wrong"]


def test_a_probe_that_crashes_or_stays_silent_ends_with_a_clause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(fake))

    def probed(script: str) -> list[Line]:
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o700)
        return list(run_probe([]))

    assert probed('echo \'{"type":"Fit","obstacle":"too large"}\'') == [Fit("too large")]
    with pytest.raises(GpuHangs, match=r"ended with Illegal instruction in a kernel$"):
        probed("echo Illegal instruction in a kernel >&2; exit 3")
    advice = "For debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    with pytest.raises(GpuHangs, match=r"ended with torch.AcceleratorError: CUDA error: out of memory$"):
        probed(f"printf 'Traceback\\ntorch.AcceleratorError: CUDA error: out of memory\\n{advice}\\n' >&2; exit 1")
    with pytest.raises(GpuHangs, match="ended with code 4"):
        probed("exit 4")
    monkeypatch.setattr(launcher.gpu_choice, "_SILENT_SECONDS", 0.2)
    with pytest.raises(GpuHangs, match="it told nothing for 0 s"):
        probed("exec tail -f /dev/null")
