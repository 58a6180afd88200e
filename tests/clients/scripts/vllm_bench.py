"""vllm bench serve: chat and completions, with prompts that share prefixes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from client_checks import KEY, MODEL, URL, Checks

# The command `vllm` looks for a distribution of that name, which the CPU's build has not.
SERVE = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def run(backend, endpoint):
    options = {
        "--backend": backend,
        "--endpoint": endpoint,
        "--base-url": URL,
        "--model": MODEL,
        "--tokenizer": os.environ["TOKENIZER"],
        "--dataset-name": "prefix_repetition",
        "--prefix-repetition-prefix-len": "64",
        "--prefix-repetition-suffix-len": "16",
        "--prefix-repetition-num-prefixes": "2",
        "--prefix-repetition-output-len": "8",
        "--num-prompts": "6",
        "--max-concurrency": "2",
        "--result-dir": str(Path.cwd()),
        "--result-filename": f"{backend}.json",
    }
    command = [sys.executable, "-c", SERVE, "--ignore-eos", "--save-result"]
    done = subprocess.run(
        [*command, *(part for option in options.items() for part in option)],
        env={**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:]
    said = json.loads(Path(f"{backend}.json").read_text())
    assert said["completed"] == 6, said
    assert said["total_output_tokens"] == 6 * 8, said


@Checks("chat")
def completes():
    run("openai-chat", "/v1/chat/completions")


@Checks("completions")
def completes():  # noqa: F811
    run("openai", "/v1/completions")
