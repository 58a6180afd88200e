"""A key that may do anything through any route takes no process's memory and harms no other key's requests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import httpx2
import pytest

from tests.support.service import ROOT, Service, descendants, service
from tests.support.tiny_checkpoint import write_tiny_checkpoint

MIB = 2**20
MOST_GROWTH = 256 * MIB  # of a process's memory
LONGEST_TURN_S = 0.25  # of processor time that the event loop takes before it looks at other requests
LIMITS = ("--slo", "ttft:2s,tpot:50ms", "--num-frontends", "1")


@dataclass
class Victim:
    """The other key: asks for a chat, its kept response and the models by turns, and keeps what went wrong."""

    http: httpx2.Client
    num_answers: int = 0
    faults: list[str] = field(default_factory=list)

    def ask_until(self, ended: Event) -> None:
        made = self.http.post("/v1/responses", json={"model": "m", "input": "hello", "max_output_tokens": 4})
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        while not ended.is_set():
            answers = [
                self.http.get("/v1/models"),
                self.http.get(f"/v1/responses/{made.json()['id']}"),
                self.http.post("/v1/chat/completions", json=chat),
            ]
            self.num_answers += len(answers)
            self.faults += [answer.text[:200] for answer in answers if answer.status_code != 200]


@contextmanager
def asking(victim: Victim) -> Iterator[None]:
    ended = Event()
    thread = Thread(target=victim.ask_until, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def memory_of(pid: int, name: str) -> int | None:
    """Bytes of a process's memory, None for one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def begin_anew(pid: int) -> int | None:
    """Return a process's memory, whose peak is counted from now on."""
    now = memory_of(pid, "VmRSS")
    if now is not None:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return now


@pytest.fixture
def attacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    keys = tmp_path / "keys"
    keys.write_text("user:victim\nuser:bad\n")
    keys.chmod(0o600)
    (tmp_path / "turns").write_text("0")
    monkeypatch.setenv("NOTED_TURNS", str(tmp_path / "turns"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/support/ticking:{ROOT}")
    model = tmp_path / "m"
    model.mkdir()
    settings = ("--api-key-file", str(keys), *LIMITS)
    with service(write_tiny_checkpoint(model), tmp_path / "s", *settings, forked=False) as running:
        running.http.headers["authorization"] = "Bearer victim"
        yield running


@pytest.mark.parametrize(
    ("seconds", "seed"), [(8, 1), *(pytest.param(60, seed, marks=pytest.mark.long) for seed in (2, 3))]
)
def test_a_key_that_may_do_anything_takes_no_memory_and_no_turns(
    attacked: Service, tmp_path: Path, seconds: int, seed: int
) -> None:
    port = str(attacked.http.base_url.port)
    victim = Victim(attacked.http)
    for _ in range(3):
        victim.http.post("/v1/completions", json={"model": "m", "prompt": "warm", "max_tokens": 2})
    processes = [attacked.process.pid, *descendants(attacked.process.pid)]
    before = {pid: begin_anew(pid) for pid in processes}
    with asking(victim):
        fuzz = [sys.executable, "-m", "tests.support.key_fuzz", port, "bad", str(seconds), str(seed)]
        done = subprocess.run(
            fuzz, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    grown = {
        pid: peak - bytes_before
        for pid, bytes_before in before.items()
        if bytes_before is not None and (peak := memory_of(pid, "VmHWM")) is not None
    }
    assert victim.num_answers > 0
    assert victim.faults == []
    assert max(grown.values()) < MOST_GROWTH, {pid: size // MIB for pid, size in grown.items()}
    assert float((tmp_path / "turns").read_text()) < LONGEST_TURN_S
