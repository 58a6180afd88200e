"""What the model process tells the supervisor, one JSON object per line on a pipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TextIO

import msgspec

# Called by the engine with an object that carries "event" and the fields of one class below.
Report = Callable[[dict[str, Any]], None]


class Loading(msgspec.Struct, tag_field="event", tag="loading"):
    """Bytes of weights read so far, of how many."""

    done: int
    total: int
    stage: str = "loading weights"


class Ready(msgspec.Struct, tag_field="event", tag="ready"):
    """The engine takes requests. `model_max_len` is what the model allows; `max_model_len` may be clamped below it.

    `no_compiled_kernels` says in a sentence why torch computes on the CPU in their place, if so.
    """

    device: str
    dtype: str
    weights_bytes: int
    kv_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    model_max_len: int | None = None
    no_compiled_kernels: str | None = None


class Computing(msgspec.Struct, tag_field="event", tag="computing"):
    """A rank other than 0 takes steps from now on."""


class Failed(msgspec.Struct, tag_field="event", tag="error"):
    """The engine ends; one sentence why."""

    message: str


Status = Loading | Ready | Computing | Failed
_decoder = msgspec.json.Decoder(Status)
_encoder = msgspec.json.Encoder()


def decode_status(line: bytes) -> Status:
    """The status in one line; one that is not understood becomes `Failed`."""
    try:
        status: Status = _decoder.decode(line)
    except msgspec.MsgspecError as error:
        return Failed(f"The model process sent a status that is not understood: {error}.")
    return status


def reporter(pipe: TextIO) -> Report:
    """A function that writes one status per call to `pipe`."""

    def report(status: dict[str, Any]) -> None:
        pipe.write(_encoder.encode(status).decode() + "\n")
        pipe.flush()

    return report
