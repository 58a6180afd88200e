"""Two launchers that share the ranks of one service, and ranks that torchrun itself starts. All on this machine."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

import httpx2
import pytest

from moeserve.engine.curve import create_keys
from tests.support.forking import popen
from tests.support.service import (
    ROOT,
    Service,
    children_of,
    descendants,
    is_alive,
    read_of_process,
    service,
    wait_until,
)
from tests.support.tiny_checkpoint import write_tiny_checkpoint

EXPERTS, LAYERS, SHARDS = "--expert-parallel-size", "--pipeline-parallel-size", "--tensor-parallel-size"
PROMPTS = [[5 + n, 9, 30 + n, 7, 41, 12, 11, 50, 3 + n] * 5 for n in range(6)]


def texts_of(http: httpx2.Client) -> list[str]:
    texts = []
    for prompt in PROMPTS:
        body = {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
    return texts


def free_port() -> int:
    """A port below those that the system gives to connections, and soon to others."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("k") / "key"
    create_keys(path)
    return path


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with service(model, tmp_path_factory.mktemp("one")) as one:
        return texts_of(one.http)


class OtherNode:
    """`moeserve serve --node-rank 1`."""

    def __init__(self, model: Path, folder: Path, *arguments: str) -> None:
        self.run_root = folder / "run"
        self.run_root.mkdir()
        self.said = folder / "said.txt"
        with self.said.open("w") as said:
            self.process = popen(
                [sys.executable, "-m", "launcher.cli", "serve", str(model), "--node-rank", "1", *arguments],
                cwd=ROOT,
                env={**os.environ, "XDG_RUNTIME_DIR": str(self.run_root), "OMP_NUM_THREADS": "1"},
                stdout=said,
                stderr=said,
            )


@contextmanager
def two_nodes(
    model: Path, folder: Path, key: Path, *more: str, other_model: Path | None = None, way: str = EXPERTS
) -> Iterator[tuple[Service, OtherNode]]:
    """Node 0, not ready yet, and node 1. way: in which ranks share the model."""
    arguments = (*more, "--nnodes", "2", way, "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    arguments += ("--curve-key-file", str(key))
    (folder / "first" / "run").mkdir(parents=True)
    (folder / "other").mkdir()
    name = ("--served-model-name", "m", "--kv-cache-memory", "64MiB", "--engine-timeout", "6")
    first = Service(model, folder / "first" / "run", *name, *arguments)
    other = OtherNode(other_model or model, folder / "other", *arguments)
    try:
        yield first, other
    finally:
        for process in (first.process, other.process):
            process.kill()
            process.wait()
        first.http.close()
        assert first.process.stdout is not None
        first.process.stdout.close()


# Settings beside a way of two, and the ranks of each node.
ALONE, WITH_EXPERTS = ((), 1), ((EXPERTS, "2"), 2)


@pytest.mark.parametrize(("way", "more"), [(EXPERTS, ALONE), (LAYERS, ALONE), (SHARDS, ALONE), (LAYERS, WITH_EXPERTS)])
def test_two_nodes_give_the_texts_of_one_rank_and_end_cleanly(
    model: Path, key: Path, expected: list[str], tmp_path: Path, way: str, more: tuple[tuple[str, ...], int]
) -> None:
    settings, num_here = more
    with two_nodes(model, tmp_path, key, *settings, way=way) as (first, other):
        first.wait_until_ready()
        there = f"ranks {num_here} to {2 * num_here - 1}: computes for node 0"
        wait_until(lambda: there in other.said.read_text())
        assert texts_of(first.http) == expected
        # The ranks' copies, which have answered, and all others.
        processes = descendants(first.process.pid) | descendants(other.process.pid)
        assert len(ranks_below(first.process) | ranks_below(other.process)) == 4 * num_here
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 0
        assert other.process.wait(60) == 0
        assert first.leaves_nothing()
        assert not list(other.run_root.iterdir())
        wait_until(lambda: not any(map(is_alive, processes)))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_lost_node_ends_the_service_and_its_rank_is_named(
    model: Path, key: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with two_nodes(model, tmp_path, key, "--max-restarts", "0") as (first, other):
        first.wait_until_ready()
        wait_until(lambda: "computes for node 0" in other.said.read_text())
        processes = descendants(first.process.pid) | descendants(other.process.pid)
        events = first.stream(max_tokens=20_000)
        next(events)
        if number == signal.SIGKILL:
            other.process.kill()
        else:
            for pid in descendants(other.process.pid):
                os.kill(pid, signal.SIGSTOP)
        assert "error" in list(events)[-1]
        assert first.end() == 1
        other.process.wait(60)
        assert "Rank 1 (process" in first.errors.read_text()
        assert first.leaves_nothing()
        wait_until(lambda: not any(map(is_alive, processes)))


@pytest.mark.long
def test_a_lost_node_0_ends_the_others_with_a_sentence(model: Path, key: Path, tmp_path: Path) -> None:
    with two_nodes(model, tmp_path, key, "--max-restarts", "0") as (first, other):
        first.wait_until_ready()
        processes = descendants(first.process.pid) | descendants(other.process.pid)
        first.process.kill()
        assert other.process.wait(60) == 1
        assert "is gone: node 0 has ended or cannot be reached." in other.said.read_text()
        assert not list(other.run_root.iterdir())
        wait_until(lambda: not any(map(is_alive, processes)))


def ranks_below(node: subprocess.Popen[str]) -> set[int]:
    return {pid for pid in descendants(node.pid) if "RANK=" in read_of_process(pid, "environ")}


def serving_ranks(node: subprocess.Popen[str]) -> list[int]:
    """The processes that serve as ranks of a node: copies of the processes that have loaded their parts."""
    return sorted(pid for pid in ranks_below(node) if not descendants(pid))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "more"),
    [
        (EXPERTS, ALONE),
        (LAYERS, WITH_EXPERTS),
        *(pytest.param(way, ALONE, marks=pytest.mark.long) for way in (LAYERS, SHARDS)),
    ],
)
def test_a_lost_rank_of_any_node_is_a_pause_and_no_whole_start(
    model: Path, key: Path, expected: list[str], tmp_path: Path, way: str, more: tuple[tuple[str, ...], int]
) -> None:
    settings, num_here = more
    with two_nodes(model, tmp_path, key, *settings, way=way) as (first, other):
        first.wait_until_ready()
        wait_until(lambda: "computes for node 0" in other.said.read_text())
        loaded = [children_of(first.process.pid)["worker"], children_of(other.process.pid)["worker"]]
        whole = [event["choices"] for event in first.stream(max_tokens=200, temperature=0)]
        for node, place in product((other.process, first.process), range(num_here)):
            events = first.stream(max_tokens=200, temperature=0)
            begun = next(events)
            os.kill(serving_ranks(node)[place], signal.SIGKILL)
            assert [event["choices"] for event in (begun, *events)] == whole
        assert texts_of(first.http) == expected
        assert loaded == [children_of(first.process.pid)["worker"], children_of(other.process.pid)["worker"]]
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 0
        assert other.process.wait(60) == 0
        assert first.leaves_nothing()
        assert not list(other.run_root.iterdir())


