"""Between nodes: only who has the key gets in, and settings that do not fit are refused before anything starts."""

from __future__ import annotations

import math
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
from msgspec.structs import replace as replace_struct
from structlog.testing import capture_logs

from launcher.preflight import check_nodes
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.curve import CurveKeys, create_keys, load_keys
from moeserve.engine.ranks import meeting, transport
from moeserve.engine.ranks.meeting import (
    Announcement,
    Meeting,
    interface_of,
    is_own,
    machine_id,
    own_address_towards,
    resolve,
)
from moeserve.engine.ranks.messages import Dismissed, Joined, RankError, Shutdown, Start, ToRank
from moeserve.engine.ranks.transport import RankHub, RankLink
from moeserve.run_context import RunContext

JOINED = Joined(1, os.getpid(), "other", "elsewhere", "software", "model")
NUM_BEFORE = 32  # messages of a MiB, together more than the buffers of a connection take


def make_keys() -> CurveKeys:
    return CurveKeys(*zmq.curve_keypair())


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(0)


def first_of(keys: CurveKeys | None) -> Meeting:
    tcp = "tcp://127.0.0.1:*"
    return Meeting(incarnation=3, results=tcp, steps=(tcp,), collectives=None, interface="lo", keys=keys)


def other_of(hub: RankHub, keys: CurveKeys | None) -> Meeting:
    results, steps = hub.addresses
    return Meeting(incarnation=3, results=results, steps=tuple(steps), collectives=None, interface="lo", keys=keys)


