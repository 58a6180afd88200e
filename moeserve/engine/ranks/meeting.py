"""Where the ranks of one service meet: addresses, the key that nodes share, and the network between them.

Ranks meet once to load and once for every life of the engine. Ranks that one supervisor started read everything from
their run context. Otherwise rank 0 announces its sockets in torchrun's store; a new life's sockets replace the former
ones. Anybody who reaches the store's port can write to it, so between nodes only the key decides: ranks
talk only to holders of the same key. The key encrypts their messages (ZeroMQ CURVE); one key pair serves both ends. It
does not cover tensors, which travel through torch's own collectives. Addresses are IPv4.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moeserve.engine.curve import CurveKeys, load_keys
from moeserve.engine.ranks.messages import RankError
from moeserve.run_context import RunContext

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_STORE_KEY, _LOADING_KEY = "moeserve", "moeserve.loading"
_SECONDS_TO_MEET = 300  # within which a rank must find rank 0
_POLL_SECONDS = 0.1  # between two looks into the store
_SIOCGIFADDR = 0x8915
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Announcement(msgspec.Struct):
    """The sockets of rank 0. steps[r - 1]: for rank r. collectives: as in `Meeting`."""

    incarnation: int
    results: str
    steps: list[str]
    collectives: str | None


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The addresses at which ranks meet, as one rank sees them.

    Rank 0 binds the addresses, and `*` stands for a free port; the other ranks connect to them. collectives: the file
    through which ranks start their collectives, None for torchrun's store. interface: the collectives' network
    interface. loading: ranks meet to load their parts of the model, and start no collectives.
    """

    incarnation: int
    results: str
    steps: tuple[str, ...]
    collectives: Path | None
    interface: str
    keys: CurveKeys | None = None
    loading: bool = False

    @property
    def rendezvous(self) -> Path | Store | None:
        """The place where collectives start: a file, or for CPUs of several nodes a part of the store for this life.

        None for GPUs of several nodes: they have one life in torchrun's store.
        """
        if self.collectives is not None or os.environ.get("DS_ACCELERATOR") == "cuda":
            return self.collectives
        from torch._C._distributed_c10d import PrefixStore

        return PrefixStore(f"{_STORE_KEY}.{self.incarnation}", _store())

    def announce(self, results: str, steps: list[str]) -> None:
        """Publish the bound addresses in torchrun's store."""
        collectives = None if self.collectives is None else str(self.collectives)
        announcement = Announcement(self.incarnation, results, steps, collectives)
        key = _LOADING_KEY if self.loading else _STORE_KEY
        _store().set(key, msgspec.json.encode(announcement).decode())


def meet_as_first(context: RunContext, *, loading: bool = False) -> Meeting:
    """Return the addresses that rank 0 binds. Raise ConfigError or RankError."""
    config = context.config
    if config.nnodes == 1:
        return _meet_in_directory(context, loading)
    assert config.curve_key_file is not None
    host = os.environ["MASTER_ADDR"]
    address = resolve(host)
    return Meeting(
        incarnation=context.incarnation,
        results=f"tcp://{address}:*",
        steps=tuple(f"tcp://{address}:*" for _ in range(1, config.num_ranks)),
        collectives=None,
        interface=interface_of(address),
        keys=load_keys(Path(config.curve_key_file)),
        loading=loading,
    )


def meet_first(context: RunContext, *, loading: bool = False) -> Meeting:
    """Return where another rank finds rank 0, once rank 0 has announced it. Raise ConfigError or RankError.

    In the store a rank of node 0 waits for the life of `context`. One of another node, or of a user's own torchrun,
    waits for a life other than that, which is the last one that it was in.
    """
    config = context.config
    if not context.meets_in_store:
        return _meet_in_directory(context, loading)
    try:
        key, knows_life = _LOADING_KEY if loading else _STORE_KEY, config.node_rank == 0 and context.incarnation > 0
        announced = _read_announcement(key, context.incarnation, knows_life=knows_life)
    except (RuntimeError, msgspec.MsgspecError) as error:
        raise RankError(
            f"Rank 0 does not say in torchrun's store where it is: {str(error).partition('.')[0]}."
        ) from None
    several = config.nnodes > 1
    assert not several or config.curve_key_file is not None
    return Meeting(
        incarnation=announced.incarnation,
        results=announced.results,
        steps=tuple(announced.steps),
        collectives=None if announced.collectives is None else Path(announced.collectives),
        interface=interface_of(own_address_towards(os.environ["MASTER_ADDR"])) if several else "lo",
        keys=load_keys(Path(config.curve_key_file)) if several and config.curve_key_file else None,
        loading=loading,
    )


def _read_announcement(key: str, life: int, *, knows_life: bool) -> Announcement:
    """Return what rank 0 announces of a `life`, or of any other one unless the rank `knows_life`.

    Raise RuntimeError if it does not in time.
    """
    store, deadline = _store(), time.monotonic() + _SECONDS_TO_MEET
    while True:
        announced = msgspec.json.decode(store.get(key), type=Announcement)
        if (announced.incarnation == life) == knows_life:
            return announced
        if time.monotonic() > deadline:
            raise RuntimeError(f"no new life in {_SECONDS_TO_MEET} s")
        time.sleep(_POLL_SECONDS)


def _meet_in_directory(context: RunContext, loading: bool) -> Meeting:
    return Meeting(
        incarnation=context.incarnation,
        results=context.results_address(loading),
        steps=tuple(context.steps_address(rank, loading) for rank in range(1, context.config.num_ranks)),
        collectives=context.rendezvous,
        interface="lo",
        loading=loading,
    )


def _store() -> Store:
    from torch.distributed.rendezvous import rendezvous

    store: Store = next(rendezvous("env://", timeout=timedelta(seconds=_SECONDS_TO_MEET)))[0]
    return store


def machine_id() -> str:
    """Return a text that is equal for two processes exactly if they see each other's process ids."""
    return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def resolve(host: str) -> str:
    """Return the IPv4 address of a host. Raise RankError if it has none."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        raise RankError(f"{host} has no IPv4 address: check --rdzv-endpoint.") from None


def is_own(address: str) -> bool:
    """Return whether an IPv4 address belongs to this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def own_address_towards(host: str) -> str:
    """Return this machine's IPv4 address on the route to `host`. Send nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((resolve(host), 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the interface with this IPv4 address; GLOO_SOCKET_IFNAME overrides it. Raise RankError if none has it."""
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        return chosen
    wanted = socket.inet_aton(address)
    if wanted[0] == 127:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                # This interface has no IPv4 address.
                continue
            if reply[20:24] == wanted:
                return name
    raise RankError(f"No network interface has the address {address}: set GLOO_SOCKET_IFNAME.")
