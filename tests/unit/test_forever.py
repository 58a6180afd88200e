"""Work that lasts as long as its process: errors end a turn of it, and its own end ends the process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moeserve import forever
from moeserve.forever import Forever, repeat

ROOT = Path(__file__).resolve().parents[2]
ERRORS = [MemoryError(), OSError(37, "No locks available"), ValueError("a defect"), asyncio.CancelledError()]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forever, "_AFTER_ERROR_S", 0.001)


def test_an_error_ends_a_turn_and_the_next_one_follows() -> None:
    async def run() -> None:
        left, is_over = [*ERRORS], asyncio.Event()

        async def turn() -> bool:
            if left:
                raise left.pop(0)
            is_over.set()
            return False

        work = Forever("work", turn)
        work.start()
        await is_over.wait()
        await work.stop()

    asyncio.run(run())


def test_a_turn_that_waits_for_what_another_one_cancels_is_followed_by_the_next() -> None:
    async def run() -> None:
        awaited: list[asyncio.Future[None]] = []
        comes_back = asyncio.Event()

        async def turn() -> None:
            awaited.append(asyncio.get_running_loop().create_future())
            comes_back.set()
            await awaited[-1]

        work = Forever("work", turn)
        work.start()
        for _ in range(3):
            await comes_back.wait()
            comes_back.clear()
            awaited[-1].cancel()
        await work.stop()
        await work.stop()

    asyncio.run(run())


def test_an_error_on_a_thread_ends_a_turn_and_the_next_one_follows() -> None:
    left: list[BaseException] = [MemoryError(), OSError("no locks")]

    def turn() -> bool:
        if left:
            raise left.pop(0)
        return False

    thread = threading.Thread(target=repeat, args=("work", turn))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


TASK = """
import asyncio
from moeserve.forever import Forever

async def turn():
    raise Gone

async def main():
    Forever("the work", turn).start()
    await asyncio.Event().wait()

asyncio.run(main())
"""
VITAL = """
import asyncio
from moeserve.forever import vital

async def work():
    raise MemoryError

async def main():
    task = vital("the work", work())
    await asyncio.Event().wait()

asyncio.run(main())
"""
THREAD = """
import threading
from moeserve.forever import repeat

def turn():
    raise Gone

threading.Thread(target=repeat, args=("the work", turn), daemon=True).start()
threading.Event().wait()
"""


@pytest.mark.parametrize("script", [TASK, VITAL, THREAD], ids=["task", "vital", "thread"])
def test_work_that_has_really_ended_ends_its_process_with_a_code_and_a_line(script: str) -> None:
    begin = """
from launcher.logs import configure_logs
configure_logs("info", "json")
class Gone(BaseException): pass
"""
    done = subprocess.run(
        [sys.executable, "-c", begin + script], cwd=ROOT, stderr=subprocess.PIPE, timeout=60, check=False
    )
    line = json.loads(done.stderr.splitlines()[-1])
    assert (done.returncode, line["event"], line["work"]) == (1, "work_ended", "the work")
    assert ("Gone" in line["exception"]) != ("MemoryError" in line["exception"])
