"""The bytes of messages, between frontend and engine and between ranks.

`msgpack` reads and writes the bytes under limits; `msgspec.convert` gives them types. Each frame is
`[incarnation, message]`: whoever receives one of another engine's life drops it. Token ids travel as int32 bytes.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgpack
import msgspec

MAX_FRAME_BYTES = 64 * 1024 * 1024


class DecodeError(ValueError):
    """A frame that is no message of this protocol. It concerns its sender alone."""


def encode(message: msgspec.Struct, incarnation: int) -> bytes:
    """The frame of a message."""
    packed: bytes = msgpack.packb([incarnation, msgspec.to_builtins(message, builtin_types=(bytes,))])
    return packed


def decode(frame: bytes, expected: Any) -> tuple[int, Any]:
    """The incarnation and the message of a frame that must hold one of the `expected` types.

    Raises DecodeError for anything else: too large, not MessagePack, extension types, deep nesting, wrong fields.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise DecodeError(f"frame of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")
    try:
        body = msgpack.unpackb(
            frame,
            use_list=True,
            strict_map_key=False,
            ext_hook=_refuse_extension,
            max_ext_len=0,
            max_array_len=1_000_000,
            max_map_len=65_536,
        )
        if not isinstance(body, list) or len(body) != 2 or type(body[0]) is not int:
            raise DecodeError("frame is not [incarnation, message]")
        return body[0], msgspec.convert(body[1], expected)
    except DecodeError:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"{type(error).__name__}: {error}") from None


def pack_token_ids(token_ids: list[int] | array[int]) -> bytes:
    """int32 bytes of token ids."""
    return array("i", token_ids).tobytes()


def unpack_token_ids(data: bytes) -> array[int]:
    """Token ids from int32 bytes; raises DecodeError for a torn one."""
    token_ids = array("i")
    if len(data) % token_ids.itemsize:
        raise DecodeError("token ids are not whole int32 values")
    token_ids.frombytes(data)
    return token_ids


def _refuse_extension(code: int, _data: bytes) -> None:
    raise DecodeError(f"extension type {code}")
