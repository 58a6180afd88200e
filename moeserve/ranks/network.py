"""Which of a machine's addresses and network interfaces its ranks use to reach another node. IPv4 only."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

from moeserve.ranks.messages import RankError

_SIOCGIFADDR = 0x8915
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Equal for two processes exactly if they see each other's process ids."""
    return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def resolve(host: str) -> str:
    """The IPv4 address of a host. Raises RankError."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        raise RankError(f"{host} has no IPv4 address: check --rdzv-endpoint.") from None


def is_own(address: str) -> bool:
    """Whether an IPv4 address belongs to this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def own_address_towards(host: str) -> str:
    """The address of this machine from which packets to `host` leave; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((resolve(host), 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address; that of GLOO_SOCKET_IFNAME if it is set."""
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
                # Without an IPv4 address.
                continue
            if reply[20:24] == wanted:
                return name
    raise RankError(f"No network interface has the address {address}: set GLOO_SOCKET_IFNAME.")
