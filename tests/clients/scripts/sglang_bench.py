"""sglang.bench_serving: chat and completions, with prompts that share prefixes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from client_checks import KEY, MODEL, URL, Checks


def run(backend):
    report = Path(f"{backend}.jsonl").resolve()
    options = {
        "--backend": backend,
        "--base-url": URL,
        "--model": MODEL,
        "--tokenizer": os.environ["TOKENIZER"],
        "--dataset-name": "generated-shared-prefix",
        "--gsp-num-groups": "2",
        "--gsp-prompts-per-group": "3",
        "--gsp-system-prompt-len": "64",
        "--gsp-question-len": "16",
        "--gsp-output-len": "8",
        "--max-concurrency": "2",
        "--output-file": str(report),
    }
    done = subprocess.run(
        [sys.executable, "-m", "sglang.bench_serving", *(part for option in options.items() for part in option)],
        env={**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:]
    said = json.loads(report.read_text().splitlines()[-1])
    assert said["completed"] == 6, said


@Checks("chat")
def completes():
    run("sglang-oai-chat")


@Checks("completions")
def completes():  # noqa: F811
    run("sglang-oai")
