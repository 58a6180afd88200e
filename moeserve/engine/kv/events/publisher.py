"""Publishes the contents of the prefix caches: a thread that numbers, encodes and sends batches of events over ZeroMQ.

The engine's thread only hands over the facts of a turn. Each rank has a PUB socket. The first batch makes subscribers
forget an earlier life, but they may connect again after it was sent: so all blocks are published again when somebody
subscribes soon after the start. With a replay endpoint in the settings a ROUTER serves subscribers that missed batches:

- `["", number]` (8 bytes, big-endian) is answered with the batches from that number on, or, where the buffer no longer
  has the first of them, with a snapshot that has the number of the newest batch;
- `["", "snapshot"]` is answered with a snapshot: events that lead from anything to the present blocks, each message
  with the number of the next batch.

An answer is `["", topic, number, payload]` per batch, and `["", "", -1, ""]` at its end. Events are written as vLLM
writes them: MessagePack, maps with a `type`, or arrays as before its 0.26.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import structlog
import zmq

from moeserve.config import ConfigError
from moeserve.engine.kv.events.blocks import AllBlocksCleared, BlockRemoved, BlockStored, Event, KvBlocks
from moeserve.forever import repeat
from moeserve.scheduling.parts import Part
from moeserve.settings.kv_events import KvEventsConfig, endpoint_of
from radix_cache import Fact, PrefixCache, Published

# The tier of the blocks: the first one, from which requests continue without a copy, whatever the device.
_FIRST_TIER = "GPU"
# The number in the frame that ends a replay.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


def pack_batch(seconds: float, events: Sequence[Event], rank: int, block_size: int, *, as_maps: bool) -> bytes:
    """Return the payload of a message: `[seconds of the Unix time, events, rank]`."""
    shown = [_as_map(event, block_size) for event in events]
    packed: bytes = msgpack.packb([seconds, shown if as_maps else [list(one.values()) for one in shown], rank])
    return packed


def pack_number(number: int) -> bytes:
    """Return the frame with the number of a batch."""
    return number.to_bytes(8, "big")


def _as_map(event: Event, block_size: int) -> dict[str, Any]:
    match event:
        case BlockStored(hashes, parent, token_ids, salt):
            stored: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": array("i", token_ids).tolist(),
                "block_size": block_size,
                "lora_id": None,
                "medium": _FIRST_TIER,
                "lora_name": None,
            }
            if salt is not None:
                stored["extra_keys"] = [[salt], *[None] * (len(hashes) - 1)]
            return stored
        case BlockRemoved(hashes):
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": _FIRST_TIER}
        case _:
            return {"type": "AllBlocksCleared"}


_SUBSCRIBES = b"\x01"  # the first byte of a message that subscribes
_SNAPSHOT = b"snapshot"
_BLOCKS_OF_SNAPSHOT = 1000  # blocks in one message of a snapshot
_MAX_BUFFER_BYTES = 256 * 2**20  # payloads that one rank's replay buffer holds
_LINGER_MS = 200  # that an ending service waits for subscribers to take the last events
_REPUBLISH_S = 60.0  # all blocks are published again if somebody subscribes within this time after the start
_SPARE_MESSAGES = 1000  # that may wait for a replay's client, beside a whole buffer

log = structlog.get_logger(__name__)


class KvEvents(Part):
    """Hands over what happened to the caches since the last turn. Used by the engine's thread alone."""

    def __init__(self, caches: Sequence[PrefixCache], publisher: KvEventPublisher) -> None:
        self._caches = caches
        self._publisher = publisher
        self._behind: set[int] = set()
        for cache in caches:
            cache.facts.begin()

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The endpoints of each rank, as routers get them."""
        return self._publisher.sources

    def end_turn(self) -> None:
        """Hand over the facts of all ranks, without waiting.

        Facts that find the queue full are dropped; when there is room again, all blocks of the rank's cache follow.
        """
        for rank, cache in enumerate(self._caches):
            facts = cache.facts.take()
            if rank in self._behind:
                if self._publisher.has_room and self._publisher.put(rank, list(cache.facts.published()), restarts=True):
                    self._behind.discard(rank)
            elif facts and not self._publisher.put(rank, facts):
                self._behind.add(rank)
                log.warning("kv_events_dropped", rank=rank, consequence="all blocks of the rank are told anew")


@dataclass(slots=True)
class _Handed:
    """Facts of a rank. restarts: they name all its blocks, and earlier facts are void."""

    rank: int
    facts: Sequence[Fact] | list[Published]
    restarts: bool


class _RankStream:
    """The batches of one rank: its blocks, its sockets, and the newest batches for a replay."""

    def __init__(
        self, rank: int, config: KvEventsConfig, block_size: int, sockets: zmq.Context[Any], first: int
    ) -> None:
        """first: see `KvEventPublisher`. Raise ConfigError if an address cannot be had."""
        self._rank = rank
        self._config = config
        self._topic = config.topic.encode()
        self._blocks = KvBlocks(block_size)
        self._block_size = block_size
        self._next = first
        self._buffer: deque[bytes] = deque()
        self._buffer_bytes = 0
        self._until = time.monotonic() + _REPUBLISH_S
        # A PUB socket that reports its subscribers.
        self.live = sockets.socket(zmq.XPUB)
        self.live.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.live.setsockopt(zmq.LINGER, _LINGER_MS)
        self.live.setsockopt(zmq.SNDHWM, config.hwm)
        self.replay: zmq.Socket[bytes] | None = None
        try:
            endpoint, replay_endpoint = self._open(self.live, config.endpoint), None
            if config.replay_endpoint is not None:
                self.replay = sockets.socket(zmq.ROUTER)
                self.replay.setsockopt(zmq.LINGER, 0)
                self.replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay.setsockopt(zmq.MAXMSGSIZE, 1024)
                self.replay.setsockopt(zmq.SNDHWM, config.buffer_steps + _SPARE_MESSAGES)
                replay_endpoint = _bind(self.replay, endpoint_of(config.replay_endpoint, rank))
        except ConfigError:
            self.close()
            raise
        self.source = config.source(endpoint, replay_endpoint)

    def start(self) -> None:
        """Publish the first batch: subscribers forget an earlier life of the engine."""
        self._has_newcomers()
        self._publish([AllBlocksCleared()])

    def welcome(self) -> None:
        """Publish all blocks if somebody has subscribed soon after the start, and so missed the first batch."""
        if self._has_newcomers() and time.monotonic() < self._until:
            for events in self._blocks.snapshot(_BLOCKS_OF_SNAPSHOT):
                self._publish(events)

    def _has_newcomers(self) -> bool:
        """Return whether somebody has subscribed since the last call."""
        has_any = False
        while True:
            try:
                has_any |= self.live.recv(zmq.NOBLOCK)[:1] == _SUBSCRIBES
            except zmq.Again:
                return has_any

    def publish(self, handed: _Handed) -> None:
        """Publish facts as the next batch, unless they change nothing for subscribers."""
        events = self._blocks.restart(handed.facts) if handed.restarts else self._blocks.apply(handed.facts)
        if events:
            self._publish(events)

    def answer(self) -> None:
        """Answer all requests for a replay that have come. Others are dropped."""
        assert self.replay is not None
        while True:
            try:
                frames = self.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and not frames[1] and (len(frames[2]) == 8 or frames[2] == _SNAPSHOT):
                self._reply(self.replay, frames[0], self._asked(frames[2]))

    def close(self) -> None:
        self.live.close()
        if self.replay is not None:
            self.replay.close()

    def _open(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        address = endpoint_of(endpoint, self._rank)
        if not self._config.connect:
            return _bind(socket, address)
        socket.connect(address)
        return address

    def _publish(self, events: Sequence[Event]) -> None:
        payload = self._pack(events)
        self._buffer.append(payload)
        self._buffer_bytes += len(payload)
        while len(self._buffer) > self._config.buffer_steps or self._buffer_bytes > _MAX_BUFFER_BYTES:
            self._buffer_bytes -= len(self._buffer.popleft())
        # A PUB socket never waits: it drops messages for peers that do not read.
        self.live.send_multipart([self._topic, pack_number(self._next), payload])
        self._next += 1

    def _asked(self, request: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the numbers and payloads that answer a request."""
        first = self._next - len(self._buffer)
        if request == _SNAPSHOT:
            return ((self._next, self._pack(events)) for events in self._blocks.snapshot(_BLOCKS_OF_SNAPSHOT))
        start = int.from_bytes(request, "big")
        if start < first:
            return ((self._next - 1, self._pack(events)) for events in self._blocks.snapshot(_BLOCKS_OF_SNAPSHOT))
        return ((number, self._buffer[number - first]) for number in range(start, self._next))

    def _reply(self, socket: zmq.Socket[bytes], asker: bytes, batches: Iterable[tuple[int, bytes]]) -> None:
        try:
            for number, payload in batches:
                socket.send_multipart([asker, b"", self._topic, pack_number(number), payload], zmq.NOBLOCK)
            socket.send_multipart([asker, b"", b"", END_OF_REPLAY, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The client is gone, or does not read: it will ask again.
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise

    def _pack(self, events: Sequence[Event]) -> bytes:
        as_maps = self._config.format == "map"
        return pack_batch(time.time(), events, self._rank, self._block_size, as_maps=as_maps)


class KvEventPublisher(threading.Thread):
    """Sends the events of all ranks."""

    def __init__(
        self,
        config: KvEventsConfig,
        block_size: int,
        num_ranks: int,
        sockets: zmq.Context[zmq.Socket[bytes]],
        first: int = 0,
    ) -> None:
        """Open the sockets. Raise ConfigError, one sentence, if an address cannot be had.

        first: the number of the first batch. Some subscribers skip numbers that they have seen, so it must be larger
        than all numbers of an earlier life.
        """
        super().__init__(name="kv-events", daemon=True)
        self._max_queued = config.max_queue_size
        self._handed: deque[_Handed] = deque()
        self._stopped = threading.Event()
        self._torn: set[int] = set()  # the ranks of which facts are lost
        self._streams: list[_RankStream] = []
        try:
            for rank in range(num_ranks):
                self._streams.append(_RankStream(rank, config, block_size, sockets, first))
        except ConfigError:
            self._close()
            raise
        if not config.is_local:
            log.warning("kv_events_leave_the_machine", consequence="whoever reaches the port can read prompts")
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The endpoints of each rank, as routers get them."""
        return [stream.source for stream in self._streams]

    @property
    def has_room(self) -> bool:
        """True while the queue is at most half full."""
        return 2 * len(self._handed) <= self._max_queued

    def put(self, rank: int, facts: Sequence[Fact], *, restarts: bool = False) -> bool:
        """Queue facts of a rank. Return False, with nothing done, if the queue is full or earlier facts are lost.

        See `_Handed.restarts`.
        """
        if self._stopped.is_set():
            return True
        if len(self._handed) >= self._max_queued or (rank in self._torn and not restarts):
            return False
        self._torn.discard(rank)
        self._handed.append(_Handed(rank, facts, restarts))
        os.eventfd_write(self._news, 1)
        return True

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._news, zmq.POLLIN)
        asked = {stream.replay: stream for stream in self._streams if stream.replay is not None}
        subscribed = {stream.live: stream for stream in self._streams}
        for socket in (*asked, *subscribed):
            poller.register(socket, zmq.POLLIN)
        for stream in self._streams:
            stream.start()
        repeat(self.name, partial(self._serve, poller, asked, subscribed))
        self._close()

    def _serve(self, poller: zmq.Poller, asked: dict[Any, _RankStream], subscribed: dict[Any, _RankStream]) -> bool:
        ready = poller.poll()
        for source, _ in ready:
            if source == self._news:
                os.eventfd_read(self._news)
        while self._handed:
            handed = self._handed.popleft()
            try:
                self._streams[handed.rank].publish(handed)
            except Exception:
                self._torn.add(handed.rank)
                raise
        for source, _ in ready:
            if source in asked:
                asked[source].answer()
            elif source in subscribed:
                subscribed[source].welcome()
        return not self._stopped.is_set()

    def stop(self) -> None:
        """Send all queued facts, close the sockets and end the thread."""
        self._stopped.set()
        os.eventfd_write(self._news, 1)
        self.join()
        os.close(self._news)

    def _close(self) -> None:
        for stream in self._streams:
            stream.close()


def _bind(socket: zmq.Socket[bytes], address: str) -> str:
    """Bind a socket and return its address, with the port that the system chose. Raise ConfigError."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"--kv-events-config: cannot listen on {address}: {error.strerror}.") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
