"""Which cores a rank keeps to."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from moeserve.engine.ranks.cores import bind_to_cores, own_cores
from moeserve.machine import numa_nodes


def test_ranks_that_fill_the_cores_share_them_out() -> None:
    assert [own_cores(place, 2, 1, [0, 1]) for place in range(2)] == [[0], [1]]
    assert [own_cores(place, 3, 2, [9, 2, 3, 5, 6, 8]) for place in range(3)] == [[2, 3], [5, 6], [8, 9]]


@pytest.mark.parametrize(("threads", "usable"), [(1, range(4)), (2, range(2))])
def test_with_more_or_fewer_cores_than_threads_all_are_used(threads: int, usable: range) -> None:
    assert own_cores(1, 2, threads, usable) == list(usable)


# Two sockets of four cores, whose second threads have numbers of their own.
SOCKETS = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


def test_a_rank_for_each_numa_node_keeps_to_the_cores_of_its_node_whatever_their_numbers() -> None:
    assert [own_cores(place, 2, 8, range(16), SOCKETS) for place in range(2)] == SOCKETS
    # Fewer threads than cores may move within the node.
    assert [own_cores(place, 2, 4, range(16), SOCKETS) for place in range(2)] == SOCKETS


def test_ranks_of_one_numa_node_share_its_cores_out_if_they_fill_them() -> None:
    halves = [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]]
    assert [own_cores(place, 4, 4, range(16), SOCKETS) for place in range(4)] == halves
    assert [own_cores(place, 4, 2, range(16), SOCKETS) for place in range(4)] == [*SOCKETS[:1] * 2, *SOCKETS[1:] * 2]


def test_ranks_that_do_not_come_out_even_over_numa_nodes_are_placed_without_them() -> None:
    assert own_cores(1, 3, 5, range(15), SOCKETS) == [5, 6, 7, 8, 9]
    assert own_cores(0, 1, 8, range(16), SOCKETS) == list(range(16))


def test_a_numa_node_none_of_whose_cores_may_be_used_counts_for_nothing() -> None:
    usable = [0, 1, 2, 3]
    assert [own_cores(place, 2, 2, usable, SOCKETS) for place in range(2)] == [[0, 1], [2, 3]]


def test_numa_nodes_are_read_as_linux_tells_them_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number, cores in {0: "0-1,4", 10: "6", 2: "2-3", 3: ""}.items():
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    assert numa_nodes(tmp_path) == [[0, 1, 4], [2, 3], [6]]
    assert numa_nodes(tmp_path / "none") == []


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
