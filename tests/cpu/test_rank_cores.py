"""Which cores a rank keeps to."""

from __future__ import annotations

import os
import threading

import pytest

from moeserve.engine.ranked_service import bind_to_cores, own_cores


def test_ranks_that_fill_the_cores_share_them_out() -> None:
    assert [own_cores(place, 2, 1, [0, 1]) for place in range(2)] == [[0], [1]]
    assert [own_cores(place, 3, 2, [9, 2, 3, 5, 6, 8]) for place in range(3)] == [[2, 3], [5, 6], [8, 9]]


@pytest.mark.parametrize(("threads", "usable"), [(1, range(4)), (2, range(2))])
def test_with_more_or_fewer_cores_than_threads_all_are_used(threads: int, usable: range) -> None:
    assert own_cores(1, 2, threads, usable) == list(usable)


def test_later_threads_keep_to_the_cores_too() -> None:
    cores = sorted(os.sched_getaffinity(0))
    found: list[set[int]] = []

    def bind() -> None:
        bind_to_cores(0, len(cores), 1)
        inner = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        inner.start()
        inner.join()

    outer = threading.Thread(target=bind)
    outer.start()
    outer.join()
    assert found == [{cores[0]}]
    assert os.sched_getaffinity(0) == set(cores)
