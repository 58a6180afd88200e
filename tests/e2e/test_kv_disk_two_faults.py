"""Two faults at once in a folder that services share: one is killed while it writes, and what it wrote is damaged."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.forking import popen
from tests.support.service import ROOT, Service, descendants, is_alive, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint

PROMPTS = [[3 + number, *(3 + (number * 11 + i * 7) % 50 for i in range(400))] for number in range(6)]
SIGKILL = 9


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """The bits of each prompt's answer without a disk."""
    with service(model, tmp_path_factory.mktemp("plain")) as running:
        return [ask(running, prompt) for prompt in PROMPTS]


def ask(running: Service, prompt: list[int]) -> list[float]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    answer = running.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: list[float] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    return found


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if re.fullmatch(r"[0-9a-f]{32}", path.name) and path.is_file())


def tear(folder: Path) -> None:
    for path in files_of(folder)[::2]:
        os.truncate(path, path.stat().st_size // 2)


def flip(folder: Path) -> None:
    for path in files_of(folder)[::2]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)


def swap(folder: Path) -> None:
    """Give each second file the content of another one, whole and with its own checksum."""
    files = files_of(folder)
    for path, other in zip(files[::2], files[1::2], strict=False):
        shutil.copy(other, path)


def lose(folder: Path) -> None:
    for path in files_of(folder)[::2]:
        path.unlink()


def block(folder: Path) -> None:
    """Let nothing more be written or read: a file stands in the place of each folder of blocks."""
    for path in {file.parent for file in files_of(folder)}:
        shutil.rmtree(path)
        path.touch()


def link(folder: Path) -> None:
    """Let links to other blocks, and pipes that nobody writes to, stand in the place of files, and link all folders."""
    files = files_of(folder)
    for number, path in enumerate(files[::2]):
        path.unlink()
        if number % 2:
            os.mkfifo(path)
        else:
            path.symlink_to(files[1])
    for namespace in {file.parent for file in files}:
        (namespace.parent / f"{'0' * 32}.{namespace.name[:32]}").symlink_to(namespace)


def set_clock_back(folder: Path) -> None:
    """Let all files be from days to come."""
    for path in files_of(folder):
        os.utime(path, (path.stat().st_mtime + 1e6,) * 2)


def fill(folder: Path) -> None:
    """Leave no room on the disk."""
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def kill_while_it_writes(running: Service, folder: Path) -> None:
    """Ask for all prompts at once, and end all processes of the service once it has begun to write them."""

    def ask_in_vain(prompt: list[int]) -> None:
        with suppress(Exception):
            ask(running, prompt)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for prompt in PROMPTS:
            pool.submit(ask_in_vain, prompt)
        wait_until(lambda: len(files_of(folder)) >= len(PROMPTS))
        everyone = running.process.pid, *descendants(running.process.pid)
        for pid in everyone:
            with suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)
    running.process.wait()
    # None is just ending a write.
    wait_until(lambda: not any(map(is_alive, everyone)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB, where one may be made."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def answers_are(
    expected: list[list[float]], model: Path, tmp_path: Path, kv: Path, damage: Callable[[Path], Any]
) -> None:
    """Kill one of two services, damage its files; the other one, and the first one's next life, answer right."""
    settings = ("--kv-disk-path", str(kv), "--response-store", str(tmp_path / "store"))
    with ExitStack() as stack:
        victim, survivor = (stack.enter_context(service(model, tmp_path / name, *settings)) for name in "ab")
        kill_while_it_writes(victim, kv)
        damage(kv)
        assert [ask(survivor, prompt) for prompt in PROMPTS] == expected
        again = stack.enter_context(service(model, tmp_path / "c", *settings))
        assert [ask(again, prompt) for prompt in PROMPTS] == expected
        assert [ask(survivor, prompt) for prompt in PROMPTS] == expected


@pytest.mark.parametrize(
    "damage",
    [flip, block, link, *(pytest.param(one, marks=pytest.mark.long) for one in (tear, swap, lose, set_clock_back))],
)
def test_a_killed_service_and_damaged_files_cost_others_nothing_but_time(
    expected: list[list[float]], model: Path, tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    answers_are(expected, model, tmp_path, tmp_path / "kv", damage)


@pytest.mark.parametrize("damage", [flip, pytest.param(tear, marks=pytest.mark.long)])
def test_so_it_is_on_a_full_disk_where_services_start_too(
    expected: list[list[float]], model: Path, tmp_path: Path, small_disk: Path, damage: Callable[[Path], Any]
) -> None:
    def damage_and_fill(folder: Path) -> None:
        damage(folder)
        fill(small_disk)

    answers_are(expected, model, tmp_path, small_disk / "kv", damage_and_fill)


def test_a_disk_that_has_become_read_only_is_read_where_services_start_too(
    expected: list[list[float]], model: Path, tmp_path: Path, small_disk: Path
) -> None:
    def protect(folder: Path) -> None:
        lose(folder)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    answers_are(expected, model, tmp_path, small_disk / "kv", protect)


def test_services_of_other_weights_share_a_folder_and_find_nothing_of_each_other(
    expected: list[list[float]], model: Path, tmp_path: Path
) -> None:
    other, folder = write_tiny_checkpoint(tmp_path / "other", seed=1), tmp_path / "kv"
    settings = ("--kv-disk-path", str(folder))
    with ExitStack() as stack:
        victim = stack.enter_context(service(model, tmp_path / "a", *settings))
        changed = stack.enter_context(service(other, tmp_path / "b", *settings))
        kill_while_it_writes(victim, folder)
        tear(folder)
        answers = [ask(changed, prompt) for prompt in PROMPTS]
        assert all(one != two for one, two in zip(answers, expected, strict=True))
        again = stack.enter_context(service(model, tmp_path / "c", *settings))
        assert [ask(again, prompt) for prompt in PROMPTS] == expected
        assert [ask(changed, prompt) for prompt in PROMPTS] == answers
    # The same path has other weights now.
    shutil.copy(model / "model.safetensors", other)
    with service(other, tmp_path / "d", *settings) as running:
        assert [ask(running, prompt) for prompt in PROMPTS] == expected


def test_what_is_damaged_is_named(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with service(model, tmp_path, "--kv-disk-path", str(folder)) as running:
        kill_while_it_writes(running, folder)
    flip(folder)
    command = [sys.executable, "-m", "launcher.cli", "cache", "verify", str(folder)]
    with popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        said, _ = program.communicate()
    assert program.returncode != 0
    assert "its checksum is wrong" in said
