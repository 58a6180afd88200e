"""The state of a service and its clients after one of its processes was killed, stopped or told to end."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.crash_traffic import Answered, Traffic, choice_of, errors_in
from tests.support.service import Service, children_of, descendants, is_alive, is_ready, read_of_process, wait_until

# Clients hear of a failure that was found, and nothing is left of a service whose supervisor was killed, within so many
# seconds of a machine that does many other things.
SECONDS_TO_TELL = 30.0
SECONDS_TO_VANISH = 60.0
# Files that each life of the engine has anew, with its number behind the last dot.
_OF_LIFE = re.compile(r".*\.(\d+)$")


class Kill:
    """One signal to one process of a service with open requests, and what came of it, for the table.

    seen: all processes that the service has had since.
    """

    def __init__(self, running: Service, target: str, phase: str, number: signal.Signals) -> None:
        self.running, self.target, self.phase, self.number = running, target, phase, number
        self.seen = processes_of(running)
        self.hit_at = 0.0
        self.watch = Watch(running)
        self.outcomes: Counter[str] = Counter()

    def hit(self) -> None:
        pid = pid_of(self.running, self.target)
        assert pid is not None
        self.seen |= processes_of(self.running)
        self.watch.forget()
        self.hit_at = time.monotonic()
        os.kill(pid, self.number)

    def hit_again(self) -> None:
        """Kill the process that has taken the place of the one that was hit, if any."""
        self.seen |= processes_of(self.running)
        if (pid := pid_of(self.running, self.target)) is not None:
            os.kill(pid, signal.SIGKILL)

    def judge(self, traffic: Traffic, undisturbed: dict[str, Answered], allowed: set[str]) -> None:
        """Every answer of the traffic is of an `allowed` outcome, and errors come soon after what they tell of."""
        answers = traffic.wait()
        if self.number == signal.SIGSTOP and self.target == "frontend":
            # Clients are told before the supervisor says why.
            wait_until(lambda: self.watch.found is not None)
        for name, answer in answers.items():
            kind = outcome(answer, undisturbed[name])
            assert kind in allowed, (name, answer)
            if kind in ("error", "refused"):
                assert answer.ended_at - (self.watch.found or self.hit_at) < SECONDS_TO_TELL, (name, answer)
            self.outcomes[kind] += 1

    def note(self) -> None:
        """Add a line to the file that KILLS_TABLE names."""
        if "KILLS_TABLE" in os.environ:
            watch = self.watch
            times = [time and round(time - self.hit_at, 2) for time in (watch.found, watch.serves_again)]
            cell = (self.target, self.phase, self.number.name, dict(self.outcomes), *times)
            with Path(os.environ["KILLS_TABLE"]).open("a") as table:
                table.write(json.dumps(cell) + "\n")


@contextmanager
def kill(running: Service, target: str, phase: str, number: signal.Signals) -> Iterator[Kill]:
    killing = Kill(running, target, phase, number)
    try:
        yield killing
    except AssertionError:
        print(running.errors.read_text()[-6000:])
        raise
    finally:
        killing.watch.stop()
    killing.note()


def pid_of(running: Service, target: str) -> int | None:
    """Pid of `supervisor`, `frontend`, `engine` or `rank N`; None while there is none."""
    if target == "supervisor":
        return running.process.pid
    children = children_of(running.process.pid)
    if target == "frontend":
        return children.get("frontend")
    below = descendants(children["worker"]) if "worker" in children else set()
    if target == "engine":
        return next(iter(below), None)
    ranks = {pid for pid in below if f"RANK={target[-1]}" in read_of_process(pid, "environ").split("\0")}
    # A rank that serves in copies of itself does nothing else meanwhile.
    return next((pid for pid in ranks if not descendants(pid) & ranks), None)


class Watch:
    """Reads the supervisor's standard error from now on, on a thread, and records the times of its notices.

    `found` is when the failure was found, `serves_again` when the engine served again, on `time.monotonic`; both are
    None until then.
    """

    def __init__(self, running: Service) -> None:
        self.found: float | None = None
        self.serves_again: float | None = None
        self._stopped = threading.Event()
        self._log = running.errors.open()
        self._log.seek(0, os.SEEK_END)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def forget(self) -> None:
        """Forget all times."""
        self.found = self.serves_again = None

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._log.close()

    def _run(self) -> None:
        line = ""
        while not self._stopped.is_set():
            line += self._log.readline()
            if not line.endswith("\n"):
                time.sleep(0.01)
                continue
            if self.found is None and line.startswith(("Notice:", "Error:")):
                self.found = time.monotonic()
            if "serves again" in line:
                self.serves_again = time.monotonic()
            line = ""


def outcome(answer: Answered, expected: Answered) -> str:
    """Return `same`, `error` for a stream that ends with an error event, `refused` for an error in place of an answer,
    `cut` for a connection that was.

    Raise AssertionError for any other answer: with another text, two ends, or none.
    """
    if answer.error is not None:
        assert_begins_alike(answer, expected)
        return "cut"
    if answer == expected:
        return "same"
    assert len(errors_in(answer)) == 1, answer
    if not isinstance(answer.content, list):
        assert answer.status == 503, answer
        return "refused"
    assert errors_in(Answered(content=answer.content[-1:])), answer
    assert_begins_alike(answer, expected)
    return "error"


def assert_begins_alike(answer: Answered, expected: Answered) -> None:
    """A stream that ended early has the beginning of the whole answer."""
    if isinstance(answer.content, list):
        whole = _by_choice(expected.content)
        for choice, events in _by_choice(answer.content).items():
            assert whole[choice][: len(events)] == events


def _by_choice(events: Iterable[dict[str, Any]]) -> dict[float, list[dict[str, Any]]]:
    choices: dict[float, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("error") is None:
            choices[choice_of(event)].append(event)
    return choices


def processes_of(running: Service) -> set[int]:
    """Pids of the supervisor and of all that it has started."""
    return {running.process.pid} | descendants(running.process.pid)


def _lives(run_dir: Path) -> set[str]:
    """Return the incarnations of the engine that have sockets."""
    # Where there are several HTTP processes, their sockets have their numbers.
    own = [path.name for path in run_dir.iterdir() if not path.name.startswith("frontend.")]
    return {found[1] for name in own if (found := _OF_LIFE.fullmatch(name))}


def assert_whole(running: Service, seen: set[int]) -> None:
    """The service serves, no block is leased, and of lives that are over there is neither a process nor a file.

    seen: all processes that the service has had.
    """
    wait_until(lambda: is_ready(running), timeout=60)
    wait_until(lambda: 'moeserve_kv_blocks{state="leased"} 0.0' in running.http.get("/metrics").text)
    wait_until(lambda: {pid for pid in seen if is_alive(pid)} <= processes_of(running))
    assert {name.split()[0] for name in children_of(running.process.pid)} == {"worker", "frontend"}
    [run_dir] = running.run_root.iterdir()
    # A second signal may come just now: the service is ready until it is noticed.
    wait_until(lambda: len(_lives(run_dir)) == 1)
    names = [path.name for path in run_dir.iterdir()]
    # The context of the life before, and no other file of it, which a frontend may yet read.
    assert len([name for name in names if name.startswith("run.")]) <= 2, names
    assert shared_memory(processes_of(running)) == set()


def assert_nothing_is_left(running: Service, killing: Kill) -> None:
    """The service has ended, or its supervisor was killed: no process is left, no socket, secret or other file."""
    limit = SECONDS_TO_VANISH - (time.monotonic() - killing.hit_at)
    wait_until(lambda: not any(map(is_alive, killing.seen)) and running.leaves_nothing(), timeout=max(limit, 1.0))


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that processes use: they would outlive a process that is killed."""
    maps = "\n".join(read_of_process(pid, "maps") for pid in pids)
    return {found[1] for found in re.finditer(r"(/dev/shm/\S+)$", maps, re.MULTILINE)}
