"""The messages of a fetch, ZeroMQ frames: what the service that decodes asks, and what the one that holds KV answers.

- `["", "GET", ticket, first, count]` asks for blocks of a ticket, by their numbers in the prompt. Each comes as
  `["", "BLOCK", ticket, number, array, bytes]`, in order; `["", "NONE", ticket]` says that they are not held any more.
- `["", "PART", ticket, number, array, bytes]` has the first layers of a block whose other layers are still computed.

  A block's bytes lie in the arrays of KV memory one after another, layer by layer. `array` is the number of the first
  one whose bytes a message has: 0, or the one behind those of the block's last `PART`. `BLOCK` has all the rest.
- `["", "WAIT", ticket]` says now and then that the next block is still being computed.
- `["", "FREE", ticket]` ends the lease; there is no answer.

Numbers are 4 bytes, little-endian. Both ends hold the same key (ZeroMQ CURVE): it encrypts every frame, and a
frame that was changed on its way is not accepted.
"""

from __future__ import annotations

import struct

GET, FREE, BLOCK, PART, NONE, WAIT = b"GET", b"FREE", b"BLOCK", b"PART", b"NONE", b"WAIT"
BLOCKS_AT_ONCE = 8  # blocks that one GET asks for
MAX_REQUEST_BYTES = 1024
# Messages that wait for one peer: if it does not read them it costs no more memory than theirs. A fetch has 16 blocks
# on their way, each in up to five messages.
MOST_WAITING = 128

_NUMBER = struct.Struct("<I")


def pack_number(number: int) -> bytes:
    return _NUMBER.pack(number)


def read_number(frame: bytes) -> int:
    """Return the number in a frame, -1 if there is none."""
    return int(_NUMBER.unpack(frame)[0]) if len(frame) == _NUMBER.size else -1
