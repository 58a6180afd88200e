"""Blocks that are fetched while they are computed, over real sockets: a prompt grows, ends, or its service dies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from moeserve.engine.kv_disk.copier import BlockMemory
from moeserve.engine.kv_transfer.answers import Coming
from moeserve.engine.kv_transfer.fetcher import BlockFetcher, SilentServices
from moeserve.engine.kv_transfer.messages import BLOCK, GET, WAIT, pack_number
from moeserve.engine.kv_transfer.server import BlockServer
from moeserve.engine.ranks.meeting import Gatekeeper, create_keys, load_keys
from moeserve.kv_transfer import KvTicket
from moeserve.scheduling.kv_transfer import FetchJob, FetchResult
from radix_cache import BlockCopy

NUM_BLOCKS, BYTES, HEADS, NUM_ARRAYS = 40, 8, 2, 20
WAIT_S = 30.0


def memory_of(*, is_empty: bool, num_bytes: int = BYTES) -> BlockMemory:
    shape = (HEADS, NUM_BLOCKS, num_bytes)
    numbers = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    return [np.zeros(shape, np.uint8) if is_empty else numbers + np.uint8(array) for array in range(NUM_ARRAYS)]


def filled(memory: BlockMemory, num_arrays: int = NUM_ARRAYS) -> int:
    """Count the leading blocks that have come, or whose bytes in the first arrays have."""
    theirs = memory_of(is_empty=False)
    for block in range(NUM_BLOCKS):
        for one, other in zip(memory[:num_arrays], theirs, strict=False):
            if not np.array_equal(one[:, block], other[:, place_of(block)]):
                return block
    return NUM_BLOCKS


def place_of(number: int) -> int:
    """Return the block of memory that holds a block of the prompt: they lie in the reverse order."""
    return NUM_BLOCKS - 1 - number


@dataclass(frozen=True)
class State:
    """A prompt of which `count` blocks are computed, or nobody holds any.

    `step` is computed: it completes blocks up to number `stop`, and `num_arrays` of memory are filled. `last` is the
    last one that has ended well. The first `num_wrong` arrays of memory have other bytes than they should.
    """

    count: int
    is_held: bool = True
    step: int | None = None
    stop: int = 0
    num_arrays: int = 0
    last: int | None = None
    num_wrong: int = 0


class Prompt:
    """Implements `moeserve.engine.kv_transfer.answers.Offered`."""

    def __init__(self) -> None:
        self.state = State(0)

    def blocks(self, _: str) -> list[int] | None:
        return [place_of(number) for number in range(self.state.count)] if self.state.is_held else None

    def is_growing(self, _: str) -> bool:
        return self.state.is_held and self.state.count < NUM_BLOCKS

    def coming(self, _: str) -> Coming | None:
        state = self.state
        blocks = [place_of(number) for number in range(state.stop)]
        return None if state.step is None else Coming(state.step, blocks, state.num_arrays)

    def is_present(self, step: object) -> bool:
        return step == self.state.step

    def is_last(self, step: object) -> bool:
        return step == self.state.last


def hold(pipe: Connection, key: Path, num_bytes: int) -> None:
    """Hold a prompt's blocks. The states that come through the pipe follow each other; None ends it."""
    keys, sockets, prompt = load_keys(key, ""), zmq.Context[Any](), Prompt()
    gatekeeper = Gatekeeper(sockets, keys)
    right = memory_of(is_empty=False, num_bytes=num_bytes)
    memory = [array.copy() for array in right]
    server = BlockServer(sockets, keys, "tcp://127.0.0.1:*", memory)
    server.serve(prompt)
    pipe.send(server.port)
    while (state := pipe.recv()) is not None:
        for number, array in enumerate(memory):
            array[:] = right[number] + np.uint8(7 if number < state.num_wrong else 0)
        prompt.state = state
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
            self.pipe.send(None)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def grow(self, count: int, **others: Any) -> None:
        """others: of `State`."""
        self.pipe.send(State(count, **others))

    def wait_for(self, count: int, num_arrays: int = NUM_ARRAYS) -> None:
        """Wait until as many blocks have come, or their bytes in the first arrays, and no end."""
        for _ in range(6000):
            if filled(self.memory, num_arrays) == count:
                return
            assert self.fetcher.take(0.005) == []
        raise AssertionError(f"{filled(self.memory, num_arrays)} blocks have come")

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
    pair.kill()
    result = pair.result()
    assert (result.num_filled, result.failure) == (21, "gone")


