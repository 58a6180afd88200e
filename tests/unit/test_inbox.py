"""What one turn of the engine handles of a flood, and what it leaves for the next."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moeserve.engine.inbox import Inbox
from moeserve.plan import SamplingParams
from moeserve.wire import Abort, Control, Finish, Generate, Hello


class Arrivals:
    """Messages that have arrived, and a clock that each handled message moves on by `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.messages: deque[tuple[bytes, Any]] = deque()
        self.now = 0.0
        self.inbox = Inbox(self._receive, lambda: self.now)
        self._seconds = seconds

    def _receive(self) -> tuple[bytes, Any] | None:
        return self.messages.popleft() if self.messages else None

    def arrive(self, *messages: Any) -> None:
        self.messages.extend((b"f", message) for message in messages)

    def turn(self) -> list[Any]:
        handled = []
        for _, message in self.inbox.turn():
            handled.append(message)
            self.now += self._seconds
        return handled


def generate(number: int) -> Generate:
    return Generate(f"r{number}", b"\1\0\0\0", SamplingParams(max_tokens=1))


def test_a_flood_of_requests_is_handled_in_its_order_over_several_turns() -> None:
    arrivals = Arrivals()
    flood = [generate(number) for number in range(200)]
    arrivals.arrive(*flood)
    turns = [arrivals.turn() for _ in range(4)]
    assert [len(turn) for turn in turns] == [64, 64, 64, 8]
    assert [message for turn in turns for message in turn] == flood
    assert not arrivals.inbox


def test_slow_requests_end_a_turn_early_but_each_turn_handles_one() -> None:
    arrivals = Arrivals(seconds=0.004)
    arrivals.arrive(*(generate(number) for number in range(4)))
    assert [len(arrivals.turn()) for _ in range(2)] == [3, 1]
    slow = Arrivals(seconds=5.0)
    slow.arrive(Hello(1, "a"), *(generate(number) for number in range(4)))
    assert [len(slow.turn()) for _ in range(5)] == [1, 1, 1, 1, 1]


def test_what_ends_requests_passes_requests_that_wait() -> None:
    arrivals = Arrivals()
    arrivals.arrive(*(generate(number) for number in range(500)), Abort("old"), Control(1, "x"), Finish("older", 3))
    assert arrivals.turn()[:3] == [Abort("old"), Control(1, "x"), Finish("older", 3)]


def test_a_turn_reads_no_more_than_its_part() -> None:
    arrivals = Arrivals()
    arrivals.arrive(*(Abort(f"r{number}") for number in range(1500)))
    assert [len(arrivals.turn()) for _ in range(2)] == [1000, 500]


def test_a_request_that_waits_can_be_withdrawn_once() -> None:
    arrivals = Arrivals()
    arrivals.arrive(*(generate(number) for number in range(70)))
    arrivals.turn()
    assert arrivals.inbox.withdraw("r65")
    assert not arrivals.inbox.withdraw("r65")
    assert not arrivals.inbox.withdraw("r1")
    assert arrivals.turn() == [generate(number) for number in (64, 66, 67, 68, 69)]


@given(
    st.lists(st.tuples(st.sampled_from([Generate, Abort, Control]), st.integers(0, 30)), max_size=300),
    st.sampled_from([0.0, 0.001, 0.02]),
    st.integers(1, 40),
)
def test_every_message_is_handled_exactly_once(messages: list[tuple[type, int]], seconds: float, batch: int) -> None:
    arrivals = Arrivals(seconds)
    sent = [
        generate(number) if kind is Generate else Abort(f"r{number}") if kind is Abort else Control(number, "x")
        for kind, number in messages
    ]
    handled = []
    for start in range(0, len(sent), batch):
        arrivals.arrive(*sent[start : start + batch])
        handled += arrivals.turn()
    while arrivals.messages or arrivals.inbox:
        handled += arrivals.turn()
    assert sorted(map(repr, handled)) == sorted(map(repr, sent))
    others = [message for message in sent if not isinstance(message, Generate)]
    assert [message for message in handled if not isinstance(message, Generate)] == others
