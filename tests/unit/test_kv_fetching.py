"""Blocks that are fetched over real sockets: all come, the lease ends, or a service dies amid them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from moeserve.engine.curve import Gatekeeper, create_keys, load_keys
from moeserve.engine.kv.disk.copier import BlockMemory
from moeserve.engine.kv.transfer.fetcher import BlockFetcher, SilentServices
from moeserve.engine.kv.transfer.messages import BLOCK, GET, NONE, pack_number
from moeserve.engine.kv.transfer.server import BlockServer
from moeserve.kv_transfer import KvTicket
from moeserve.scheduling.arrivals import Result
from moeserve.scheduling.kv_transfer import FetchJob
from radix_cache import BlockCopy

NUM_BLOCKS, BYTES, HEADS, NUM_ARRAYS = 40, 8, 2, 20
WAIT_S = 30.0


def memory_of(*, is_empty: bool, num_bytes: int = BYTES) -> BlockMemory:
    shape = (HEADS, NUM_BLOCKS, num_bytes)
    numbers = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    return [np.zeros(shape, np.uint8) if is_empty else numbers + np.uint8(array) for array in range(NUM_ARRAYS)]


def filled(memory: BlockMemory) -> int:
    """Count the leading blocks that have come."""
    theirs = memory_of(is_empty=False)
    for block in range(NUM_BLOCKS):
        for one, other in zip(memory, theirs, strict=True):
            if not np.array_equal(one[:, block], other[:, place_of(block)]):
                return block
    return NUM_BLOCKS


def place_of(number: int) -> int:
    """Return the block of memory that holds a block of the prompt: they lie in the reverse order."""
    return NUM_BLOCKS - 1 - number


class Prompt:
    """Blocks of which the server may send `count` before it is held up; then, None while nobody holds them."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._count, self._is_held = 0, True
        self._num_asked = 0  # the server looks at the blocks before and after it loads each

    def allow(self, count: int, *, is_held: bool) -> None:
        with self._state:
            self._count, self._is_held = count, is_held
            self._state.notify()

    def blocks(self, _: str) -> list[int] | None:
        with self._state:
            self._state.wait_for(lambda: self._num_asked < 2 * self._count or not self._is_held)
            self._num_asked += 1
            return [place_of(number) for number in range(NUM_BLOCKS)] if self._is_held else None


def hold(pipe: Connection, key: Path, num_bytes: int) -> None:
    """Hold a prompt's blocks. What comes through the pipe is allowed; None ends it."""
    keys, sockets, prompt = load_keys(key, ""), zmq.Context[Any](), Prompt()
    gatekeeper = Gatekeeper(sockets, keys)
    server = BlockServer(sockets, keys, "tcp://127.0.0.1:*", memory_of(is_empty=False, num_bytes=num_bytes))
    server.serve(prompt.blocks)
    pipe.send(server.port)
    while (allowed := pipe.recv()) is not None:
        count, is_held = allowed
        prompt.allow(count, is_held=is_held)
    prompt.allow(0, is_held=False)
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
            self.pipe.send(None)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def allow(self, count: int, *, is_held: bool = True) -> None:
        """Let the holder send its first blocks, or all know that it holds them no more."""
        self.pipe.send((count, is_held))

    def wait_for(self, count: int) -> None:
        """Wait until this number of blocks has come, and no end."""
        for _ in range(6000):
            if filled(self.memory) == count:
                return
            assert self.fetcher.take(0.005) == []
        raise AssertionError(f"{filled(self.memory)} blocks have come")

    def result(self) -> Result[FetchJob]:
        (result,) = self.fetcher.take(WAIT_S)
        return result


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as ends:
        yield Pair(tmp_path, ends)


def test_all_blocks_come_in_their_order(pair: Pair) -> None:
    for count in (3, 4, 20, 37):
        pair.allow(count)
        pair.wait_for(count)
    pair.allow(NUM_BLOCKS)
    result = pair.result()
    assert (len(result.num_bytes), result.error) == (NUM_BLOCKS, None)
    assert filled(pair.memory) == NUM_BLOCKS