@pytest.mark.long
def test_a_group_of_a_node_that_is_lost_starts_again_with_the_other(
    model: Path, key: Path, expected: list[str], tmp_path: Path
) -> None:
    with two_nodes(model, tmp_path, key) as (first, other):
        first.wait_until_ready()
        wait_until(lambda: "computes for node 0" in other.said.read_text())
        for node in (first.process, other.process):
            served = first.errors.read_text().count("serves again")
            os.kill(children_of(node.pid)["worker"], signal.SIGKILL)
            wait_until(lambda so_far=served: first.errors.read_text().count("serves again") > so_far, timeout=240)
            assert texts_of(first.http) == expected


@pytest.mark.long
def test_a_node_with_another_model_is_refused(
    model: Path, key: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    another = write_tiny_checkpoint(tmp_path_factory.mktemp("another"))
    (another / "generation_config.json").write_text('{"temperature": 0.5}')
    with two_nodes(model, tmp_path, key, other_model=another) as (first, other):
        assert first.end() == 1
        assert other.process.wait(60) == 1
        for said in (first.errors.read_text(), other.said.read_text()):
            assert "cannot take part: its model differs from that of rank 0" in said


@contextmanager
def torchrun(*arguments: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process of torchrun over `launcher.worker`, and what it says."""
    folder.mkdir()
    said = folder / "said.txt"
    with said.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            cwd=ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
            stdout=file,
            stderr=file,
        )
    try:
        yield process, said
    finally:
        process.kill()
        process.wait()


def client_of(said: Path, process: subprocess.Popen[bytes]) -> httpx2.Client:
    wait_until(lambda: process.poll() is not None or "ready on" in said.read_text(), timeout=240)
    found = re.search(r"ready on (http://\S+)", said.read_text())
    assert found is not None, said.read_text()
    return httpx2.Client(base_url=found[1], timeout=60)


@pytest.mark.parametrize("way", [(), (LAYERS, "2"), (SHARDS, "2")])
def test_torchrun_starts_ranks_that_give_the_texts_of_one(
    model: Path, expected: list[str], tmp_path: Path, way: tuple[str, ...]
) -> None:
    worker = ("-m", "launcher.worker", str(model), "--port", "0", "--served-model-name", "m")
    limits = ("--kv-cache-memory", "64MiB", *way)
    with torchrun("--standalone", "--nproc-per-node=2", *worker, *limits, folder=tmp_path / "t") as (process, said):
        with client_of(said, process) as http:
            assert texts_of(http) == expected
        processes = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        wait_until(lambda: not any(map(is_alive, processes)))
        assert [path.name for path in said.parent.iterdir()] == [said.name]


@pytest.mark.long
def test_torchrun_on_two_nodes_needs_the_key_and_gives_the_texts_of_one(
    model: Path, key: Path, expected: list[str], tmp_path: Path
) -> None:
    nodes = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=static", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    worker = ("-m", "launcher.worker", str(model), "--port", "0", "--served-model-name", "m", "--engine-timeout", "6")
    with torchrun(*nodes, "--node-rank=0", *worker, folder=tmp_path / "0") as (process, said):
        with torchrun(*nodes, "--node-rank=1", *worker, folder=tmp_path / "1") as (other, _):
            assert process.wait(60) != 0
            other.wait(60)
        assert "--curve-key-file FILE" in said.read_text()
    worker += ("--kv-cache-memory", "64MiB", "--curve-key-file", str(key))
    with (
        torchrun(*nodes, "--node-rank=0", *worker, folder=tmp_path / "a") as (process, said),
        torchrun(*nodes, "--node-rank=1", *worker, folder=tmp_path / "b") as (other, _),
    ):
        with client_of(said, process) as http:
            assert texts_of(http) == expected
        processes = descendants(process.pid) | descendants(other.pid)
        other.kill()
        process.wait(60)
        assert "Rank 1 (process" in said.read_text()
        wait_until(lambda: not any(map(is_alive, processes)))
