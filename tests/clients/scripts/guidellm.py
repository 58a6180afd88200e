"""guidellm: a small run for each kind of request."""

import json
import os
import subprocess
import sys
from pathlib import Path

from client_checks import KEY, MODEL, URL, Checks

DATA = {"kind": "synthetic_text", "prompt_tokens": 32, "output_tokens": 8}
PREFIXES = {"prefix_buckets": [{"bucket_weight": 100, "prefix_count": 2, "prefix_tokens": 64}]}
REQUESTS = 6
# Turns with tools have no limit on their tokens, and the demo never ends a text or its calls by itself.
FIND = {
    "name": "find",
    "description": "Find a word.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "maxLength": 12}},
        "required": ["word"],
        "additionalProperties": False,
    },
}
TOOLS = {"tools": [{"type": "function", "function": FIND}], "tool_call_turns": [1]}
ONE_CALL = {"extras": {"body": {"parallel_tool_calls": False}}}


def run(check, path, backend=None, **data):
    report = Path(f"{path.strip('/').replace('/', '-')}-{len(data)}.json").resolve()
    backend = {"kind": "openai_http", "target": URL, "model": MODEL, "request_format": path, "api_key": KEY} | (
        backend or {}
    )
    options = {
        "--backend": json.dumps(backend),
        "--tokenizer": f"kind=hf_auto,model={os.environ['TOKENIZER']}",
        "--profile": "kind=concurrent,streams=2",
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--data": json.dumps(DATA | data),
        "--output": f"kind=json,path={report}",
    }
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console-interactive"]
    done = subprocess.run(
        [*command, *(part for option in options.items() for part in option)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:]
    said = json.loads(report.read_text())
    totals = said["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["errored"] == 0, totals
    assert totals["successful"] >= REQUESTS - 2, totals
    return f"{totals}"


chat = Checks("chat")


@chat
def completes():
    return run(chat, "/v1/chat/completions")


@chat
def turns_with_tools():
    return run(chat, "/v1/chat/completions", ONE_CALL, turns=3, **TOOLS, **PREFIXES)


@Checks("completions")
def completes():  # noqa: F811
    return run(chat, "/v1/completions", **PREFIXES)
