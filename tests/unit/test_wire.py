"""Messages, plans and results as bytes: a message, a plan, or DecodeError, and nothing else."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve import wire
from moeserve.plan import (
    FinishReason,
    SamplingParams,
    TokenLogprobs,
)
from moeserve.wire import (
    Abort,
    Admitted,
    Control,
    ControlResult,
    DecodeError,
    Finish,
    Generate,
    Heartbeat,
    Hello,
    Output,
    Outputs,
    Rejected,
)

KINDS = (wire.ToEngine, wire.FromEngine, Heartbeat)
SAMPLES: list[wire.Message] = [
    Hello(1, "hash"),
    Generate("r", wire.pack_token_ids([1, 2, 3]), SamplingParams(max_tokens=5, logit_bias={3: -1.5}), "ns", -2),
    Finish("r", 3),
    Abort("r"),
    Control(1, "reset_prefix_cache"),
    Admitted("r"),
    Rejected("r", "queue_full", "why", 1.5),
    ControlResult(4, {"blocks_freed": 7}, None),
    Outputs(
        [
            Output("r", [1, 2], None, 3, None, [TokenLogprobs(-0.5, ((1, -0.5), (2, -1.0))), TokenLogprobs(-1.0)]),
            Output("q", [], FinishReason.LENGTH, 0, 9),
        ]
    ),
    Heartbeat(7, 8, True),
]
BUILTINS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=20,
)


def decode_all(frame: bytes) -> None:
    for kinds in KINDS:
        try:
            incarnation, message = wire.decode(frame, kinds)
        except DecodeError:
            continue
        assert type(incarnation) is int
        assert isinstance(message, wire.Message)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message, 3), type(message)) == (3, message)


@given(st.binary(max_size=200))
def test_random_bytes_decode_or_are_refused(frame: bytes) -> None:
    decode_all(frame)


@given(BUILTINS)
def test_random_values_decode_or_are_refused(value: Any) -> None:
    decode_all(msgpack.packb([1, value]))


@given(st.sampled_from(SAMPLES), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=8), st.data())
def test_mutated_frames_decode_or_are_refused(
    message: wire.Message, changes: list[tuple[int, int]], data: st.DataObject
) -> None:
    frame = bytearray(wire.encode(message, 1))
    for position, byte in changes:
        frame[position % len(frame)] = byte
    decode_all(bytes(frame[: data.draw(st.integers(0, len(frame)))]))


@given(st.sampled_from(SAMPLES), st.data())
def test_messages_with_one_foreign_field_decode_or_are_refused(message: wire.Message, data: st.DataObject) -> None:
    body = msgspec.to_builtins(message, builtin_types=(bytes,))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(BUILTINS)
    decode_all(msgpack.packb([1, body]))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, ["Abort", "r"]]) + b"\x00",
        msgpack.packb(["1", ["Abort", "r"]]),
        msgpack.packb([True, ["Abort", "r"]]),
        msgpack.packb([1, ["Launch", "r"]]),
        msgpack.packb([1, ["Abort"]]),
        msgpack.packb([1, msgpack.ExtType(42, b"x")]),
        msgpack.packb([1, msgpack.Timestamp(1)]),
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x00" * (wire.MAX_FRAME_BYTES + 1),
    ],
    ids=range(14),
)
def test_known_troublemakers_are_refused(frame: bytes) -> None:
    for kinds in KINDS:
        with pytest.raises(DecodeError):
            wire.decode(frame, kinds)


@given(st.binary(max_size=40))
def test_token_ids_are_whole_numbers_or_refused(data: bytes) -> None:
    if len(data) % 4:
        with pytest.raises(DecodeError):
            wire.unpack_token_ids(data)
    else:
        assert wire.pack_token_ids(wire.unpack_token_ids(data)) == data
