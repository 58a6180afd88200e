"""The frames between services as bytes, equal to the golden file: who changes them raises the number in `TRANSPORT`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import zmq

from moeserve.engine.kv_disk.copier import BlockBuffer
from moeserve.engine.kv_transfer.answers import Answers, Coming
from moeserve.engine.kv_transfer.fetcher import Fetch
from moeserve.kv_transfer import TRANSPORT, KvTicket
from moeserve.scheduling.kv_transfer import FetchJob
from radix_cache import BlockCopy

GOLDEN = Path(__file__).parents[1] / "support" / "golden" / "kv_transfer.txt"
MEMORY = [np.arange(first, first + 8, dtype=np.uint8).reshape(1, 4, 2) for first in (0, 16)]


class Frames:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def send_multipart(self, frames: list[bytes], *_: Any, **__: Any) -> None:
        self.lines.append(" ".join(frame.hex() or "-" for frame in frames))


class Prompt:
    """Four blocks, of which `count` are computed; step 1 computes the next one and has filled the first array."""

    count = 2

    def blocks(self, _: str) -> list[int]:
        return list(range(self.count))

    def is_growing(self, _: str) -> bool:
        return self.count < 3

    def coming(self, _: str) -> Coming | None:
        return Coming(1, [0, 1, 2], 1)

    def is_present(self, _: object) -> bool:
        return self.count == 2

    def is_last(self, _: object) -> bool:
        return self.count == 3


def test_the_frames_are_those_of_the_golden_file() -> None:
    frames, prompt = Frames(), Prompt()
    socket = cast(zmq.Socket[bytes], frames)
    job = FetchJob(KvTicket(request_id="t"), 0, [BlockCopy(block, b"", "", block, b"") for block in range(4)])
    Fetch(job, BlockBuffer(MEMORY)).ask(socket)
    answers = Answers(socket, prompt, BlockBuffer(MEMORY))
    answers.take(b"me", b"t", 0, 4)
    answers.send()
    prompt.count = 3
    answers.send()
    assert "\n".join([TRANSPORT, *frames.lines, ""]) == GOLDEN.read_text()
    assert not answers.has_waiting
