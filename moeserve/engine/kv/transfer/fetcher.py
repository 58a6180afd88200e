"""The threads that fetch blocks of KV from other services, into the memory that the engine computes in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import structlog
import zmq

from moeserve.engine.curve import CurveKeys
from moeserve.engine.kv.disk.copier import BlockBuffer, BlockMemory, take_all
from moeserve.engine.kv.transfer.messages import (
    BLOCK,
    BLOCKS_AT_ONCE,
    FREE,
    GET,
    MOST_WAITING,
    pack_number,
    read_number,
)
from moeserve.scheduling.arrivals import Result
from moeserve.scheduling.kv_transfer import FetchJob

_NUM_THREADS = 32  # fetches at once; one from a service that is silent takes its thread for _SILENCE_SECONDS
_ASKED_AHEAD = 2 * BLOCKS_AT_ONCE  # blocks that are requested before the first of them has come
_POLL_MS = 100  # between two looks whether the blocks are still wanted
_SILENCE_SECONDS = 4.0  # after which a service counts as silent; less than any request waits for its blocks
_OVERHEAD_BYTES = 1024  # more than the encryption adds to a block
_LINGER_MS = 500  # that a closing socket waits to send the end of a lease
_GONE = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

log = structlog.get_logger(__name__)


class BlockFetcher:
    """Fetches blocks as jobs say, on threads of its own: a `moeserve.engine.kv.moves.Mover`.

    A thread fills only blocks of its job. Until the job's result is taken, no other part of the engine reads, frees or
    reassigns them.
    """

    def __init__(self, sockets: zmq.Context[Any], keys: CurveKeys, memory: BlockMemory) -> None:
        self._sockets = sockets
        self._keys = keys
        self._memory = memory
        self._results: SimpleQueue[Result[FetchJob]] = SimpleQueue()
        self._stopped = threading.Event()
        self._silent = SilentServices()
        self._num_open = 0
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kv-fetcher")

    @property
    def is_busy(self) -> bool:
        return self._num_open > 0

    def start(self, job: FetchJob) -> None:
        self._num_open += 1
        self._threads.submit(self._run, job)

    def take(self, seconds: float = 0.0) -> list[Result[FetchJob]]:
        results = take_all(self._results, seconds)
        self._num_open -= len(results)
        return results

    def close(self) -> None:
        """End the threads and their fetches."""
        self._stopped.set()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, job: FetchJob) -> None:
        job.is_begun = True
        begun = time.monotonic()
        fetch: Fetch | None = None
        failure: str | None = "fault"
        try:
            fetch = Fetch(job, BlockBuffer(self._memory))
            failure = self._fetch(fetch)
        except Exception as error:
            log.error("kv_transfer_fault", exc_info=error)
        num_filled = 0 if fetch is None else fetch.num_filled
        if failure is not None:
            ticket = job.ticket
            log.warning("kv_not_fetched", reason=failure, host=ticket.host, port=ticket.port, fetched=num_filled)
        num_bytes = [] if fetch is None else [fetch.block_bytes] * num_filled
        self._results.put(Result(job, num_bytes, time.monotonic() - begun, failure))

    def _fetch(self, fetch: Fetch) -> str | None:
        """Fetch a job's blocks, and end their lease. Return a word for the reason if not all were fetched."""
        ticket = fetch.job.ticket
        if fetch.is_over:
            return self._ask(fetch)
        with self._silent.trying((ticket.host, ticket.port)) as may_try:
            return self._ask(fetch) if may_try else "silent"

    def _ask(self, fetch: Fetch) -> str | None:
        ticket = fetch.job.ticket
        with self._sockets.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
            socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
            socket.setsockopt(zmq.MAXMSGSIZE, fetch.block_bytes + _OVERHEAD_BYTES)
            self._keys.secure_client(socket)
            monitor = socket.get_monitor_socket(_GONE)
            try:
                socket.connect(f"tcp://{ticket.host}:{ticket.port}")
                failure = self._receive(fetch, socket, monitor)
                if failure != "gone":
                    socket.send_multipart([b"", FREE, ticket.request_id.encode()])
                return failure
            finally:
                socket.disable_monitor()

    def _receive(self, fetch: Fetch, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> str | None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        address, last_heard = (fetch.job.ticket.host, fetch.job.ticket.port), time.monotonic()
        while not fetch.is_over:
            is_silent = time.monotonic() - last_heard > _SILENCE_SECONDS
            if is_silent:
                self._silent.record(address, is_silent=True)
            if self._stopped.is_set() or fetch.job.is_cancelled:
                return None
            fetch.ask(socket)
            ready = dict(poller.poll(_POLL_MS))
            if socket in ready:
                last_heard = time.monotonic()
                self._silent.record(address, is_silent=False)
                failure = fetch.take(socket.recv_multipart(copy=False))
                if failure is not None:
                    return failure
            elif monitor in ready:
                return "gone"
            elif is_silent:
                return "silent"
        return None


class SilentServices:
    """The services that did not answer their last fetch, by host and port.

    One fetch at a time tries such a service again, so that it takes one thread, however many tickets it has issued. Any
    thread may call the methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._silent: set[tuple[str, int]] = set()
        self._tried: set[tuple[str, int]] = set()

    @contextmanager
    def trying(self, address: tuple[str, int]) -> Iterator[bool]:
        """Return whether a fetch may ask a service, within the context."""
        with self._lock:
            is_silent, may_try = address in self._silent, address not in self._tried
            if is_silent:
                self._tried.add(address)
        try:
            yield may_try or not is_silent
        finally:
            if is_silent and may_try:
                with self._lock:
                    self._tried.remove(address)

    def record(self, address: tuple[str, int], *, is_silent: bool) -> None:
        with self._lock:
            (self._silent.add if is_silent else self._silent.discard)(address)


class Fetch:
    """The progress of one job."""

    def __init__(self, job: FetchJob, buffer: BlockBuffer) -> None:
        self.job = job
        self.num_filled = 0
        self._num_asked = 0
        self._buffer = buffer

    @property
    def block_bytes(self) -> int:
        return len(self._buffer.content)

    @property
    def is_over(self) -> bool:
        return self.num_filled == len(self.job.copies)

    def ask(self, socket: zmq.Socket[bytes]) -> None:
        """Ask for the next blocks, up to the most that may be on their way at once."""
        job = self.job
        while self._num_asked < min(len(job.copies), self.num_filled + _ASKED_AHEAD):
            count = min(BLOCKS_AT_ONCE, len(job.copies) - self._num_asked)
            first = pack_number(job.first + self._num_asked)
            socket.send_multipart([b"", GET, job.ticket.request_id.encode(), first, pack_number(count)])
            self._num_asked += count

    def take(self, frames: list[zmq.Frame]) -> str | None:
        """Fill the next block with the bytes of a message. Return a word for the reason if that is impossible."""
        if len(frames) < 2 or frames[1].bytes != BLOCK:
            return "lease"
        if len(frames) != 5 or len(frames[4]) != self.block_bytes:
            return "damaged"
        if read_number(frames[3].bytes) != self.job.first + self.num_filled:
            return "damaged"
        self._buffer.content[:] = frames[4].buffer
        self._buffer.store(self.job.copies[self.num_filled].block)
        self.num_filled += 1
        return None
