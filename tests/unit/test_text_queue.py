"""Which body is prepared next: fair by key, and one process is kept for bodies that are soon done."""

from __future__ import annotations

from moeserve.frontend import limits
from moeserve.frontend.prepare.text_processes import Running, TextQueue

BIG = limits.BIG_BODY_BYTES


def begin(queue: TextQueue[str], now: float = 0.0) -> list[Running[str]]:
    """Begin all jobs that may."""
    begun = []
    while (running := queue.next(now)) is not None:
        begun.append(running)
    return begun


def names(begun: list[Running[str]]) -> list[str]:
    return [running.job for running in begun]


def test_jobs_run_while_there_are_places() -> None:
    queue: TextQueue[str] = TextQueue(2)
    for number in range(3):
        queue.add("a", 10, f"a{number}")
    first, second = begin(queue)
    assert (first.job, second.job, queue.num_waiting) == ("a0", "a1", 1)
    queue.finish(first, 0.001, 1.0)
    assert names(begin(queue)) == ["a2"]


def test_keys_take_turns_by_the_time_that_they_have_used() -> None:
    queue: TextQueue[str] = TextQueue(1)
    for number in range(20):
        queue.add("many", 10, f"many{number}")
    queue.add("few", 10, "few0")
    order = []
    for now in range(4):
        (running,) = begin(queue, float(now))
        order.append(running.job)
        queue.finish(running, 0.01, float(now))
    assert "few0" in order[:2]


def test_sixteen_big_bodies_of_one_key_leave_a_process_to_others() -> None:
    queue: TextQueue[str] = TextQueue(2)
    for number in range(16):
        queue.add("a", BIG, f"a{number}")
    (running,) = begin(queue)
    queue.add("b", 10, "small")
    queue.add("b", BIG, "big")
    queue.add("a", 10, "own small")
    assert set(names(begin(queue))) <= {"small", "own small"}
    queue.finish(running, 1.0, 1.0)
    # Among slow bodies the key that has used less is next.
    assert "big" in names(begin(queue, 1.0))


def test_a_key_whose_small_bodies_take_long_gets_one_process_until_it_is_forgiven() -> None:
    queue: TextQueue[str] = TextQueue(2)
    for number in range(6):
        queue.add("bad", 10, f"bad{number}")
    for running in begin(queue):
        queue.finish(running, 0.25, 1.0)
    assert len(begin(queue, 1.0)) == 1
    queue.add("good", 10, "good")
    (good,) = begin(queue, 1.0)
    assert good.job == "good"
    queue.finish(good, 0.001, 1.0)
    assert begin(queue, 1.0) == []
    assert len(begin(queue, 10.0)) == 1


def test_a_job_that_is_dropped_does_not_begin() -> None:
    queue: TextQueue[str] = TextQueue(1)
    queue.add("a", 10, "runs")
    (running,) = begin(queue)
    queue.add("a", 100, "left")
    assert queue.drop("a", 100, "left")
    assert not queue.drop("a", 10, "runs"), "it has begun"
    queue.add("a", 100, "next")
    queue.finish(running, 0.0, 0.0)
    assert names(begin(queue)) == ["next"]