def test_a_rank_with_the_key_gets_in_and_sees_the_end_of_rank_0(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    keys = make_keys()
    hub = RankHub(context, first_of(keys))
    link = RankLink(context, other_of(hub, keys), 1)
    link.send(JOINED)
    assert hub.gather(Joined, within=60, patience=60) == {1: JOINED}
    assert hub.name(1) == f"Rank 1 (process {os.getpid()} on other)"
    hub.send(1, Start(1))
    assert isinstance(link.receive(), Start)
    hub.close()
    with pytest.raises(RankError, match=r"Rank 0 at tcp://127.* is gone"):
        link.receive()
    link.close()


def send_on(hub: RankHub) -> None:
    while True:
        hub.send(1, Start(1))


def test_a_message_to_a_rank_that_has_just_died_says_so_before_it_could_not_be_sent(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_SEND_SECONDS", math.inf)
    keys = make_keys()
    hub = RankHub(context, first_of(keys))
    link = RankLink(context, other_of(hub, keys), 1)
    with subprocess.Popen(["sleep", "60"]) as process:
        link.send(replace_struct(JOINED, pid=process.pid, machine=machine_id()))
        hub.gather(Joined, within=60, patience=60)
        hub.watch(machine_id())
        process.kill()
    link.close()
    with pytest.raises(RankError, match="died"):
        send_on(hub)
    hub.close()


@pytest.fixture
def slow_peer() -> Iterator[zmq.Socket[bytes]]:
    """A rank that takes a message from the connection only once it has read the one before."""
    with zmq.Context() as context, context.socket(zmq.PULL) as peer:
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.setsockopt(zmq.RCVTIMEO, 60_000)
        yield peer


def close_behind(hub: RankHub, context: zmq.Context[zmq.Socket[bytes]], peer: zmq.Socket[bytes]) -> threading.Thread:
    """Close a hub whose last message stands behind more than a connection holds; return who waits for its delivery."""
    peer.connect(hub.addresses[1][0])
    for _ in range(NUM_BEFORE):
        hub.send_all(Dismissed("x" * 2**20))
    hub.send_last(Shutdown())
    hub.close()
    closing = threading.Thread(target=context.term, daemon=True)
    closing.start()
    return closing


def test_the_last_message_of_a_closed_hub_reaches_a_rank_that_reads_late(
    context: zmq.Context[zmq.Socket[bytes]], slow_peer: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_SEND_SECONDS", math.inf), ("_LINGER_MS", 0), ("_LAST_LINGER_MS", -1)):  # -1: for ever
        monkeypatch.setattr(transport, name, value)
    closing = close_behind(RankHub(context, first_of(None)), context, slow_peer)
    assert closing.is_alive()
    messages = [transport.receive_parts(slow_peer, ToRank)[1] for _ in range(NUM_BEFORE + 1)]
    assert isinstance(messages[-1], Shutdown)
    closing.join(60)
    assert not closing.is_alive()


def test_a_closed_hub_waits_for_a_rank_that_never_reads_only_so_long(
    context: zmq.Context[zmq.Socket[bytes]], slow_peer: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_SEND_SECONDS", math.inf), ("_LINGER_MS", -1), ("_LAST_LINGER_MS", 1)):
        monkeypatch.setattr(transport, name, value)
    closing = close_behind(RankHub(context, first_of(None)), context, slow_peer)
    closing.join(60)
    assert not closing.is_alive()


@pytest.mark.parametrize("server_is_known", [False, True])
def test_a_rank_with_another_key_is_refused_and_that_is_logged(
    context: zmq.Context[zmq.Socket[bytes]], server_is_known: bool
) -> None:
    keys, wrong = make_keys(), make_keys()

    class Thief(CurveKeys):
        """Knows rank 0's public key, but not the secret one."""

        def secure_client(self, socket: zmq.Socket[bytes]) -> None:
            super().secure_client(socket)
            socket.curve_serverkey = keys.public

    hub = RankHub(context, first_of(keys))
    thief = Thief(wrong.public, wrong.secret) if server_is_known else wrong
    link = RankLink(context, other_of(hub, thief), 1)
    link.send(JOINED)
    with capture_logs() as logs:
        while not logs:
            assert hub.receive(0.1) is None
    with pytest.raises(RankError, match="has another --curve-key-file"):
        link.receive()
    assert logs[0]["event"] == "node_refused"
    hub.close()
    link.close()


def test_a_rank_without_any_key_is_not_heard(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    hub = RankHub(context, first_of(make_keys()))
    link = RankLink(context, other_of(hub, None), 1)
    link.send(JOINED)
    with capture_logs() as logs:
        while not logs:
            assert hub.receive(0.1) is None
    hub.close()
    link.close()


def test_a_key_file_is_private_kept_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "key"
    create_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    keys = load_keys(path)
    assert len(keys.secret) == len(keys.public) == 40
    assert keys.secret.decode() not in repr(keys)
    with pytest.raises(ConfigError, match="exists already"):
        create_keys(path)
    assert load_keys(path) == keys
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(path)


@pytest.mark.parametrize(
    "content", ["", 'curve\n    public-key = "x"\n', "curve\n    public-key = x\n    secret-key = y\n"]
)
def test_what_is_no_key_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="moeserve curve-key"):
        load_keys(path)


class Store:
    """torchrun's store, in which rank 0 has announced a life."""

    def __init__(self, life: int) -> None:
        self._said = msgspec.json.encode(Announcement(life, "tcp://127.0.0.1:1", ["tcp://127.0.0.1:2"] * 3, None))

    def get(self, key: str) -> bytes:
        return self._said


# life: of the context, 0 under a user's own torchrun. On node 0 it is the one that begins, elsewhere the last.
@pytest.mark.parametrize(
    ("node", "life", "meets"), [(0, 7, True), (0, 6, False), (0, 0, True), (1, 7, False), (1, 6, True)]
)
@pytest.mark.parametrize("loading", [True, False])
def test_a_rank_of_node_0_meets_in_the_life_that_begins_and_others_in_one_after_their_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int, life: int, meets: bool, loading: bool
) -> None:
    key = tmp_path / "key"
    create_keys(key)
    config = ServeConfig(expert_parallel_size=4, nnodes=2, node_rank=node, curve_key_file=str(key))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(meeting, "_store", lambda: Store(7))
    monkeypatch.setattr(meeting, "_SECONDS_TO_MEET", 0)
    here = RunContext(
        config=config,
        model_dir="",
        model_hash="",
        run_dir=str(tmp_path),
        incarnation=life,
        secret="",
        served_model_names=(),
        meets_in_store=True,
    )
    if meets:
        assert meeting.meet_first(here, loading=loading).incarnation == 7
    else:
        with pytest.raises(RankError, match="no new life in 0 s"):
            meeting.meet_first(here, loading=loading)


def test_settings_of_several_nodes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    create_keys(key)
    good = ServeConfig(
        expert_parallel_size=4, nnodes=2, rdzv_endpoint="127.0.0.1:29500", curve_key_file=str(key), node_rank=1
    )
    check_nodes(good)
    check_nodes(replace(good, node_rank=0))
    check_nodes(ServeConfig())
    for changes, sentence in (
        ({"expert_parallel_size": 3}, "^--expert-parallel-size 3: 3 ranks .* 2 nodes"),
        (
            {"expert_parallel_size": 3, "tensor_parallel_size": 3},
            "^--expert-parallel-size 3 --tensor-parallel-size 3: 9 ranks cannot be shared equally by 2 nodes",
        ),
        ({"expert_parallel_size": 1}, "--nnodes 2 needs"),
        ({"node_rank": 2}, "--node-rank 2"),
        ({"rdzv_endpoint": None}, "--rdzv-endpoint HOST:PORT"),
        ({"rdzv_endpoint": "host"}, "--rdzv-endpoint HOST:PORT"),
        ({"rdzv_endpoint": "host:0"}, "--rdzv-endpoint HOST:PORT"),
        ({"rdzv_endpoint": "192.0.2.1:29500", "node_rank": 0}, "no address of this machine"),
        ({"curve_key_file": None}, "--curve-key-file"),
        ({"curve_key_file": str(tmp_path / "none")}, "cannot be read as a key"),
        ({"nnodes": 1}, "is for several nodes"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            check_nodes(replace(good, **changes))


def test_loopback_leads_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert resolve("localhost") == own_address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert is_own("127.0.0.1")
    assert not is_own("192.0.2.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert interface_of("127.0.0.1") == "eth7"
    assert machine_id() == machine_id()
