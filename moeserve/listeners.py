"""Whose server it is that listens at the usual address, to which commands give a key and prompts unless told another
one: on a machine of several users any of them may listen there."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

USUAL_PORT = 8000
USUAL_URL = f"http://127.0.0.1:{USUAL_PORT}"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"
# The addresses whose sockets a connection to 127.0.0.1 may reach.
_REACHED = (
    (socket.AF_INET, "127.0.0.1"),
    (socket.AF_INET, "0.0.0.0"),
    (socket.AF_INET6, "::"),
    (socket.AF_INET6, "::ffff:127.0.0.1"),
)


def why_not_own(port: int = USUAL_PORT, tables: Sequence[Path] = _TABLES) -> str | None:
    """Return why a server on this machine gets no key unless it is named; None if this user or root runs it."""
    found = _owners(port, tables)
    url = f"http://127.0.0.1:{port}"
    if not found:
        return f"No server of this machine listens at {url}: start one with `moeserve serve`, or name one with --url."
    if found <= {os.geteuid(), 0}:
        return None
    return f"The server at {url} is another user's: if it is to get your prompts and key, say --url {url}."


def _owners(port: int, tables: Sequence[Path]) -> set[int]:
    """Return the user ids of the sockets that a connection to the port at 127.0.0.1 may reach."""
    addresses = {_in_table(family, text) for family, text in _REACHED}
    owners = set()
    for table in tables:
        try:
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
        except OSError:
            continue
        for _, local, _, state, _, _, _, uid, *_ in rows:
            address, _, its_port = local.partition(":")
            if state == _LISTENS and int(its_port, 16) == port and address in addresses:
                owners.add(int(uid))
    return owners


def _in_table(family: socket.AddressFamily, address: str) -> str:
    """Return an address as the kernel's tables have it: words of 32 bits in the machine's order of bytes."""
    data = socket.inet_pton(family, address)
    words = (data[at : at + 4] for at in range(0, len(data), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
