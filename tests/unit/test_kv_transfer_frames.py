"""The frames between services as bytes, equal to the golden file: who changes them raises the number in `TRANSPORT`."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from moeserve.engine.curve import Gatekeeper, create_keys, load_keys
from moeserve.engine.kv.disk.copier import BlockBuffer
from moeserve.engine.kv.transfer.fetcher import Fetch
from moeserve.engine.kv.transfer.messages import FREE
from moeserve.engine.kv.transfer.server import BlockServer
from moeserve.kv_transfer import TRANSPORT, KvTicket
from moeserve.scheduling.kv_transfer import FetchJob
from radix_cache import BlockCopy

GOLDEN = Path(__file__).parents[1] / "support" / "golden" / "kv_transfer.txt"
MEMORY = [np.arange(first, first + 8, dtype=np.uint8).reshape(1, 4, 2) for first in (0, 16)]


class Recorded:
    """A socket that notes the frames that are sent through it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.lines: list[str] = []
        self._socket = socket

    def send_multipart(self, frames: list[bytes]) -> None:
        self.note(frames)
        self._socket.send_multipart(frames)

    def note(self, frames: list[bytes]) -> None:
        self.lines.append(" ".join(frame.hex() or "-" for frame in frames))


def test_the_frames_are_those_of_the_golden_file(tmp_path: Path) -> None:
    create_keys(tmp_path / "kv.key")
    keys = load_keys(tmp_path / "kv.key", "")
    job = FetchJob(KvTicket(request_id="t"), 0, [BlockCopy(block, b"", "", block, b"") for block in range(4)])
    with ExitStack() as ends:
        sockets = ends.enter_context(zmq.Context[Any]())
        ends.enter_context(closing(Gatekeeper(sockets, keys)))
        server = BlockServer(sockets, keys, "tcp://127.0.0.1:*", MEMORY)
        ends.callback(server.stop)
        server.serve(lambda _: [3, 1])
        socket = ends.enter_context(sockets.socket(zmq.DEALER))
        keys.secure_client(socket)
        socket.connect(f"tcp://127.0.0.1:{server.port}")
        recorded = Recorded(socket)
        Fetch(job, BlockBuffer(MEMORY)).ask(recorded)
        for _ in range(3):
            recorded.note(socket.recv_multipart())
        recorded.send_multipart([b"", FREE, b"t"])
    assert "\n".join([TRANSPORT, *recorded.lines, ""]) == GOLDEN.read_text()