def test_a_prompt_that_is_given_up_amid_its_computing_ends_the_fetch(pair: Pair) -> None:
    pair.grow(5)
    pair.wait_for(5)
    pair.grow(0, is_held=False)
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


def test_layers_come_while_their_blocks_are_computed_and_are_sent_once(pair: Pair) -> None:
    pair.grow(4, step=1, stop=20)
    pair.wait_for(4)
    for num_arrays in (8, 17):
        pair.grow(4, step=1, stop=20, num_arrays=num_arrays)
        pair.wait_for(20, num_arrays)
    assert filled(pair.memory) == 4
    # If the first arrays were sent again they would be wrong.
    pair.grow(20, last=1, num_wrong=17)
    pair.wait_for(20)
    pair.grow(NUM_BLOCKS)
    assert (pair.result().failure, filled(pair.memory)) == (None, NUM_BLOCKS)


def test_layers_of_a_step_that_failed_are_sent_again(pair: Pair) -> None:
    pair.grow(4, step=1, stop=8)
    pair.wait_for(4)
    pair.grow(4, step=1, stop=8, num_arrays=10, num_wrong=1)
    # The parts of blocks 4 to 7 have come, wrong as they are, when their second array is there.
    for _ in range(6000):
        theirs = memory_of(is_empty=False)[9]
        if np.array_equal(pair.memory[9][:, 7], theirs[:, place_of(7)]):
            break
        assert pair.fetcher.take(0.005) == []
    assert not np.array_equal(pair.memory[0][:, 7], memory_of(is_empty=False)[0][:, place_of(7)])
    pair.grow(4, step=2, stop=8, num_arrays=9)
    pair.wait_for(8, 9)
    pair.grow(8, last=3)
    pair.wait_for(8)
    pair.grow(NUM_BLOCKS)
    assert (pair.result().failure, filled(pair.memory)) == (None, NUM_BLOCKS)


def test_a_service_that_dies_amid_a_block_leaves_the_whole_ones(pair: Pair) -> None:
    pair.grow(4, step=1, stop=20, num_arrays=10)
    pair.wait_for(20, 10)
    pair.kill()
    result = pair.result()
    assert (result.num_filled, result.failure) == (4, "gone")


def test_a_request_without_a_number_amid_a_prompt_harms_nobody(tmp_path: Path) -> None:
    with ExitStack() as ends:
        pair = Pair(tmp_path, ends)
        pair.grow(4, step=1, stop=20)
        pair.wait_for(4)
        context = ends.enter_context(zmq.Context[Any]())
        odd = ends.enter_context(context.socket(zmq.DEALER))
        load_keys(tmp_path / "kv.key", "").secure_client(odd)
        odd.connect(f"tcp://127.0.0.1:{pair.job.ticket.port}")
        for first in (pack_number(30), b"x", b""):
            odd.send_multipart([b"", GET, b"t", first, pack_number(2)])
        assert odd.poll(int(1000 * WAIT_S))  # the word that its blocks are waited for
        pair.grow(4, step=1, stop=20, num_arrays=10)
        pair.wait_for(20, 10)
        pair.grow(NUM_BLOCKS)
        assert pair.result().failure is None
        odd.setsockopt(zmq.RCVTIMEO, int(1000 * WAIT_S))
        words = list(iter(lambda: odd.recv_multipart()[1], BLOCK))
        assert set(words) == {WAIT}
        assert odd.recv_multipart()[3] == pack_number(31)


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
    server.serve(Prompt())
    try:
        assert polled_again.wait(WAIT_S)
    finally:
        server.stop()
