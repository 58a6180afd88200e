"""The link of plans: whatever goes in comes out, in a few bytes per running request."""

from __future__ import annotations

from array import array
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.engine.ranks.plan_link import PlanReceiver, PlanSender
from moeserve.plan import (
    Chunk,
    ChunkExtras,
    SamplingParams,
    StateUse,
    StepPlan,
    WindowTable,
)
from moeserve.wire import DecodeError
from tests.support.examples import examples

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
    mask=st.none() | st.binary(max_size=8),
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
    state=st.none() | st.builds(StateUse, ROWS, st.none() | ROWS, st.none() | ROWS),
    window=st.none() | st.builds(WindowTable, ROWS, ARRAYS),
)
PLANS = st.builds(
    StepPlan,
    step=st.integers(0, 2**62),
    chunks=st.lists(CHUNKS, max_size=4, unique_by=lambda chunk: chunk.request_id),
    zeroed_blocks=ARRAYS,
    zeroed_windows=st.just(array("i")) | ARRAYS,
    copied_blocks=st.just(array("i")) | ARRAYS,
)


TOKENS = st.integers(0, 3)


def grown(draw: st.DrawFn, values: array[int]) -> array[int]:
    """Return values as they may be a step later: mostly the same with a few more, sometimes fewer or others."""
    kind = draw(st.sampled_from(["grown"] * 4 + ["same", "cut", "other", "adopted"]))
    changed = values[:]
    if kind == "cut":
        changed = changed[: draw(st.integers(0, len(changed)))]
    elif kind == "other":
        changed = array("i")
    elif kind == "adopted" and changed:
        changed[draw(st.integers(0, len(changed) - 1))] += 1
    if kind != "same":
        changed.extend(draw(st.lists(TOKENS, max_size=3)))
    return changed


@st.composite
def sequences(draw: st.DrawFn) -> list[StepPlan]:
    """Return plans of a few requests that run, pause, shrink, move, change their minds and end."""
    chunks = {
        name: Chunk(name, array("i"), 0, array("i"), draw(SAMPLING), ChunkExtras(), window=WindowTable(0, array("i")))
        for name in draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True))
    }
    plans = []
    for step in range(draw(st.integers(1, 9))):
        planned = []
        for name in draw(st.lists(st.sampled_from(sorted(chunks)), unique=True)):
            before = chunks[name]
            assert before.extras is not None
            assert before.window is not None
            passed = draw(st.integers(-1, 2))
            extras = replace(
                before.extras,
                history=grown(draw, before.extras.history or array("i")),
                mask=draw(st.none() | st.just(before.extras.mask) | st.binary(max_size=2)),
                num_prompt_tokens=draw(st.integers(0, 1)),
                banned_token_ids=draw(st.sampled_from([(), (1,), (1, 2)])),
            )
            chunks[name] = Chunk(
                name,
                draw(st.lists(TOKENS, max_size=3).map(lambda tokens: array("i", tokens))),
                draw(st.integers(0, 9)),
                grown(draw, before.block_table),
                draw(SAMPLING) if draw(st.integers(0, 4)) == 0 else before.sampling,
                extras,
                draw(st.none() | st.integers(0, 3)),
                draw(st.none() | st.builds(StateUse, ROWS, st.none() | ROWS, st.none() | ROWS)),
                WindowTable(before.window.first + passed, grown(draw, before.window.blocks[max(0, passed) :])),
            )
            shown = chunks[name]
            if draw(st.booleans()):
                # A decode with as many drafts as it has tokens beyond the first, which needs nothing else.
                plain = {"extras": None, "drawn_by": None, "state": None, "window": None}
                shown = replace(shown, **plain, num_drafts=max(0, len(shown.token_ids) - 1))
            elif draw(st.booleans()):
                # A chunk amid a prompt, whose sampled successor follows in a later plan.
                following = draw(st.none() | st.integers(0, 9))
                shown = replace(shown, sampling=None, extras=None, window=None, following=following)
            elif draw(st.booleans()):
                shown = replace(shown, extras=replace(extras, history=None))
            planned.append(shown)
        plans.append(StepPlan(step, planned, draw(ARRAYS), draw(ARRAYS), draw(ARRAYS)))
    return plans


def snapshot(plan: StepPlan) -> StepPlan:
    """Return a copy that later growth of block tables does not change."""
    return replace(plan, chunks=[replace(chunk, block_table=chunk.block_table[:]) for chunk in plan.chunks])


@examples(1.5)
@given(sequences())
def test_every_plan_of_a_sequence_comes_out_as_it_went_in(plans: list[StepPlan]) -> None:
    sender, receiver = PlanSender(), PlanReceiver()
    received = []
    for plan in plans:
        decoded = receiver.decode(sender.encode(plan))
        assert decoded == plan
        received.append((decoded, snapshot(decoded)))
    for decoded, at_first in received:
        # A plan in flight keeps what it was but for block tables that grow.
        for chunk, before in zip(decoded.chunks, at_first.chunks, strict=True):
            assert chunk.block_table[: len(before.block_table)] == before.block_table
        assert replace(decoded, chunks=[]) == replace(at_first, chunks=[])
        assert [replace(chunk, block_table=array("i")) for chunk in decoded.chunks] == [
            replace(chunk, block_table=array("i")) for chunk in at_first.chunks
        ]


@examples(0.6)
@given(st.lists(PLANS, max_size=4))
def test_plans_that_have_nothing_in_common_come_out_as_they_went_in(plans: list[StepPlan]) -> None:
    sender, receiver = PlanSender(), PlanReceiver()
    for plan in plans:
        assert receiver.decode(sender.encode(plan)) == plan