def test_a_service_that_dies_amid_a_fetch_leaves_the_blocks_that_have_come(pair: Pair) -> None:
    pair.allow(21)
    pair.wait_for(21)
    pair.kill()
    result = pair.result()
    assert (len(result.num_bytes), result.error) == (21, "gone")


def test_a_lease_that_ends_amid_a_fetch_leaves_the_blocks_that_have_come(pair: Pair) -> None:
    pair.allow(5)
    pair.wait_for(5)
    pair.allow(0, is_held=False)
    result = pair.result()
    assert (len(result.num_bytes), result.error) == (5, "lease")


def test_a_fetch_that_nobody_wants_any_more_ends(pair: Pair) -> None:
    pair.allow(5)
    pair.wait_for(5)
    pair.job.is_cancelled = True
    result = pair.result()
    assert (len(result.num_bytes), result.error) == (5, None)


def test_blocks_of_another_size_are_not_taken(tmp_path: Path) -> None:
    with ExitStack() as ends:
        pair = Pair(tmp_path, ends, num_bytes=2 * BYTES)
        pair.allow(5)
        result = pair.result()
        assert (len(result.num_bytes), result.error) == (0, "damaged")


def test_a_fetch_without_memory_has_a_result(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.job.is_cancelled = True
    assert pair.result().error is None

    def no_memory(_: BlockMemory) -> None:
        raise MemoryError

    monkeypatch.setattr("moeserve.engine.kv.transfer.fetcher.BlockBuffer", no_memory)
    pair.fetcher.start(pair.job)
    result = pair.result()
    assert (len(result.num_bytes), result.error) == (0, "fault")


def test_a_request_without_a_number_amid_a_fetch_harms_nobody(tmp_path: Path) -> None:
    with ExitStack() as ends:
        pair = Pair(tmp_path, ends)
        pair.allow(4)
        pair.wait_for(4)
        context = ends.enter_context(zmq.Context[Any]())
        odd = ends.enter_context(context.socket(zmq.DEALER))
        load_keys(tmp_path / "kv.key", "").secure_client(odd)
        odd.connect(f"tcp://127.0.0.1:{pair.job.ticket.port}")
        for first in (b"x", b"", pack_number(NUM_BLOCKS - 1)):
            odd.send_multipart([b"", GET, b"t", first, pack_number(2)])
        pair.allow(2 * NUM_BLOCKS)
        assert pair.result().error is None
        odd.setsockopt(zmq.RCVTIMEO, int(1000 * WAIT_S))
        assert [odd.recv_multipart()[1] for _ in range(2)] == [BLOCK, NONE]


def test_one_fetch_at_a_time_asks_a_silent_service() -> None:
    silent, address = SilentServices(), ("h", 1)
    with silent.trying(address) as first, silent.trying(address) as second:
        assert (first, second) == (True, True)
        silent.record(address, is_silent=True)
    with silent.trying(address) as first, silent.trying(address) as second, silent.trying(("h", 2)) as other:
        assert (first, second, other) == (True, False, True)
    with silent.trying(address) as again:
        assert again
        silent.record(address, is_silent=False)
        with silent.trying(address) as beside:
            assert beside
    with silent.trying(address) as first, silent.trying(address) as second:
        assert (first, second) == (True, True)


def test_a_message_that_is_gone_since_the_poll_ends_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "kv.key"
    create_keys(key)
    polls, polled_again, poll = [], threading.Event(), zmq.Poller.poll

    def announce(poller: zmq.Poller, timeout: int | None = None) -> list[tuple[Any, int]]:
        polls.append(timeout)
        if len(polls) == 1:
            return [(socket, zmq.POLLIN) for socket, _ in poller.sockets if isinstance(socket, zmq.Socket)]
        polled_again.set()
        return poll(poller, timeout)

    sockets = zmq.Context[Any]()
    server = BlockServer(sockets, load_keys(key, ""), "tcp://127.0.0.1:*", memory_of(is_empty=False))
    monkeypatch.setattr(zmq.Poller, "poll", announce)
    server.serve(lambda _: None)
    try:
        assert polled_again.wait(WAIT_S)
    finally:
        server.stop()
