"""The order in which waiting requests are tried."""

from __future__ import annotations

from array import array

import pytest

from moeserve.plan import Request, SamplingParams
from moeserve.scheduler import WaitingQueue


def make_queue(policy: str, priorities: list[int]) -> tuple[WaitingQueue, list[Request]]:
    """Requests that arrive in this order; the number of their prompt tokens is what `lpm` takes for cached."""
    queue = WaitingQueue(policy, lambda request: request.num_prompt_tokens)
    requests = []
    for index, priority in enumerate(priorities):
        request = Request(
            f"{index}", array("i", [1] * (index + 1)), SamplingParams(1), priority=priority, arrival=index
        )
        queue.add(request)
        requests.append(request)
    return queue, requests


def names(requests: list[Request]) -> str:
    return "".join(request.request_id for request in requests)


def test_fcfs_is_priority_then_arrival() -> None:
    queue, _ = make_queue("fcfs", [1, 0, 1, 0, -1])
    assert names(queue.candidates()) == "41302"
    assert len(queue) == 5


def test_a_preempted_request_returns_to_its_place() -> None:
    queue, requests = make_queue("fcfs", [0, 0, 0])
    queue.take(requests[1])
    assert names(queue.candidates()) == "02"
    queue.add(requests[1])
    assert names(list(queue)) == "012"


def test_lpm_prefers_what_is_cached_among_the_most_urgent() -> None:
    queue, _ = make_queue("lpm", [0, 1, 0, 0, 1])
    assert names(queue.candidates()) == "32014"


def test_only_those_who_stood_before_are_overtaken() -> None:
    queue, requests = make_queue("lpm", [0, 0, 0])
    queue.take(requests[1])
    assert [request.num_overtakers for request in requests] == [1, 0, 0]


def test_who_was_overtaken_often_goes_first() -> None:
    queue, requests = make_queue("lpm", [0, 0, 0, 0])
    requests[1].num_overtakers = requests[2].num_overtakers = 32
    requests[3].num_overtakers = 31
    assert names(queue.candidates()) == "1230"


def test_removing_one_that_does_not_wait_is_an_error() -> None:
    queue, requests = make_queue("fcfs", [0, 0])
    queue.remove(requests[0])
    with pytest.raises(ValueError, match="does not wait"):
        queue.remove(requests[0])
    assert names(list(queue)) == "1"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown scheduling policy 'random'"):
        make_queue("random", [])
