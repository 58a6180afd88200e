"""What clients and operators see when a process of a real service dies, hangs or is told to stop, without restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.support.saved_models import saved_model
from tests.support.service import Service, descendants, service, wait_until
from tests.support.tiny_checkpoint import MAX_POSITION
from tests.support.tiny_model import write_model_dir

ENDLESS = MAX_POSITION // 2


@pytest.fixture
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(model, tmp_path_factory.mktemp("s"), "--max-restarts", "0") as started:
        yield started


@pytest.fixture
def watched(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that soon takes a process for hung; where none hangs, one that is held up for as long is not to be."""
    with service(model, tmp_path_factory.mktemp("s"), "--engine-timeout", "5", "--max-restarts", "0") as started:
        yield started


@pytest.fixture
def executed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose interpreters are started as users start them."""
    with service(model, tmp_path_factory.mktemp("s"), "--max-restarts", "0", forked=False) as started:
        yield started


def test_settings_that_no_process_can_use_end_the_start_with_code_2_and_one_sentence(
    model: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("user:")
    for number, (setting, sentence) in enumerate(
        (
            (("--api-key-file", str(keys)), "an API key must not be empty"),
            (("--max-model-len", str(2 * MAX_POSITION)), "exceeds the model's"),
        )
    ):
        with service(model, tmp_path / str(number), *setting, ready=False) as refused:
            assert refused.end() == 2
            (line,) = refused.errors.read_text().splitlines()
            assert line.startswith("Error: ")
            assert sentence in line


def test_a_library_that_transformers_loads_prints_nothing_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "gemma"
    folder.mkdir()
    write_model_dir(folder)
    saved_model("gemma4_text", folder)
    with service(folder, tmp_path / "service", "--log-format", "json", forked=False) as running:
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
        said = running.errors.read_text()
        assert "leaked" not in said, said


def test_sigterm_lets_streams_finish_and_refuses_new_requests(running: Service) -> None:
    # The second one holds the drain open until it is closed.
    events, holding = running.stream(max_tokens=300), running.stream(max_tokens=ENDLESS)
    next(events)
    next(holding)
    running.process.send_signal(signal.SIGTERM)
    with httpx2.Client(base_url=running.http.base_url, timeout=60) as other:
        wait_until(lambda: other.get("/ready").status_code == 503)
        refused = other.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 1})
        assert refused.status_code == 503
    last = [event for event in events if event["choices"]][-1]
    assert last["choices"][0]["finish_reason"] == "length"
    holding.close()  # type: ignore[attr-defined]
    assert running.end() == 0
    assert running.leaves_nothing()


def test_a_second_sigterm_ends_streams_with_an_error_event(running: Service) -> None:
    events = running.stream(max_tokens=ENDLESS)
    next(events)
    running.process.send_signal(signal.SIGTERM)
    with httpx2.Client(base_url=running.http.base_url, timeout=60) as other:
        wait_until(lambda: other.get("/ready").status_code == 503)
    running.process.send_signal(signal.SIGTERM)
    assert "error" in list(events)[-1]
    assert running.end() == 143
    assert running.leaves_nothing()


def test_ctrl_c_stops_at_once(running: Service) -> None:
    events = running.stream(max_tokens=ENDLESS)
    next(events)
    running.process.send_signal(signal.SIGINT)
    assert "error" in list(events)[-1]
    assert running.end() == 130
    assert running.leaves_nothing()


def test_a_killed_worker_gives_streams_a_terminal_error(running: Service) -> None:
    events = running.stream(max_tokens=ENDLESS)
    next(events)
    os.kill(running.pids["worker"], signal.SIGKILL)
    assert "error" in list(events)[-1]
    assert running.end() == 1
    assert "The model process was ended by SIGKILL" in running.errors.read_text()
    assert running.leaves_nothing()


def test_a_stopped_worker_is_found_out_and_ends_the_service(watched: Service) -> None:
    events = watched.stream(max_tokens=ENDLESS)
    next(events)
    os.kill(watched.pids["worker"], signal.SIGSTOP)
    assert "error" in list(events)[-1]
    assert watched.end() == 1
    assert "The model process hung" in watched.errors.read_text()
    assert watched.leaves_nothing()


def test_a_killed_frontend_ends_the_service(running: Service) -> None:
    os.kill(running.pids["frontend"], signal.SIGKILL)
    assert running.end() == 1
    assert "The HTTP process was ended by SIGKILL" in running.errors.read_text()
    assert running.leaves_nothing()


def test_a_stopped_frontend_is_found_out_and_ends_the_service(watched: Service) -> None:
    os.kill(watched.pids["frontend"], signal.SIGSTOP)
    assert watched.end() == 1
    assert "The HTTP process hung" in watched.errors.read_text()
    assert watched.leaves_nothing()


def test_a_hangup_of_all_processes_ends_none(running: Service) -> None:
    events = running.stream(max_tokens=100)
    next(events)
    before = descendants(running.process.pid)
    for pid in (running.process.pid, *before):
        os.kill(pid, signal.SIGHUP)
    last = [event for event in events if event["choices"]][-1]
    assert last["choices"][0]["finish_reason"] == "length"
    assert descendants(running.process.pid) >= before
    wait_until(lambda: "settings_reloaded" in running.errors.read_text())
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 0
    assert running.leaves_nothing()


def test_a_killed_supervisor_gives_streams_a_terminal_error_and_leaves_nothing(executed: Service) -> None:
    events = executed.stream(max_tokens=ENDLESS)
    next(events)
    executed.process.kill()
    assert "error" in list(events)[-1]
    executed.process.wait()
    wait_until(executed.leaves_nothing)


def test_only_the_http_port_is_open_and_the_run_directory_is_private(running: Service) -> None:
    [run_dir] = running.run_root.iterdir()
    assert run_dir.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in run_dir.iterdir())
    port = f"{httpx2.URL(str(running.http.base_url)).port:04X}"
    for pid in [running.process.pid, *running.pids.values()]:
        assert set(listening_ports(pid)) <= {port}


def listening_ports(pid: int) -> Iterator[str]:
    """Ports (hexadecimal) of the TCP sockets in state LISTEN that the process holds."""
    held = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(os.readlink(link))
        except FileNotFoundError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                yield fields[1].rpartition(":")[2]
