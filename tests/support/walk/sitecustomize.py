"""Python loads it at its start where PYTHONPATH names this folder: it records which functions a chat request calls.

The first call of each function is kept, with the files of its callers, innermost first, in two phases: "in" until the
request goes to the engine, and "back" from then on. A text process records while it answers. The file WALK_RECORDS.PID
has all records so far, as JSON.
"""

import json
import os
import sys
from types import FrameType
from typing import Any

ROOT = os.path.abspath(__file__).removesuffix("tests/support/walk/sitecustomize.py")


class Recorder:
    """A profile function."""

    def __init__(self) -> None:
        self._phase = "in"
        self._is_on = False
        self._calls: dict[tuple[str, str, str], list[str]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "c_call" or not code.co_filename.startswith(ROOT) or "/.venv/" in code.co_filename:
            return
        file, name = code.co_filename.removeprefix(ROOT), code.co_name
        if (file, name) == ("moeserve/frontend/prepare/text_program.py", "_answer"):
            self._is_on = event == "call"
        elif file == "moeserve/frontend/connections.py" and name == "data_received":
            self._is_on |= frame.f_locals["data"].startswith(b"POST ")
        call = self._phase, file, code.co_qualname
        if event == "call" and self._is_on and call not in self._calls:
            self._calls[call] = _callers(frame)
            self._write()
        if (file, name, event) == ("moeserve/wire.py", "encode", "call") and _sends_generate(frame):
            self._phase = "back"

    def _write(self) -> None:
        path = f"{os.environ['WALK_RECORDS']}.{os.getpid()}"
        with open(f"{path}~", "w") as out:
            json.dump([[*call, callers] for call, callers in self._calls.items()], out)
        os.replace(f"{path}~", path)  # the process is killed at any time


def _callers(frame: FrameType) -> list[str]:
    files, caller = [], frame.f_back
    while caller is not None:
        file = caller.f_code.co_filename
        if file.startswith(ROOT) and "/.venv/" not in file:
            files.append(file.removeprefix(ROOT))
        caller = caller.f_back
    return files


def _sends_generate(frame: FrameType) -> bool:
    return type(frame.f_locals["message"]).__name__ == "Generate"


if {"launcher.frontend_main", "moeserve.frontend.prepare.text_program"} & set(sys.orig_argv) and (
    "--check" not in sys.orig_argv
):
    sys.setprofile(Recorder())
