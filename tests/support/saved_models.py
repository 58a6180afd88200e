"""Tiny models of transformers as folders, for tests that need them saved and not in this process: torch, transformers
and their modelling code stay out of it.

`saved_model` copies a model out of the cache, where a program puts it first: `python -m tests.support.saved_models CASE
FOLDER`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp

from moeserve.config import cache_root
from tests.support.forking import popen

ROOT = Path(__file__).resolve().parents[2]


def saved_model(case: str, folder: Path) -> None:
    """Save a case of `tiny_models.py` in `folder`, as `tiny_models.save` does."""
    shutil.copytree(_cached(case), folder, dirs_exist_ok=True)


@cache
def _cached(case: str) -> Path:
    """The case's folder under a digest of what decides on its contents."""
    made_from = (
        ROOT / "tests/support/tiny_models.py"
    ).read_bytes() + f"{version('torch')} {version('transformers')}".encode()
    models = cache_root() / "tests" / sha256(made_from).hexdigest()[:16]
    if not (models / case).exists():
        models.mkdir(parents=True, exist_ok=True)
        made = Path(mkdtemp(dir=models))
        command = [sys.executable, "-m", "tests.support.saved_models", case, str(made)]
        with popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as program:
            assert program.wait() == 0
        try:
            made.rename(models / case)
        except OSError:
            # Another process was faster.
            shutil.rmtree(made)
    return models / case


if __name__ == "__main__":
    from tests.support.tiny_models import save

    save(sys.argv[1], Path(sys.argv[2]))
