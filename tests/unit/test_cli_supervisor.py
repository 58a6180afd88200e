"""The supervisor with stand-in children: real processes, signals and sockets, no model."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.forking import popen
from tests.support.service import descendants, is_alive

ROOT = Path(__file__).resolve().parents[2]
# Where a process hangs. Elsewhere one that the machine holds up for a second is not to be taken for hung.
HANGS = {"STANDIN_TIMEOUT": "1"}


class Service:
    """A running supervisor, its printed lines, and the pids of its children once it is ready."""

    def __init__(self, run_root: Path, **manners: str) -> None:
        self.run_root = run_root
        self.process = popen(
            [sys.executable, "-m", "tests.support.supervised.service"],
            torch=False,
            cwd=ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(run_root), **manners},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pids: list[int] = []

    def wait_for(self, beginning: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(beginning):
                return line.rstrip()
        raise AssertionError(f"the service ended without saying {beginning!r}")

    def wait_until_ready(self) -> None:
        self.pids = [int(pid) for pid in re.findall(r"\d+", self.wait_for("ready"))]

    def end(self) -> int:
        return self.process.wait(timeout=60)

    def leaves_nothing(self) -> bool:
        return not any(is_alive(pid) for pid in self.pids) and not list(self.run_root.iterdir())

    def check_end(self, code: int, by: signal.Signals | None = None) -> None:
        """Send a signal, if any. Raise AssertionError unless the service ends with this code and leaves nothing."""
        if by is not None:
            self.process.send_signal(by)
        assert self.end() == code
        assert self.leaves_nothing()


def wait_until_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {pids}"
        time.sleep(0.01)


def wait_until_empty(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while any(folder.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def processes_with(argument: str) -> Iterator[int]:
    """Pids of the processes whose command line holds a text."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if os.fsencode(argument) in path.read_bytes():
                yield int(path.parent.name)


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start_service(**manners: str) -> Service:
        services.append(Service(tmp_path_factory.mktemp("r"), **manners))
        return services[-1]

    yield start_service
    for service in services:
        with suppress(ProcessLookupError):
            service.process.kill()
        service.process.wait()
        if service.process.stdout:
            service.process.stdout.close()


@pytest.fixture
def serve(start: Callable[..., Service]) -> Callable[..., Service]:
    """Return a function that starts a service and waits until it is ready."""

    def start_and_wait(**manners: str) -> Service:
        service = start(**manners)
        service.wait_until_ready()
        return service

    return start_and_wait


def test_sigterm_drains_and_exits_with_zero(serve):
    service = serve()
    service.check_end(0, by=signal.SIGTERM)


def test_a_second_sigterm_stops_streams_at_once(serve):
    service = serve(STANDIN_FRONTEND="has streams")
    service.process.send_signal(signal.SIGTERM)
    service.wait_for("frontend got a signal")
    service.check_end(143, by=signal.SIGTERM)


@pytest.mark.parametrize("manner", ["", "has streams", "ignores signals"])
def test_ctrl_c_stops_at_once_without_orphans(serve, manner):
    service = serve(STANDIN_FRONTEND=manner)
    service.check_end(130, by=signal.SIGINT)


def test_sighup_has_the_frontend_read_its_files_and_ends_nothing(serve):
    service = serve()
    for _ in range(2):
        service.process.send_signal(signal.SIGHUP)
        service.wait_for("frontend reads its files")
    service.wait_for("beating")
    service.process.send_signal(signal.SIGTERM)
    assert service.end() == 0


def test_sigquit_stops_at_once(serve):
    service = serve(STANDIN_FRONTEND="has streams")
    service.check_end(131, by=signal.SIGQUIT)


def test_sigusr1_tells_the_state_and_ends_nothing(serve):
    service = serve()
    service.wait_for("beating")
    service.process.send_signal(signal.SIGUSR1)
    said = service.wait_for("state")
    assert re.fullmatch(r"state serving; model process \d+ heard .* s ago, HTTP process \d+ heard .* s ago", said)
    service.process.send_signal(signal.SIGTERM)
    assert service.end() == 0


