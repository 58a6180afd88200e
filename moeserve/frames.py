"""The bytes of messages, between frontend and engine and between ranks, and of what they carry.

`msgpack` reads and writes the bytes under limits; `msgspec.convert` gives them types. Each frame is
`[incarnation, message]`: whoever receives one of another engine's life drops it. Token ids travel as int32 bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack
import msgspec

MAX_FRAME_BYTES = 64 * 1024 * 1024

_T = TypeVar("_T")


class DecodeError(ValueError):
    """A frame that is no message of this protocol. It concerns its sender alone."""


def encode(message: msgspec.Struct, incarnation: int) -> bytes:
    """The frame of a message."""
    return pack([incarnation, message])


def decode(frame: bytes, expected: Any) -> tuple[int, Any]:
    """The incarnation and the message of a frame that must hold one of the `expected` types. Raises DecodeError."""

    def opened(body: Any) -> tuple[int, Any]:
        if not isinstance(body, list) or len(body) != 2 or type(body[0]) is not int:
            raise DecodeError("frame is not [incarnation, message]")
        return body[0], msgspec.convert(body[1], expected)

    return _unpack(frame, opened)


def pack(value: Any) -> bytes:
    """The bytes of structs and what they are made of. Equal ones have equal bytes."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(value, builtin_types=(bytes,)))
    return packed


def unpack(data: bytes, kind: type[_T]) -> _T:
    """The value of such bytes, which must be of that kind. Raises DecodeError."""
    return _unpack(data, lambda body: msgspec.convert(body, kind))


def _unpack(data: bytes, convert: Callable[[Any], _T]) -> _T:
    """Raises DecodeError for anything else: too large, not MessagePack, extension types, deep nesting, wrong fields."""
    if len(data) > MAX_FRAME_BYTES:
        raise DecodeError(f"{len(data)} bytes exceed {MAX_FRAME_BYTES}")
    try:
        return convert(
            msgpack.unpackb(
                data,
                use_list=True,
                strict_map_key=False,
                ext_hook=_refuse_extension,
                max_ext_len=0,
                max_array_len=1_000_000,
                max_map_len=65_536,
            )
        )
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
