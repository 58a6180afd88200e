"""aiperf: a small run for each kind of request."""

import json
import os
import subprocess
import sys
from pathlib import Path

from client_checks import KEY, MODEL, URL, Checks

REQUESTS = 6


def run(kind, *options):
    folder = Path(f"{kind}-{len(options)}").resolve()
    command = [str(Path(sys.executable).parent / "aiperf"), "profile", "-m", MODEL, "--url", URL.partition("://")[2]]
    fixed = ["--endpoint-type", kind, "--streaming", "--tokenizer", os.environ["TOKENIZER"], "--api-key", KEY]
    load = ["--concurrency", "2", "--isl", "32", "--osl", "8", "--ui", "none", "--random-seed", "1"]
    done = subprocess.run(
        [*command, *fixed, *load, *(options or ("--request-count", str(REQUESTS))), "--artifact-dir", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:]
    (report,) = folder.rglob("profile_export_aiperf.json")
    said = json.loads(report.read_text())
    assert said["request_count"]["avg"] >= REQUESTS, said["request_count"]
    assert not said.get("error_summary"), said["error_summary"]


@Checks("chat")
def completes():
    run("chat")
    shared = ["--shared-system-prompt-length", "64", "--conversation-num", "3", "--conversation-turn-mean", "2"]
    run("chat", *shared, "--conversation-turn-stddev", "0", "--use-server-token-count")


@Checks("responses")
def completes():  # noqa: F811
    run("responses")


@Checks("messages")
def completes():  # noqa: F811
    run("messages")


@Checks("completions")
def completes():  # noqa: F811
    run("completions")