def test_no_child_leaves_a_core_file_with_prompts_and_keys(serve):
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        service = serve()
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    assert [resource.prlimit(pid, resource.RLIMIT_CORE)[0] for pid in service.pids] == [0, 0]


@pytest.mark.slow
def test_signals_to_the_whole_group_end_no_child(serve):
    service = serve()
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        for pid in service.pids:
            os.kill(pid, number)
    service.wait_for("beating")
    service.wait_for("beating")
    service.process.send_signal(signal.SIGTERM)
    assert service.end() == 0


@pytest.mark.slow
def test_a_stopped_frontend_is_taken_for_hung_and_killed(serve):
    service = serve(**HANGS)
    os.kill(service.pids[1], signal.SIGSTOP)
    assert service.wait_for("failed") == "failed The HTTP process hung (no heartbeat for 1 s) and was ended."
    service.check_end(1)


@pytest.mark.slow
def test_a_frontend_that_does_not_become_ready_ends_the_service(start):
    service = start(STANDIN_FRONTEND="is never ready", STANDIN_HTTP_READY="1")
    assert service.wait_for("failed") == "failed The HTTP process did not become ready within 1 s."
    service.check_end(1)


def test_a_frontend_that_cannot_serve_the_model_says_why(start):
    service = start(STANDIN_FRONTEND="cannot serve the model")
    assert service.wait_for("failed") == "failed The tokenizer is none."
    service.check_end(1)


def test_a_killed_worker_ends_the_service_with_a_sentence(serve):
    service = serve()
    os.kill(service.pids[0], signal.SIGKILL)
    assert "model process was ended by SIGKILL" in service.wait_for("failed")
    service.check_end(1)


def test_a_worker_that_dies_during_a_drain_makes_the_exit_code_one(serve):
    service = serve(STANDIN_FRONTEND="has streams")
    service.process.send_signal(signal.SIGTERM)
    service.wait_for("frontend got a signal")
    os.kill(service.pids[0], signal.SIGKILL)
    service.wait_for("failed")
    service.check_end(1)


def test_a_frontend_that_is_killed_during_a_drain_makes_the_exit_code_one(serve):
    service = serve(STANDIN_FRONTEND="has streams")
    service.process.send_signal(signal.SIGTERM)
    service.wait_for("frontend got a signal")
    os.kill(service.pids[1], signal.SIGKILL)
    assert "HTTP process was ended by SIGKILL" in service.wait_for("failed")
    service.check_end(1)


def test_a_killed_frontend_ends_the_service_with_a_sentence(serve):
    service = serve()
    os.kill(service.pids[1], signal.SIGKILL)
    assert "HTTP process was ended by SIGKILL" in service.wait_for("failed")
    service.check_end(1)


@pytest.mark.parametrize("manner", ["has streams", pytest.param("ignores signals", marks=pytest.mark.slow)])
def test_a_killed_supervisor_leaves_nothing(serve, manner):
    service = serve(STANDIN_FRONTENDS="2", STANDIN_FRONTEND=manner)
    service.process.kill()
    # Clients are told: the HTTP processes do not die as the model process does.
    for _ in range(2):
        service.wait_for("frontend got a signal")
    if manner == "has streams":
        for pid in service.pids[1:]:
            os.kill(pid, signal.SIGTERM)
    wait_until_dead(service.pids)
    wait_until_empty(service.run_root)


def test_a_first_start_that_reports_nothing_more_is_ended(start):
    service = start(STANDIN_WORKER="loads for ever", STANDIN_REPORTING="1")
    service.wait_for("loading 1 2")
    assert "hung at its start (nothing reported for 1 s) and was ended" in service.wait_for("failed")
    service.check_end(1)


