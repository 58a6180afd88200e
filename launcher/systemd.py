"""Tells systemd (`Type=notify`) how the service stands."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> None:
    """Sends `READY=1` or `STOPPING=1` to the manager named by NOTIFY_SOCKET; without one there is nothing to do."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.connect("\0" + address[1:] if address.startswith("@") else address)
        manager.sendall(state.encode())
