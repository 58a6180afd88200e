"""Plans survive the wire unchanged, and what is no plan is refused."""

from __future__ import annotations

from array import array

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.plan import MAX_ANNOTATION_BYTES, Chunk, ChunkExtras, SamplingParams, StepPlan
from moeserve.wire import DecodeError, decode_plan, encode_plan

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
)
EXTRAS = st.builds(
    ChunkExtras,
    history=st.none() | ARRAYS,
    num_prompt_tokens=st.integers(0, 2**31),
    banned_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    prompt_targets=st.none() | ARRAYS,
    num_top_logprobs=st.integers(0, 20),
)
CHUNKS = st.builds(
    Chunk,
    request_id=st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    token_ids=ARRAYS,
    start=st.integers(0, 2**31),
    block_table=ARRAYS,
    sampling=st.none() | SAMPLING,
    extras=st.none() | EXTRAS,
    annotation=st.none() | st.binary(max_size=9),
)
PLANS = st.builds(StepPlan, step=st.integers(0, 2**62), chunks=st.lists(CHUNKS, max_size=4), zeroed_blocks=ARRAYS)


@settings(max_examples=60, deadline=None)
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
        b"\x91" * 5000,
    ],
)
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_plan(data)


@settings(max_examples=150, deadline=None)
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
