"""Blocks that are fetched while they are computed, over real sockets: a prompt grows, ends, or its service dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from moeserve.engine.kv_disk.copier import BlockMemory
from moeserve.engine.kv_transfer.fetcher import BlockFetcher
from moeserve.engine.kv_transfer.server import BlockServer
from moeserve.engine.ranks.meeting import Gatekeeper, create_keys, load_keys
from moeserve.kv_transfer import KvTicket
from moeserve.scheduling.kv_transfer import FetchJob, FetchResult
from radix_cache import BlockCopy

NUM_BLOCKS, BYTES, HEADS = 40, 8, 2
WAIT_S = 30.0


def memory_of(*, is_empty: bool, num_bytes: int = BYTES) -> BlockMemory:
    shape = (HEADS, NUM_BLOCKS, num_bytes)
    numbers = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    return [np.zeros(shape, np.uint8) if is_empty else numbers + array for array in range(3)]


def filled(memory: BlockMemory) -> int:
    """Count the leading blocks that have come."""
    same = [
        np.array_equal(mine[:, block], theirs[:, NUM_BLOCKS - 1 - block])
        for block in range(NUM_BLOCKS)
        for mine, theirs in [(np.stack(memory, 2), np.stack(memory_of(is_empty=False), 2))]
    ]
    return same.index(False) if False in same else NUM_BLOCKS


def hold(pipe: Connection, key: Path, num_bytes: int) -> None:
    """Hold the prompt's blocks, which lie in memory in the reverse order; the pipe says how many there are by now."""
    keys, sockets = load_keys(key, ""), zmq.Context[Any]()
    held: list[int] | None = []
    gatekeeper = Gatekeeper(sockets, keys)
    server = BlockServer(sockets, keys, "tcp://127.0.0.1:*", memory_of(is_empty=False, num_bytes=num_bytes))
    server.serve(lambda _: held, lambda _: held is not None and len(held) < NUM_BLOCKS)
    pipe.send(server.port)
    while (count := pipe.recv()) >= 0:
        held = [NUM_BLOCKS - 1 - number for number in range(count)] if count else None
        server.look_again()
    server.stop()
    gatekeeper.close()


class Pair:
    """A process that holds blocks, and a fetch of all of them into `memory`."""

    def __init__(self, folder: Path, ends: ExitStack, num_bytes: int = BYTES) -> None:
        key = folder / "kv.key"
        create_keys(key)
        context = get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=hold, args=(there, key, num_bytes), daemon=True)
        self.process.start()
        ends.callback(self.process.join)
        ends.callback(self.end)
        there.close()
        self.memory = memory_of(is_empty=True)
        self.fetcher = BlockFetcher(zmq.Context(), load_keys(key, ""), self.memory)
        ends.callback(self.fetcher.close)
        ticket = KvTicket(request_id="t", host="127.0.0.1", port=self.pipe.recv())
        self.job = FetchJob(ticket, 0, [BlockCopy(block, b"", "", block, b"") for block in range(NUM_BLOCKS)])
        self.fetcher.start(self.job)

    def end(self) -> None:
        if self.process.is_alive():
            self.pipe.send(-1)

    def grow(self, count: int) -> None:
        self.pipe.send(count)

    def wait_for(self, count: int) -> None:
        """Wait until as many blocks have come, and no end."""
        for _ in range(6000):
            if filled(self.memory) == count:
                return
            assert self.fetcher.take(0.005) == []
        raise AssertionError(f"{filled(self.memory)} blocks have come")

    def result(self) -> FetchResult:
        (result,) = self.fetcher.take(WAIT_S)
        return result


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as ends:
        yield Pair(tmp_path, ends)


def test_blocks_come_while_the_prompt_grows(pair: Pair) -> None:
    for count in (3, 4, 20, 37):
        pair.grow(count)
        pair.wait_for(count)
    pair.grow(NUM_BLOCKS)
    result = pair.result()
    assert (result.num_filled, result.failure) == (NUM_BLOCKS, None)
    assert filled(pair.memory) == NUM_BLOCKS


def test_a_service_that_dies_amid_a_prompt_leaves_the_blocks_that_have_come(pair: Pair) -> None:
    pair.grow(21)
    pair.wait_for(21)
    assert pair.process.pid is not None
    os.kill(pair.process.pid, signal.SIGKILL)
    result = pair.result()
    assert (result.num_filled, result.failure) == (21, "gone")


def test_a_prompt_that_is_given_up_amid_its_computing_ends_the_fetch(pair: Pair) -> None:
    pair.grow(5)
    pair.wait_for(5)
    pair.grow(0)
    result = pair.result()
    assert (result.num_filled, result.failure) == (5, "lease")


def test_a_fetch_that_nobody_wants_any_more_ends(pair: Pair) -> None:
    pair.grow(5)
    pair.wait_for(5)
    pair.job.is_cancelled = True
    result = pair.result()
    assert (result.num_filled, result.failure) == (5, None)


def test_blocks_of_another_size_are_not_taken(tmp_path: Path) -> None:
    with ExitStack() as ends:
        pair = Pair(tmp_path, ends, num_bytes=2 * BYTES)
        pair.grow(5)
        result = pair.result()
        assert (result.num_filled, result.failure) == (0, "damaged")
