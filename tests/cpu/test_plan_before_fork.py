"""A service that loads a model in order to copy itself starts no pool of threads before: a fork would not have it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.tiny_transformers import save_tiny

# Plans models' memory, one after the other; then a copy of the process computes on two threads. It hangs if it is to
# wait for lost ones.
PLAN = """
import os, signal, sys
from pathlib import Path
import torch
from moeserve.config import ServeConfig
from moeserve.engine.memory_plan import plan_model

for folder in sys.argv[1:]:
    torch.set_num_threads(2)
    plan_model(Path(folder), ServeConfig(device="cpu"))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    if not os.fork():
        signal.alarm(30)
        torch.set_num_threads(2)
        torch.ones(1_000_000).cos()
        os._exit(0)
    print(os.wait()[1])
"""


def test_a_copy_of_a_process_that_has_planned_computes_on_several_threads(tmp_path: Path) -> None:
    folders = [tmp_path / model_type for model_type in ("afmoe", "mixtral")]
    for folder in folders:
        folder.mkdir()
        save_tiny(folder.name, folder)
    arguments = [sys.executable, "-c", PLAN, *map(str, folders)]
    found = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "0\n0\n"), found.stderr
