"""`moeserve run-batch` with a service of its own, of real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.forking import popen
from tests.support.service import ROOT
from tests.support.tiny_checkpoint import write_tiny_checkpoint


def test_a_run_starts_a_service_and_leaves_none_behind(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    run_root = tmp_path / "run"
    run_root.mkdir()
    body = {"model": "m", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
    with (tmp_path / "in.jsonl").open("w") as lines:
        for number in range(12):
            request = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
            lines.write(json.dumps(request) + "\n")
    files = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    settings = [str(model), "--served-model-name", "m", "--kv-cache-memory", "64MiB", "--max-num-seqs", "2"]
    with popen(
        [sys.executable, "-m", "launcher.cli", "run-batch", *files, "--", *settings],
        cwd=ROOT,
        env={**os.environ, "XDG_RUNTIME_DIR": str(run_root), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        _, said = run.communicate(timeout=200)
    assert run.returncode == 0, said
    assert "12 succeeded, 0 failed" in said
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {answer["custom_id"] for answer in answers} == {f"r{number}" for number in range(12)}
    assert {answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers} == {4}
    assert list(run_root.iterdir()) == []