def test_a_supervisor_killed_while_it_loads_leaves_nothing(start):
    service = start(STANDIN_WORKER="loads for ever")
    service.wait_for("loading 1 2")
    service.process.kill()
    wait_until_empty(service.run_root)


@pytest.mark.slow
def test_what_a_supervisor_leaves_that_was_killed_with_its_janitor_the_next_one_removes(serve):
    service = serve()
    [run_dir] = service.run_root.iterdir()
    [janitor] = set(processes_with(str(run_dir))) - set(service.pids)
    os.kill(janitor, signal.SIGKILL)
    service.process.kill()
    # It holds the lock of its directory until it has ended.
    service.process.wait()
    wait_until_dead(service.pids)
    assert [run_dir] == list(service.run_root.iterdir())
    following = Service(service.run_root)
    following.wait_until_ready()
    assert run_dir not in list(service.run_root.iterdir())
    following.process.send_signal(signal.SIGTERM)
    assert following.end() == 0
    assert following.process.stdout is not None
    following.process.stdout.close()
    assert following.leaves_nothing()


@pytest.mark.slow
def test_a_stopped_worker_is_taken_for_hung_and_killed(serve):
    service = serve(**HANGS)
    os.kill(service.pids[0], signal.SIGSTOP)
    assert "hung (no heartbeat for 1 s)" in service.wait_for("failed")
    service.check_end(1)


@pytest.mark.slow
def test_a_busy_worker_whose_step_stands_still_is_taken_for_hung(serve):
    service = serve(STANDIN_WORKER="hangs", **HANGS)
    assert "hung (busy without progress for 1 s)" in service.wait_for("failed")
    assert service.end() == 1


@pytest.mark.slow
def test_an_idle_worker_that_stands_still_is_taken_for_hung(serve):
    service = serve(STANDIN_WORKER="wedges idle", **HANGS)
    assert "hung (idle without progress for 1 s)" in service.wait_for("failed")
    assert service.end() == 1


def test_a_worker_that_cannot_serve_says_why_and_nothing_becomes_ready(start):
    service = start(STANDIN_WORKER="refuses")
    assert service.wait_for("failed") == "failed The model is too big for this machine."
    service.check_end(1)


def test_a_crash_names_the_exit_code(start):
    service = start(STANDIN_WORKER="crashes")
    assert service.wait_for("failed").endswith("ended with exit code 7.")
    assert service.end() == 1


def test_a_killed_worker_is_started_again_as_another_engine(start):
    service = start(STANDIN_RESTARTS="1")
    service.wait_for("frontend hears of engine 7")
    service.wait_until_ready()
    worker, frontend = service.pids
    os.kill(worker, signal.SIGKILL)
    said = service.wait_for("notice")
    assert "was ended by SIGKILL (often: out of memory); it is started again (1 of at most 1 in a row)." in said
    service.wait_for("frontend hears of engine 8")
    said = service.wait_for("notice")
    assert re.search(r"serves again, \d+\.\d s after its end", said)
    new_worker, same_frontend = [int(word) for word in said.split()[-2:]]
    assert new_worker != worker
    assert same_frontend == frontend
    [run_dir] = service.run_root.iterdir()
    assert {path.name for path in run_dir.iterdir() if path.name.endswith(".7")} == set()
    service.wait_for("beating")
    os.kill(new_worker, signal.SIGSEGV)
    assert "was ended by SIGSEGV" in service.wait_for("failed")
    service.wait_for("frontend hears of engine None")
    service.check_end(1)


def test_ranks_are_started_again_when_rank_0_has_ended_whatever_their_agent_does(serve):
    service = serve(STANDIN_WORKER="is an agent", STANDIN_RESTARTS="1")
    service.process.send_signal(signal.SIGUSR1)
    [rank] = re.findall(r"model process (\d+) ", service.wait_for("state"))
    assert int(rank) not in service.pids
    os.kill(int(rank), signal.SIGKILL)
    assert f"Rank 0 (process {rank}) ended; it is started again" in service.wait_for("notice")
    assert "serves again" in service.wait_for("notice")
    service.check_end(0, by=signal.SIGTERM)


