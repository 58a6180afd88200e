"""The requests of one answer over several lives of the engine."""

import asyncio
from array import array
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from moeserve.frontend.relay.request_group import CrashSuspect, EngineGone, EngineSilent, RequestGroup, RequestRejected
from moeserve.plan import FinishReason, PromptProgress, SamplingParams, TokenLogprobs
from moeserve.wire import Admitted, Finish, Generate, Output, Rejected, pack_token_ids, unpack_token_ids


def group_of(*names: str, patience_s: float = 60.0, finished: list[Any] | None = None) -> RequestGroup:
    told: list[Any] = [] if finished is None else finished
    generates = [Generate(name, pack_token_ids([1, 2]), SamplingParams(max_tokens=9)) for name in names]
    return RequestGroup(generates, told.append, patience_s)


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Make a test of a coroutine function."""

    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


def names_of(generates: list[Generate]) -> list[str]:
    return [generate.request_id for generate in generates]


def admit(group: RequestGroup, *names: str) -> None:
    for name in names:
        group.answer(Admitted(name))


@on_a_loop
async def test_a_next_engine_gets_what_is_left_of_the_open_requests() -> None:
    group = group_of("a", "b", "c")
    assert [generate.output_token_ids for generate in group.take_to_engine()] == [b"", b"", b""]
    admit(group, "a", "b", "c")
    group.put(Output("a", [5, 6], prompt_logprobs=[TokenLogprobs(-1.0)]))
    group.put(Output("b", [7], FinishReason.STOP, num_output_tokens=1))
    group.put(Output("a", [8]))
    group.lose_engine()
    rest = group.take_to_engine()
    assert [generate.request_id for generate in rest] == ["a", "c"]
    assert unpack_token_ids(rest[0].output_token_ids) == array("i", [5, 6, 8])
    assert (rest[0].num_prompt_logprobs, rest[1].output_token_ids) == (1, b"")
    group.put(Output("a", [9], FinishReason.LENGTH, num_output_tokens=4))
    assert [output.token_ids for _, output in await group.next()] == [[5, 6], [7], [8], [9]]


@on_a_loop
async def test_news_of_a_prompt_wakes_its_reader_until_the_first_output() -> None:
    group = group_of("a", "b")
    group.take_to_engine()
    for computed in (0, 4):
        group.tell(PromptProgress("b", 8, 0, computed, 0.0, 1.0))
    assert await group.next() == []
    assert group.take_progress() == [(1, PromptProgress("b", 8, 0, 4, 0.0, 1.0))]
    group.tell(PromptProgress("b", 8, 0, 6, 0.0, 1.0))
    group.put(Output("b", [5]))
    assert [output.token_ids for _, output in await group.next()] == [[5]]
    group.tell(PromptProgress("gone", 8, 0, 6, 0.0, 1.0))
    assert group.take_progress() == []


@on_a_loop
async def test_a_request_at_its_stop_string_needs_no_other_engine() -> None:
    told: list[Any] = []
    group = group_of("a", finished=told)
    group.take_to_engine()
    admit(group, "a")
    group.put(Output("a", [5, 6, 7]))
    group.finish(0, 2)
    assert told == [Finish("a", 2)]
    group.lose_engine()
    assert group.take_to_engine() == []
    last = (await group.next())[-1][1]
    assert (last.finish_reason, last.num_output_tokens, group.num_open) == (FinishReason.STOP, 2, 0)


@on_a_loop
async def test_no_number_of_deaths_ends_a_request() -> None:
    group = group_of("a")
    for number in range(9):
        assert [generate.resumes for generate in group.take_to_engine()] == [number > 0]
        admit(group, "a")
        group.lose_engine()
        # Nothing can be lost twice.
        group.lose_engine()
    assert (group.num_deaths, group.num_open) == (9, 1)
    assert not group.is_with_engine
    assert names_of(group.close()) == ["a"]


@on_a_loop
async def test_a_request_that_ended_engines_ends_with_what_it_had() -> None:
    group = group_of("a", "b")
    group.take_to_engine()
    admit(group, "a", "b")
    group.put(Output("b", [5]))
    group.lose_engine()
    group.take_to_engine()
    group.answer(Rejected("a", "engine_crash", "it ended 2 times"))
    assert [output.token_ids for _, output in await group.next()] == [[5]]
    with pytest.raises(CrashSuspect, match="2 times"):
        await group.next()
    assert names_of(group.close()) == ["b"]


@on_a_loop
async def test_a_death_before_the_engine_has_the_request_does_not_count() -> None:
    group = group_of("a")
    group.lose_engine()
    group.take_to_engine()
    group.lose_engine()
    assert (group.num_deaths, len(group.take_to_engine())) == (1, 1)


@on_a_loop
async def test_patience_counts_only_while_there_is_an_engine() -> None:
    group = group_of("a", patience_s=0.01)
    waiting = asyncio.create_task(group.admitted())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    group.take_to_engine()
    with pytest.raises(EngineSilent):
        await waiting


@on_a_loop
async def test_a_rejection_by_the_first_engine_is_one_and_by_the_next_an_end() -> None:
    rejected = Rejected("a", "queue_full", "full")
    first = group_of("a")
    first.take_to_engine()
    first.answer(rejected)
    with pytest.raises(RequestRejected):
        await first.admitted()
    again = group_of("a")
    again.take_to_engine()
    admit(again, "a")
    again.lose_engine()
    again.take_to_engine()
    again.answer(rejected)
    with pytest.raises(EngineGone, match="cannot go on with it: full"):
        await again.next()


@on_a_loop
async def test_only_requests_that_an_engine_has_or_had_are_left() -> None:
    group = group_of("a", "b")
    group.take_to_engine()
    assert group.is_with_engine
    group.put(Output("b", [5], FinishReason.STOP))
    assert names_of(group.close()) == ["a"]
    waiting = group_of("c")
    assert not waiting.is_with_engine
    assert waiting.close() == []


@on_a_loop
async def test_a_call_that_waits_for_outputs_can_be_interrupted() -> None:
    group = group_of("a")
    for patience_s in (None, 60.0):
        waiting = asyncio.create_task(group.next(patience_s))
        await asyncio.sleep(0)
        group.interrupt()
        assert await waiting == []
    group.close()
