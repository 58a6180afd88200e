"""llm-comply: answers against the published schemas of chat completions, responses and messages."""

import json
import subprocess
import sys
from pathlib import Path

from client_checks import KEY, MODEL, V1, Checks

FORMATS = {"chat": "openai-chat", "responses": "open-responses", "messages": "anthropic"}


def results_of(form):
    """Return llm-comply's results of one format."""
    program = str(Path(sys.executable).parent / "llm-comply")
    command = [program, "--format", form, "-u", V1, "-k", KEY, "-m", MODEL, "--json", "--timeout", "120"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip(), done.stderr[-1500:]
    return json.loads(done.stdout)["results"]


def report(check, result):
    def passes():
        assert result["status"] == "passed", "; ".join(result.get("errors", [result["status"]]))

    passes.__name__ = result["id"]
    if "image" in result["id"]:
        check.cannot(result["id"], "images are refused in words")
    elif result["status"] == "skipped":
        check.cannot(result["id"], "skipped by llm-comply")
    else:
        check(passes)


for api, form in FORMATS.items():
    for result in results_of(form):
        report(Checks(api), result)
