"""The threads of the compiled kernels, which stay between calls (`kernels/cpu/team.cpp`)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from kernels.cpu.library import native_kernels
from kernels.cpu.packing import results_in_order
from kernels.linear import pack_linear

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels.")


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


def test_calls_of_several_threads_at_once_give_what_they_give_one_after_another() -> None:
    linear = pack_linear(torch.randn(256, 96))
    inputs = [torch.randn(rows, 96) for rows in (1, 7, 40, 200)] * 50
    wanted = [linear(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(linear, inputs), wanted))


def test_a_forked_process_has_threads_of_its_own() -> None:
    linear, x = pack_linear(torch.randn(256, 96)), torch.randn(40, 96)
    wanted = linear(x)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(linear(x), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(linear(x), wanted)


def test_tasks_of_one_thread_each_give_their_results_in_order_and_their_errors() -> None:
    linear, native = pack_linear(torch.randn(256, 96)), native_kernels()
    assert native is not None
    begin = native.compute_alone
    inputs = [torch.randn(rows, 96) for rows in (1, 7, 40, 200)] * 10
    wanted = [linear(x) for x in inputs]
    with torch.inference_mode():
        assert all(map(torch.equal, results_in_order((partial(linear, x) for x in inputs), 2, begin), wanted))

    def fail() -> torch.Tensor:
        raise ValueError("a task failed")

    tasks = [partial(linear, inputs[0]), fail, *(partial(linear, x) for x in inputs)]
    results = results_in_order(tasks, 2, begin)
    assert torch.equal(next(results), wanted[0])
    with pytest.raises(ValueError, match="a task failed"):
        next(results)
