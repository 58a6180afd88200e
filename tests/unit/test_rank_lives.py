"""Ranks that serve in copies, as real processes: one end and one beginning for all, and the rank that died is named."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from launcher.rank_group import RankLives

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
Report = dict[str, Any]


class Node:
    """Two ranks of a node, and the supervisor above."""

    def __init__(self) -> None:
        self.said: queue.Queue[Report] = queue.Queue()
        reading, self._orders = os.pipe()
        self._lives = RankLives(2, reading, lambda status: self.said.put(msgspec.to_builtins(status)))
        self._lives.start()
        _, reports, _, orders = self._lives.arguments
        self._reports = int(reports)
        self.orders = [int(fd) for fd in orders.split(",")]
        self.copies: list[subprocess.Popen[bytes]] = []

    def order(self, line: str) -> None:
        os.write(self._orders, line.encode())

    def report(self, event: str, rank: int, **fields: int) -> None:
        os.write(self._reports, msgspec.json.encode({"event": event, "rank": rank, **fields}) + b"\n")

    def fork(self) -> None:
        self.copies = [subprocess.Popen(SLEEP) for _ in range(2)]
        for rank, copy in enumerate(self.copies):
            self.report("forked", rank, pid=copy.pid)
            assert self.said.get(timeout=60) == {"event": "forked", "rank": rank, "pid": copy.pid}

    def end(self, rank: int) -> Report:
        """Reap a copy that has ended, or is about to, and report it."""
        copy = self.copies[rank]
        code = copy.wait(60)
        self.report("ended", rank, pid=copy.pid, code=code)
        return {"event": "ended", "rank": rank, "pid": copy.pid, "code": code}


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    for copy in made.copies:
        copy.kill()
        copy.wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_of_one_rank_ends_all_and_names_it(node: Node, rank: int) -> None:
    node.fork()
    node.copies[rank].kill()
    first = node.end(rank)
    sentence = f"Rank {rank} (process {first['pid']}) was ended by SIGKILL (often: out of memory)."
    assert node.said.get(timeout=60) == {
        "event": "error",
        "message": sentence,
        "code": -signal.SIGKILL,
        "of_settings": False,
    }
    # Nobody but `RankLives` ends the other one.
    node.end(1 - rank)
    assert node.said.get(timeout=60) == first


def test_a_rank_that_ends_because_of_another_does_not_hide_it(node: Node) -> None:
    node.fork()
    node.report("ended", 1, pid=node.copies[1].pid, code=0)
    node.copies[0].kill()
    node.end(0)
    assert "Rank 0" in node.said.get(timeout=60)["message"]
    assert node.said.get(timeout=60) == {"event": "ended", "rank": 1, "pid": node.copies[1].pid, "code": 0}


def test_an_order_begins_a_life_of_every_rank(node: Node) -> None:
    for number in range(2):
        node.order(f"context {number}\n")
        assert [os.read(fd, 100) for fd in node.orders] == [f"context {number}\n".encode()] * 2
        node.fork()
        node.copies[0].kill()
        for rank in range(2):
            node.end(rank)
        assert [node.said.get(timeout=60)["event"] for _ in range(2)] == ["error", "ended"]


def test_other_reports_pass_through(node: Node) -> None:
    node.report("met", 1, incarnation=7)
    assert node.said.get(timeout=60) == {"event": "met", "incarnation": 7}
