"""Programs forked from a server are what an interpreter started anew would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.forking import popen

# Tells what it was given, and ends as its argument says.
PROGRAM = """
import json, os, signal, sys
said = sorted(int(name) for name in os.listdir("/proc/self/fd"))
told = {"argv": sys.argv[1:], "folder": os.getcwd(), "word": os.environ.get("WORD"), "parent": os.getppid()}
told["descriptors"] = [number for number in said if number > 2 and os.path.exists(f"/proc/self/fd/{number}")]
for number in told["descriptors"]:
    os.write(number, f"under {number}".encode())
print(json.dumps(told))
sys.stdout.flush()
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(sys.argv[1])
"""


@pytest.fixture(scope="module")
def python_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("program")
    (folder / "told.py").write_text(PROGRAM)
    return f"{folder}:{Path(__file__).resolve().parents[2]}"


def run(python_path: str, ending: str, folder: Path, *pass_fds: int) -> tuple[dict[str, object], int, str]:
    command = [sys.executable, "-m", "told", ending]
    environment = {**os.environ, "PYTHONPATH": python_path, "WORD": "a word"}
    program = popen(
        command,
        torch=False,
        cwd=folder,
        env=environment,
        pass_fds=pass_fds,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, errors = program.communicate(timeout=60)
    return json.loads(out), program.returncode, errors


def test_a_program_has_its_arguments_its_folder_its_environment_and_the_descriptors_it_is_given(
    python_path: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    pipes = [os.pipe() for _ in range(3)]
    # The higher one first, and one between them that is not given.
    given = [pipes[2][1], pipes[0][1]]
    told, status, errors = run(python_path, "a last word", tmp_path / "folder", *given)
    for _, writing in pipes:
        os.close(writing)
    heard = [os.read(reading, 100).decode() for reading, _ in pipes]
    for reading, _ in pipes:
        os.close(reading)
    assert (told["argv"], told["folder"], told["word"]) == (["a last word"], str(tmp_path / "folder"), "a word")
    assert told["descriptors"] == sorted(given)
    assert heard == [f"under {given[1]}", "", f"under {given[0]}"]
    assert (status, errors) == (1, "a last word\n")


def test_a_signal_that_ends_a_program_is_told(python_path: str, tmp_path: Path) -> None:
    assert run(python_path, "killed", tmp_path)[1] == -signal.SIGKILL


def test_threads_that_need_a_server_at_once_have_the_same(python_path: str, tmp_path: Path) -> None:
    parents: list[object] = []
    own = f"{python_path}:{tmp_path}"
    threads = [threading.Thread(target=lambda: parents.append(run(own, "0", tmp_path)[0]["parent"])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(parents) == 3
    assert len(set(parents)) == 1
