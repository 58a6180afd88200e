"""The publisher over real sockets: live batches, replay, snapshot, loss and bad requests."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import msgpack
import pytest
import zmq

from moeserve import forever
from moeserve.config import ConfigError
from moeserve.engine.kv.events.blocks import KvBlocks
from moeserve.engine.kv.events.publisher import KvEventPublisher, KvEvents
from moeserve.settings.kv_events import KvEventsConfig, endpoint_of, parse_kv_events
from radix_cache import PrefixCache
from tests.support.cache_invariants import evict_all
from tests.support.kv_consumer import EventConsumer

SIZE = 2
_PATIENCE_MS = 20_000


class Router:
    """Asks one rank for replays, and subscribes to it from `follow` on."""

    def __init__(self, sockets: zmq.Context, source: dict) -> None:
        self.consumer = EventConsumer()
        self.endpoint = source["endpoint"]
        self.live = sockets.socket(zmq.SUB)
        self.live.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
        self.replay = sockets.socket(zmq.DEALER)
        self.replay.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
        self.replay.connect(source["replay_endpoint"])

    def follow(self) -> None:
        self.live.subscribe("")
        self.live.connect(self.endpoint)

    def ask(self, request: bytes) -> list[tuple[bytes, int, bytes]]:
        self.replay.send_multipart([b"", request])
        batches = []
        while True:
            empty, topic, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert (topic, payload) == (b"", b"")
                return batches
            batches.append((topic, int.from_bytes(number, "big"), payload))

    def next(self) -> tuple[bytes, int, bytes]:
        topic, number, payload = self.live.recv_multipart()
        return topic, int.from_bytes(number, "big"), payload

    def close(self) -> None:
        self.live.close(0)
        self.replay.close(0)


@contextmanager
def publishing(
    num_ranks: int = 1, **settings
) -> Iterator[tuple[list[PrefixCache], KvEvents, list[Router], KvEventPublisher]]:
    sockets: zmq.Context = zmq.Context()
    local = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:*"}
    config = KvEventsConfig(**{"enable_kv_cache_events": True, **local, **settings})
    publisher = KvEventPublisher(config, SIZE, num_ranks, sockets)
    caches = [PrefixCache(64, SIZE) for _ in range(num_ranks)]
    routers = [Router(sockets, source) for source in publisher.sources]
    publisher.start()
    try:
        yield caches, KvEvents(caches, publisher), routers, publisher
    finally:
        publisher.stop()
        for router in routers:
            router.close()
        sockets.term()


def compute(cache: PrefixCache, *tokens: int) -> None:
    ids = array("i", tokens)
    lease = cache.match(ids)
    assert cache.extend(lease, len(ids) // SIZE - len(lease.block_ids)) is not None
    cache.free(cache.publish(lease, ids, len(ids)))
    cache.release(lease)


def catch_up(router: Router, until: int) -> None:
    """Take all batches up to a number by replay."""
    while (router.consumer.next or 0) <= until:
        for _, number, payload in router.ask((router.consumer.next or 0).to_bytes(8, "big")):
            router.consumer.take(number, payload)


def test_a_replay_from_zero_tells_all_that_was_published():
    with publishing() as (caches, events, (router,), _):
        compute(caches[0], 1, 2, 3, 4)
        events.end_turn()
        compute(caches[0], 1, 2, 5, 6)
        events.end_turn()
        catch_up(router, 2)
        assert router.consumer.prefixes == {(None, (1, 2)), (None, (1, 2, 3, 4)), (None, (1, 2, 5, 6))}


def test_the_first_batch_of_a_life_clears_what_was_known():
    with publishing() as (_, _, (router,), _):
        catch_up(router, 0)
        (_, number, payload), *_ = router.ask(bytes(8))
        assert number == 0
        assert msgpack.unpackb(payload)[1:] == [[{"type": "AllBlocksCleared"}], 0]


def test_live_batches_go_on_where_a_replay_ended():
    with publishing() as (caches, events, (router,), _):
        compute(caches[0], 1, 2)
        events.end_turn()
        router.follow()
        _, number, payload = router.next()
        if number:
            catch_up(router, number - 1)
        router.consumer.take(number, payload)
        compute(caches[0], 1001, 1002)
        events.end_turn()
        while (None, (1001, 1002)) not in router.consumer.prefixes:
            _, number, payload = router.next()
            router.consumer.take(number, payload)
        assert len(router.consumer.blocks) == caches[0].counts.num_cached


def test_who_subscribes_after_the_first_batch_is_told_all_blocks():
    with publishing() as (caches, events, (router,), _):
        compute(caches[0], 1, 2)
        events.end_turn()
        catch_up(router, 1)
        router.follow()
        _, number, payload = router.next()
        told = msgpack.unpackb(payload)[1]
        assert (number, [event["type"] for event in told]) == (2, ["AllBlocksCleared", "BlockStored"])
        assert told[1]["token_ids"] == [1, 2]


def test_an_event_that_cannot_be_told_has_all_blocks_told_anew(monkeypatch):
    real, errors = KvBlocks.apply, [MemoryError()]

    def apply(blocks, facts):
        if errors:
            raise errors.pop()
        return real(blocks, facts)

    monkeypatch.setattr(forever, "_AFTER_ERROR_S", 0.001)
    monkeypatch.setattr(KvBlocks, "apply", apply)
    with publishing() as (caches, events, (router,), publisher):
        compute(caches[0], 1, 2)
        events.end_turn()
        while not publisher._torn:
            time.sleep(0.001)  # another thread's state can only be polled
        compute(caches[0], 5, 6)
        for _ in range(2):
            events.end_turn()
        catch_up(router, 1)
        assert router.consumer.prefixes == {(None, (1, 2)), (None, (5, 6))}


def test_a_snapshot_tells_the_present_blocks_with_the_number_of_the_next_batch():
    with publishing(topic="kv") as (caches, events, (router,), _):
        compute(caches[0], 1, 2, 3, 4)
        events.end_turn()
        evict_all(caches[0])
        events.end_turn()
        compute(caches[0], 5, 6)
        events.end_turn()
        catch_up(router, 3)
        batches = router.ask(b"snapshot")
        assert [(topic, number) for topic, number, _ in batches] == [(b"kv", 4)]
        late = EventConsumer()
        for _, _, payload in batches:
            for event in msgpack.unpackb(payload)[1]:
                late.apply(event)
        assert late.blocks == router.consumer.blocks


def test_a_replay_from_before_the_buffer_is_a_snapshot_with_the_number_of_the_newest_batch():
    with publishing(buffer_steps=2) as (caches, events, (router,), _):
        for token in range(1, 21, 2):
            compute(caches[0], token, token + 1)
            events.end_turn()
        while not (batches := router.ask(bytes(8))) or batches[-1][1] < 10:
            pass
        assert [number for _, number, _ in batches] == [10]
        for event in msgpack.unpackb(batches[0][2])[1]:
            router.consumer.apply(event)
        assert len(router.consumer.blocks) == caches[0].counts.num_cached == 10
        assert [number for _, number, _ in router.ask((9).to_bytes(8, "big"))] == [9, 10]


def test_each_rank_has_its_own_stream():
    with publishing(2) as (caches, events, routers, publisher):
        compute(caches[0], 1, 2)
        compute(caches[1], 3, 4)
        events.end_turn()
        for rank, router in enumerate(routers):
            catch_up(router, 1)
            (_, _, payload) = router.ask((1).to_bytes(8, "big"))[0]
            assert msgpack.unpackb(payload)[2] == rank
        assert [router.consumer.prefixes for router in routers] == [{(None, (1, 2))}, {(None, (3, 4))}]
        assert len({source["endpoint"] for source in publisher.sources}) == 2


def test_a_full_queue_drops_facts_and_tells_everything_anew_later():
    sockets: zmq.Context = zmq.Context()
    config = KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint="tcp://127.0.0.1:0",
        replay_endpoint="tcp://127.0.0.1:0",
        max_queue_size=2,
    )
    publisher = KvEventPublisher(config, SIZE, 1, sockets)
    cache = PrefixCache(64, SIZE)
    events = KvEvents([cache], publisher)
    # Nobody takes anything from the queue yet.
    for token in range(1, 13, 2):
        compute(cache, token, token + 1)
        events.end_turn()
    evict_all(cache)
    compute(cache, 50, 51)
    events.end_turn()
    router = Router(sockets, publisher.sources[0])
    publisher.start()
    catch_up(router, 2)
    assert len(router.consumer.blocks) == 2
    events.end_turn()
    catch_up(router, 3)
    assert router.consumer.prefixes == {(None, (50, 51))}
    publisher.stop()
    router.close()
    sockets.term()


def test_bad_requests_are_passed_over():
    with publishing() as (_, _, (router,), _):
        for bad in ([b"", b"x"], [b"x" * 8], [b"y", bytes(8)], [b"", bytes(8), b""], [b"", os.urandom(9)]):
            router.replay.send_multipart(bad)
        catch_up(router, 0)


def test_an_address_that_is_taken_is_told_in_one_sentence():
    with publishing() as (_, _, _, publisher):
        taken = publisher.sources[0]["endpoint"]
        config = KvEventsConfig(enable_kv_cache_events=True, endpoint=taken)
        with pytest.raises(ConfigError, match=f"cannot listen on {taken}: Address already in use"):
            KvEventPublisher(config, SIZE, 1, zmq.Context.instance())


def test_ranks_have_the_next_ports():
    assert endpoint_of("tcp://*:5557", 2) == "tcp://*:5559"
    assert endpoint_of("tcp://127.0.0.1:0", 2) == "tcp://127.0.0.1:*"
    assert endpoint_of("tcp://[::1]:80", 1) == "tcp://[::1]:81"
    assert [endpoint_of("ipc:///tmp/kv", rank) for rank in (0, 1)] == ["ipc:///tmp/kv", "ipc:///tmp/kv_dp1"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"port": 1}', "'port' is not one of"),
        ('{"endpoint": 5}', "endpoint is 5, not a text"),
        ('{"hwm": 0}', "hwm is 0, not a whole number above 0"),
        ('{"hwm": true}', "hwm is true"),
        ('{"enable_kv_cache_events": 1}', "is 1, not true or false"),
        ('{"publisher": "kafka"}', "not zmq or null"),
        ('{"format": "json"}', "not map or array"),
        ('{"endpoint": "udp://x:1"}', "not like tcp"),
        ('{"endpoint": "tcp://*:99999"}', "not like tcp"),
        ('{"replay_endpoint": "tcp://127.0.0.1:5557"}', "are the same"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_field(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_kv_events(text)


def test_the_setting_of_vllm_is_taken_as_it_is():
    config = parse_kv_events(
        '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558",'
        '"buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":""}'
    )
    assert config.is_on
    assert not config.is_local
    assert not parse_kv_events(None).is_on
    assert parse_kv_events('{"enable_kv_cache_events":true}').is_local
    assert not parse_kv_events('{"enable_kv_cache_events":true,"publisher":"null"}').is_on
