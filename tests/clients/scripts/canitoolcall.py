"""canitoolcall probe: calls and answers in chat, streamed and not; the service scripts the model's side."""

import json
import os
import subprocess
import sys
from pathlib import Path

from client_checks import KEY, MODEL, V1, Checks

done = subprocess.run(
    [
        str(Path(sys.executable).parent / "canitoolcall"),
        *("probe", "--base-url", V1, "--model", MODEL, "--api-key-env", "API_KEY"),
        *("--json", "report.json", "--timeout", "120", "--concurrency", "2"),
    ],
    env={**os.environ, "API_KEY": KEY},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
)
if not Path("report.json").exists():
    sys.exit(done.stdout[-1500:])
chat = Checks("chat")
for outcome in json.loads(Path("report.json").read_text())["outcomes"]:

    def passes(outcome=outcome):
        assert outcome["status"] == "pass", f"{outcome['status']}: {outcome['detail']} {outcome['observed']}"
        assert not outcome["warnings"], outcome["warnings"]

    way = {"scenario": "streamed" if outcome["stream"] else "whole"}.get(outcome["check"], "alike")
    passes.__name__ = f"{outcome['scenario_id']} {way}"
    chat(passes)
