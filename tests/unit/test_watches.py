"""The judgement on heartbeats and stopped processes, and when the supervisor itself shows life."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from launcher.watches import ProgressWatch, Vitals, wait_for_stop
from moeserve.wire import Heartbeat
from tests.support.service import descendants, wait_until


def beats(watch: ProgressWatch, times: list[float], *, progress: int, busy: bool) -> None:
    for now in times:
        watch.observe(Heartbeat(1, progress, busy), now)
        assert watch.verdict(now) is None


@pytest.mark.parametrize(("busy", "sentence"), [(True, "busy without progress"), (False, "idle without progress")])
def test_an_engine_whose_loop_stands_still_is_hung_whether_it_is_busy_or_idle(busy: bool, sentence: str) -> None:
    watch = ProgressWatch(10.0, 0.0)
    beats(watch, [0, 3, 6, 9], progress=5, busy=busy)
    watch.observe(Heartbeat(1, 5, busy), 11.0)
    assert sentence in (watch.verdict(11.0) or "")


def test_turns_of_the_loop_are_progress_enough() -> None:
    watch = ProgressWatch(10.0, 0.0)
    for now in range(0, 60, 3):
        beats(watch, [float(now)], progress=now, busy=now % 2 == 0)


def test_a_silent_engine_is_hung() -> None:
    watch = ProgressWatch(10.0, 0.0)
    assert [watch.verdict(now) for now in (3.0, 6.0, 9.0)] == [None] * 3
    assert "no heartbeat" in (watch.verdict(11.0) or "")


def test_a_judge_that_was_held_up_itself_gives_the_engine_a_new_chance() -> None:
    watch = ProgressWatch(10.0, 0.0)
    assert watch.verdict(1.0) is None
    assert watch.verdict(500.0) is None
    assert watch.verdict(503.0) is None


def test_the_supervisor_shows_life_once_all_do_that_are_expected() -> None:
    beating: list[int] = []
    vitals = Vitals(["a", "b"], lambda: beating.append(1))
    vitals.record("a")
    assert not beating
    vitals.excuse("b")
    vitals.record("a")
    assert len(beating) == 1
    assert vitals.of("b") == "not heard yet"


@pytest.fixture
def parent() -> Iterator[int]:
    """Pid of a process that has started another one."""
    process = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
    wait_until(lambda: descendants(process.pid))
    yield process.pid
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("of_child", [False, True])
def test_a_process_that_stays_stopped_is_found_and_so_is_one_that_it_has_started(parent: int, of_child: bool) -> None:
    stopped = next(iter(descendants(parent))) if of_child else parent
    os.kill(stopped, signal.SIGSTOP)
    assert asyncio.run(wait_for_stop(parent, 0.5)) == f"process {stopped} was stopped for 0.5 s"
