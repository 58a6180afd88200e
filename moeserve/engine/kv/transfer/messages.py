"""The messages of a fetch, ZeroMQ frames: what the service that decodes asks, and what the one that holds KV answers.

- `["", "GET", ticket, first, count]` asks for blocks of a ticket, by their numbers in the prompt. Each comes as
  `["", "BLOCK", ticket, number, bytes]`, in order; `["", "NONE", ticket]` says that the next one is not held.
- `["", "FREE", ticket]` ends the lease; there is no answer.

A block's bytes lie in the arrays of KV memory one after another, layer by layer. Numbers are 4 bytes, little-endian.
Both ends hold the same key (ZeroMQ CURVE): it encrypts every frame, and a frame that was changed on its way is not
accepted.
"""

from __future__ import annotations

import struct

GET, FREE, BLOCK, NONE = b"GET", b"FREE", b"BLOCK", b"NONE"
BLOCKS_AT_ONCE = 8  # blocks that one GET asks for
MAX_REQUEST_BYTES = 1024
# Messages that wait for one peer: if it does not read them it costs no more memory than theirs. A fetch has two GETs on
# their way, each answered by one message a block or fewer.
MOST_WAITING = 32

_NUMBER = struct.Struct("<I")


def pack_number(number: int) -> bytes:
    return _NUMBER.pack(number)


def read_number(frame: bytes) -> int:
    """Return the number in a frame, -1 if there is none."""
    return int(_NUMBER.unpack(frame)[0]) if len(frame) == _NUMBER.size else -1