@pytest.mark.slow
def test_a_hung_worker_is_started_again(serve):
    service = serve(STANDIN_RESTARTS="1", **HANGS)
    os.kill(service.pids[0], signal.SIGSTOP)
    assert "hung (no heartbeat for 1 s) and was ended; it is started again" in service.wait_for("notice")
    assert "serves again" in service.wait_for("notice")
    service.check_end(0, by=signal.SIGTERM)


@pytest.mark.slow
def test_a_worker_that_hangs_while_it_loads_again_is_ended(serve):
    service = serve(STANDIN_WORKER="loads for ever again", STANDIN_RESTARTS="2", **HANGS)
    os.kill(service.pids[0], signal.SIGKILL)
    assert "was ended by SIGKILL" in service.wait_for("notice")
    assert "did not load its model again within" in service.wait_for("notice")
    service.check_end(130, by=signal.SIGINT)


@pytest.mark.slow
def test_a_worker_that_is_stopped_while_it_loads_again_is_ended_after_the_timeout_of_an_engine(serve):
    service = serve(STANDIN_WORKER="loads for ever again", STANDIN_RESTARTS="2", **HANGS)
    before = descendants(service.process.pid)
    os.kill(service.pids[0], signal.SIGKILL)
    assert "was ended by SIGKILL" in service.wait_for("notice")
    service.wait_for("frontend hears of engine 8")
    [loading] = descendants(service.process.pid) - before
    os.kill(loading, signal.SIGSTOP)
    sentence = f"hung at its start (process {loading} was stopped for 1 s) and was ended; it is started again"
    assert sentence in service.wait_for("notice")
    service.check_end(130, by=signal.SIGINT)


def test_a_worker_that_dies_during_a_drain_is_started_again_for_the_streams(serve):
    service = serve(STANDIN_FRONTEND="has streams", STANDIN_RESTARTS="1")
    service.process.send_signal(signal.SIGTERM)
    service.wait_for("frontend got a signal")
    os.kill(service.pids[0], signal.SIGKILL)
    service.wait_for("frontend hears of engine 8")
    os.kill(service.pids[1], signal.SIGTERM)
    service.check_end(0)


def test_a_worker_that_crashes_again_and_again_ends_the_service(start):
    service = start(STANDIN_WORKER="crashes", STANDIN_RESTARTS="2")
    assert "(1 of at most 2 in a row)" in service.wait_for("notice")
    assert service.wait_for("failed").endswith("ended with exit code 7.")
    service.check_end(1)


def test_a_killed_frontend_is_started_again_on_the_same_port(serve):
    service = serve(STANDIN_RESTARTS="1")
    os.kill(service.pids[1], signal.SIGKILL)
    assert "HTTP process was ended by SIGKILL" in service.wait_for("notice")
    service.wait_for("beating")
    service.wait_for("beating")
    service.process.send_signal(signal.SIGUSR1)
    [new] = re.findall(r"HTTP process (\d+) heard", service.wait_for("state"))
    os.kill(int(new), signal.SIGKILL)
    assert "HTTP process was ended by SIGKILL" in service.wait_for("failed")
    service.check_end(1)


@pytest.mark.slow
def test_a_killed_frontend_of_two_is_started_again_and_hears_of_the_engine(serve):
    service = serve(STANDIN_FRONTENDS="2", STANDIN_RESTARTS="1")
    worker, first, second = service.pids
    os.kill(second, signal.SIGKILL)
    said = service.wait_for("notice")
    assert "HTTP process 1 was ended by SIGKILL (often: out of memory); it is started again (1 of at most 1" in said
    assert service.wait_for("frontend hears") == "frontend hears of engine 7"
    for _ in range(2):
        service.wait_for("beating")
    service.process.send_signal(signal.SIGUSR1)
    state = service.wait_for("state")
    assert f"model process {worker} heard" in state
    assert f"HTTP process 0 {first} heard" in state
    [new] = re.findall(r"HTTP process 1 (\d+) heard", state)
    assert int(new) not in service.pids
    service.process.send_signal(signal.SIGTERM)
    assert service.end() == 0
    service.pids.append(int(new))
    assert service.leaves_nothing()


