"""Threads for long conversions: bounded, apart from each other, and no reason for a process to stay."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from moeserve.frontend.http import ApiError
from moeserve.frontend.workers import InlineBudget, Workers

ROOT = Path(__file__).resolve().parents[2]


def test_a_budget_is_for_all_that_a_request_brings() -> None:
    budget = InlineBudget(10)
    assert [budget.take(chars) for chars in (6, 6, 4, 1, 0)] == [True, False, True, False, True]


def test_a_refusal_keeps_nothing_of_what_was_read() -> None:
    class Read:
        """What a thread has made of a body."""

    held: list[weakref.ref[Read]] = []

    def work() -> None:
        read = Read()
        held.append(weakref.ref(read))
        try:
            raise ValueError
        except ValueError:
            raise ApiError(400, "no") from None

    async def scenario() -> None:
        workers = Workers("test", 1, 10)
        with pytest.raises(ApiError) as refused:
            await workers.run(1, work)
        workers.stop()
        assert refused.value.message == "no"
        assert held[0]() is None

    asyncio.run(scenario())


def test_work_is_bounded_in_sum_and_a_client_that_leaves_frees_nothing_that_still_runs() -> None:
    async def scenario() -> None:
        workers, gate, begun = Workers("test", 1, 10), threading.Event(), threading.Event()

        def work() -> bool:
            begun.set()
            return gate.wait()

        first = asyncio.ensure_future(workers.run(8, work))
        await asyncio.to_thread(begun.wait)
        first.cancel()
        await asyncio.wait({first})
        with pytest.raises(ApiError) as caught:
            await workers.run(3, bool)
        assert (caught.value.status, caught.value.code) == (503, "too_much_text")
        waiting = asyncio.ensure_future(workers.run(2, lambda: 7))
        gate.set()
        assert await waiting == 7
        assert await workers.run(100, lambda: 8) == 8, "one piece of work is always taken"
        workers.stop()

    asyncio.run(scenario())


def test_a_process_does_not_wait_for_work_under_way() -> None:
    script = """
import asyncio, threading
from launcher.frontend_main import leave
from moeserve.frontend.workers import Workers

async def scenario():
    begun = threading.Event()
    workers = Workers("test", 1, 10)
    task = asyncio.ensure_future(workers.run(1, lambda: (begun.set(), threading.Event().wait())))
    await asyncio.to_thread(begun.wait)
    workers.stop()
    task.cancel()

asyncio.run(scenario())
leave(5)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=30, check=False)
    assert done.returncode == 5
