"""Counts the files that a streamed chat request passes, from socket to engine and back: `python -m tests.support.walk`.

An HTTP process as the supervisor starts it serves one request over a scripted engine; `sitecustomize.py` records the
calls in it and in the text process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2

from tests.support.fake_engine import FakeEngine
from tests.support.frontend import ROOT, run_context

_BODY = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
_TO_END_S = 0.5  # the time that the HTTP process has to end the request after its client has the last event
_LOOPS = ("moeserve/frontend/jobs/", "moeserve/frontend/store/")  # they run meanwhile

Call = tuple[str, str, str, list[str]]  # phase, file, function, files of the callers


def record(folder: Path) -> tuple[list[Call], list[Call]]:
    """Serve one request; return the first calls in the HTTP process, and in the text process."""
    run = run_context(folder)
    folders = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": folders, "WALK_RECORDS": str(folder / "calls")}
    with socket.create_server(("127.0.0.1", 0)) as listener, FakeEngine(run):
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "launcher.frontend_main", str(run.save()), "--fd", str(listener.fileno())]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[listener.fileno()], stderr=subprocess.DEVNULL
        )
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            while client.get("/ready").status_code != 200:
                time.sleep(0.05)
            client.post("/v1/chat/completions", json=_BODY).raise_for_status()
            time.sleep(_TO_END_S)
        process.kill()
        process.wait()
    calls = {path: [(*call,) for call in json.loads(path.read_bytes())] for path in folder.glob("calls.*[0-9]")}
    own = calls.pop(folder / f"calls.{process.pid}")
    return own, [call for others in calls.values() for call in others]


def main() -> None:
    """Print the figures of docs/design/architecture.md."""
    with TemporaryDirectory() as folder:
        own, text = record(Path(folder))
    walked = [call for call in own if not any(file.startswith(_LOOPS) for file in (call[1], *call[3]))]
    passed = {phase: {call[1] for call in walked if call[0] == phase} for phase in ("in", "back")}
    in_text = {call[1] for call in text}
    way_in = passed["in"] | in_text
    print(f"{len(way_in | passed['back'])} files, {len(way_in)} in ({len(in_text)} in the text process), ", end="")
    print(f"{len(passed['back'])} back; {len({call[1] for call in own} - way_in - passed['back'])} of loops meanwhile")
    for phase, file, function, callers in (*walked, *text):
        if callers and callers[0] != file and file in callers:
            print(f"{phase}: {function} of {file} is called while the file has an open function further out")
    known: set[str] = set()
    num_changes = num_known = 0
    ways = [call[1] for call in walked if call[0] == "in"], [call[1] for call in text]
    for way in ways:
        known |= set(way[:1])
        for before, file in pairwise(way):
            num_changes += file != before
            num_known += file != before and file in known
            known.add(file)
    print(f"{sum(map(len, ways))} functions on the way in, {num_changes} changes of file, {num_known} to a known one")


if __name__ == "__main__":
    main()