@examples(0.6)
@given(sequences(), sequences())
def test_a_new_sender_is_understood_by_a_receiver_that_knows_another(
    before: list[StepPlan], after: list[StepPlan]
) -> None:
    receiver = PlanReceiver()
    for plans in (before, after):
        sender = PlanSender()
        for plan in plans:
            assert receiver.decode(sender.encode(plan)) == plan


def test_a_plan_that_is_missing_is_noticed_and_nothing_but_a_new_sender_helps() -> None:
    sender, receiver = PlanSender(), PlanReceiver()
    frames = [sender.encode(StepPlan(step, [])) for step in range(3)]
    receiver.decode(frames[0])
    for frame in (frames[2], frames[1]):
        with pytest.raises(DecodeError, match="was expected"):
            receiver.decode(frame)
    assert receiver.decode(PlanSender().encode(StepPlan(7, []))).step == 7


def make_decode(number: int, context: int, *, is_rich: bool = False) -> Chunk:
    sampling = SamplingParams(max_tokens=100, seed=2**63 - 1, stop_token_ids=tuple(range(100, 130)))
    chunk = Chunk(f"chatcmpl-{number:024d}-0", array("i", [1]), context, array("i", range(context // 16)), sampling)
    if is_rich:
        chunk.sampling = replace(sampling, grammar="g" * 20_000, presence_penalty=0.5, min_tokens=50)
        tokens = array("i", [1]) * context
        chunk.extras = ChunkExtras(tokens, context - 20, sampling.stop_token_ids, mask=bytes(6144))
        chunk.state = StateUse(number)
        chunk.window = WindowTable(context // 16 - 256, array("i", range(257)))
    return chunk


def advance(chunk: Chunk) -> Chunk:
    """Return the chunk of the next step; every 16th leases a block, and its window moves on."""
    start = chunk.start + 1
    table, extras, window = chunk.block_table[:], chunk.extras, chunk.window
    if start % 16 == 0:
        table.append(start // 16)
        if window is not None:
            window = WindowTable(window.first + 1, array("i", [*window.blocks[1:], start // 16]))
    if extras is not None and extras.history is not None:
        extras = replace(extras, history=extras.history + array("i", [7]))
    return replace(chunk, token_ids=array("i", [7]), start=start, block_table=table, extras=extras, window=window)


@pytest.mark.parametrize("context", [8192, 131_072])
@pytest.mark.parametrize("is_rich", [False, True], ids=["plain", "penalties, grammar, state and window"])
def test_a_running_decode_costs_few_bytes_whatever_its_context(context: int, is_rich: bool) -> None:
    sender = PlanSender()
    chunks = [make_decode(number, context, is_rich=is_rich) for number in range(125)]
    sender.encode(StepPlan(1, chunks))
    sizes = []
    for step in range(2, 34):
        chunks = [advance(chunk) for chunk in chunks]
        sizes.append(len(sender.encode(StepPlan(step, chunks))) / len(chunks))
    assert max(sizes) <= 64
    assert is_rich or max(sizes) <= 32


def test_ended_requests_are_forgotten_at_both_ends_and_their_numbers_used_again() -> None:
    sender, receiver = PlanSender(), PlanReceiver()
    most = 0
    for step in range(500):
        data = sender.encode(StepPlan(step, [make_decode(step, 32)]))
        receiver.decode(data)
        most = max(most, msgpack.unpackb(data)[2][0][0])
    assert most < 64
    assert receiver.num_requests < 64


def test_a_request_that_pauses_and_comes_back_is_described_again() -> None:
    sender, receiver = PlanSender(), PlanReceiver()
    plans = [StepPlan(0, [make_decode(1, 64)]), *(StepPlan(step, []) for step in range(1, 80))]
    plans.append(StepPlan(80, [make_decode(2, 48), make_decode(1, 64)]))
    for plan in plans:
        assert receiver.decode(sender.encode(plan)) == plan


def test_encoding_takes_a_copy() -> None:
    block_table = array("i", [5])
    plan = StepPlan(1, [Chunk("r", array("i", [1]), 0, block_table, None)])
    data = PlanSender().encode(plan)
    block_table.append(6)
    assert PlanReceiver().decode(data).chunks[0].block_table == array("i", [5])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93",
        msgpack.packb(7),
        msgpack.packb([0, 1]),
        msgpack.packb([0, 1, [[0, b"\0" * 4, 0]]]),
        msgpack.packb([0, 1, [[0, b"", 0, None, b"\0" * 3, *[None] * 6, "r"]]]),
        msgpack.packb([0, 1, [[0, b"", 0, None, [0, 1, b""], *[None] * 6, "r"]]]),
        msgpack.packb([0, 1, [[0, b"", 0, None, [-1, 1, b""], *[None] * 6, "r"]]]),
        msgpack.packb([0, 1, [[0, "text", 0, *[None] * 8, "r"]]]),
        msgpack.packb([0, 1, [[0, b"", 0, {"max_tokens": "x"}, *[None] * 7, "r"]]]),
        msgpack.packb([0, 1, msgpack.ExtType(4, b"x")]),
        msgpack.packb([0, 1, []]) + b"\0",
        b"\x91" * 5000,
    ],
)
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        PlanReceiver().decode(data)


@examples(1.5)
@given(PLANS, st.data())
def test_a_damaged_plan_is_refused_or_is_another_plan(plan: StepPlan, data: st.DataObject) -> None:
    frame = bytearray(PlanSender().encode(plan))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = PlanReceiver().decode(bytes(frame))
    except DecodeError:
        return
    assert isinstance(decoded, StepPlan)