@pytest.mark.slow
def test_a_stopped_frontend_of_two_is_killed_and_started_again(serve):
    service = serve(STANDIN_FRONTENDS="2", STANDIN_RESTARTS="1", **HANGS)
    os.kill(service.pids[1], signal.SIGSTOP)
    assert "HTTP process 0 hung (no heartbeat for 1 s) and was ended; it is started" in service.wait_for("notice")
    for _ in range(2):
        service.wait_for("beating")
    assert is_alive(service.pids[2])
    assert not is_alive(service.pids[1])
    service.check_end(0, by=signal.SIGTERM)


def test_every_frontend_hears_of_the_next_engine(serve):
    service = serve(STANDIN_FRONTENDS="2", STANDIN_RESTARTS="1")
    os.kill(service.pids[0], signal.SIGKILL)
    assert [service.wait_for("frontend hears of engine 8") for _ in range(2)]
    service.check_end(0, by=signal.SIGTERM)


def test_a_drain_waits_for_the_last_frontend(serve):
    service = serve(STANDIN_FRONTENDS="2", STANDIN_FRONTEND="has streams")
    service.process.send_signal(signal.SIGTERM)
    for _ in range(2):
        service.wait_for("frontend got a signal")
    worker, first, second = service.pids
    os.kill(first, signal.SIGTERM)
    wait_until_dead([first])
    assert is_alive(worker)
    assert is_alive(second)
    os.kill(second, signal.SIGTERM)
    service.check_end(0)


def test_a_frontend_that_ends_too_often_lets_the_others_finish_and_ends_the_service(serve):
    service = serve(STANDIN_FRONTENDS="2", STANDIN_FRONTEND="has streams")
    worker, first, second = service.pids
    os.kill(first, signal.SIGKILL)
    assert "HTTP process 0 was ended by SIGKILL" in service.wait_for("failed")
    service.wait_for("frontend got a signal")
    assert is_alive(worker)
    os.kill(second, signal.SIGTERM)
    service.check_end(1)


def test_a_frontend_that_is_between_two_lives_does_not_outlast_a_drain(serve):
    service = serve(STANDIN_FRONTENDS="2", STANDIN_RESTARTS="1")
    os.kill(service.pids[1], signal.SIGKILL)
    service.wait_for("notice")
    service.check_end(0, by=signal.SIGTERM)


@pytest.mark.slow
def test_both_processes_that_die_at_once_are_started_again(serve):
    service = serve(STANDIN_RESTARTS="1")
    for pid in service.pids:
        os.kill(pid, signal.SIGKILL)
    service.wait_for("notice")
    service.wait_for("notice")
    service.wait_for("beating")
    service.wait_for("beating")
    service.check_end(0, by=signal.SIGTERM)


def test_a_signal_between_two_lives_ends_the_service(start):
    service = start(STANDIN_WORKER="crashes", STANDIN_RESTARTS="1")
    service.wait_for("notice")
    service.check_end(130, by=signal.SIGINT)


def test_sigterm_while_loading_does_not_wait_for_the_worker(start):
    service = start(STANDIN_WORKER="loads for ever")
    service.wait_for("loading 1 2")
    service.check_end(0, by=signal.SIGTERM)


def test_a_watch_that_fails_ends_the_service_for_nobody_would_see_a_hang(tmp_path: Path) -> None:
    service = Service(tmp_path, STANDIN_FAULT="1")
    assert service.end() != 0
    assert not list(tmp_path.glob("moeserve*/*"))
