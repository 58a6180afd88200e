"""Messages, plans and results as bytes: a message, a plan, or DecodeError, and nothing else."""

from __future__ import annotations

from array import array
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve import wire
from moeserve.plan import (
    MAX_ANNOTATION_BYTES,
    Chunk,
    ChunkExtras,
    FinishReason,
    SamplingParams,
    StateUse,
    StepPlan,
    TokenLogprobs,
    WindowTable,
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
    decode_plan,
    encode_plan,
)
from tests.support.examples import examples

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


INT32 = st.integers(-(2**31), 2**31 - 1)
ARRAYS = st.lists(INT32, max_size=9).map(lambda values: array("i", values))
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**40),
    temperature=st.floats(0, 2),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.none() | st.integers(0, 20),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    grammar=st.none() | st.just('start: "é"'),
)
EXTRAS = st.builds(
    ChunkExtras,
    history=st.none() | ARRAYS,
    num_prompt_tokens=st.integers(0, 2**31),
    banned_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    prompt_targets=st.none() | ARRAYS,
    num_top_logprobs=st.integers(0, 20),
    output=st.none() | ARRAYS,
)
ROWS = st.integers(0, 2**31)
CHUNKS = st.builds(
    Chunk,
    request_id=st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    token_ids=ARRAYS,
    start=st.integers(0, 2**31),
    block_table=ARRAYS,
    sampling=st.none() | SAMPLING,
    extras=st.none() | EXTRAS,
    annotation=st.none() | st.binary(max_size=9),
    state=st.none() | st.builds(StateUse, ROWS, st.none() | ROWS, st.none() | ROWS),
    first_angle=st.sampled_from([0, 4096]),
    window=st.none() | st.builds(WindowTable, ROWS, ARRAYS),
)
PLANS = st.builds(
    StepPlan,
    step=st.integers(0, 2**62),
    chunks=st.lists(CHUNKS, max_size=4),
    zeroed_blocks=ARRAYS,
    zeroed_windows=st.just(array("i")) | ARRAYS,
)


@examples(0.6)
@given(PLANS)
def test_a_plan_survives_the_wire(plan: StepPlan) -> None:
    data = encode_plan(plan)
    decoded = decode_plan(data)
    assert decoded == plan
    assert encode_plan(decoded) == data


def test_encoding_takes_a_copy() -> None:
    block_table = array("i", [5])
    plan = StepPlan(1, [Chunk("r", array("i", [1]), 0, block_table, None)])
    data = encode_plan(plan)
    block_table.append(6)
    assert decode_plan(data).chunks[0].block_table == array("i", [5])


def test_plans_carry_nothing_for_states_and_angles_that_models_do_not_have() -> None:
    chunk = Chunk("r", array("i", [1]), 0, array("i", [5]), None)
    assert len(msgpack.unpackb(encode_plan(StepPlan(1, [chunk])))) == 3
    chunk.state = StateUse(0)
    assert len(msgpack.unpackb(encode_plan(StepPlan(1, [chunk])))) == 4
    chunk.first_angle = 4096
    assert len(msgpack.unpackb(encode_plan(StepPlan(1, [chunk])))) == 5


def test_an_annotation_beyond_its_bound_is_refused() -> None:
    chunk = Chunk("r", array("i", [1]), 16, array("i", [5]), None, annotation=bytes(MAX_ANNOTATION_BYTES))
    assert decode_plan(encode_plan(StepPlan(1, [chunk]))).chunks == [chunk]
    chunk.annotation = bytes(MAX_ANNOTATION_BYTES + 1)
    with pytest.raises(DecodeError):
        decode_plan(encode_plan(StepPlan(1, [chunk])))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93",
        msgpack.packb(7),
        msgpack.packb([1, []]),
        msgpack.packb([1, [["r", b"\0" * 4, 0, b"\0" * 3, None, None]], b""]),
        msgpack.packb([1, [["r", "text", 0, b"", None, None]], b""]),
        msgpack.packb([1, [["r", b"", 0, b"", {"max_tokens": "x"}, None]], b""]),
        msgpack.packb([1, [], msgpack.ExtType(4, b"x")]),
        msgpack.packb([1, [], b""]) + b"\0",
        msgpack.packb([1, [], b"", [[0, None, None]]]),
        b"\x91" * 5000,
    ],
)
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_plan(data)


@examples(1.5)
@given(PLANS, st.data())
def test_a_damaged_plan_is_refused_or_is_another_plan(plan: StepPlan, data: st.DataObject) -> None:
    frame = bytearray(encode_plan(plan))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_plan(bytes(frame))
    except DecodeError:
        return
    assert isinstance(decoded, StepPlan)
