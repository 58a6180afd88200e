"""Tiny models of transformers as folders, and what transformers generates with them, for tests that need torch,
transformers and its modelling code elsewhere than in their own process.

Both are kept in the cache, under a digest of what decides on them, where a forked program puts them first:
`python -m tests.support.saved_models save CASE FOLDER [FIELD=NUMBER ...]` and
`python -m tests.support.saved_models generate MODEL FILE < QUESTION`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from moeserve.config import cache_root
from tests.support.forking import popen

ROOT = Path(__file__).resolve().parents[2]


def saved_model(case: str, folder: Path, **fields: int) -> None:
    """Save a case of `tiny_models.py` in `folder`, or `mtp-CASE` of `tiny_mtp.py`, whose layer is often right.

    fields: of its configuration, which differ.
    """
    differing = sorted(f"{name}={number}" for name, number in fields.items())
    shutil.copytree(_cached(case, *differing), folder, dirs_exist_ok=True)


def generated(model: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the greedy tokens that transformers generates after each prompt with the model in that folder, in float32
    and whatever their end."""
    return [first for first, *_ in searched(model, prompts, max_tokens, {})]


def searched(model: Path, prompts: list[list[int]], max_tokens: int, search: dict[str, Any]) -> list[list[list[int]]]:
    """Return, for each prompt, the tokens of all sequences that transformers generates by the rules of a search."""
    question = json.dumps({"prompts": prompts, "max_tokens": max_tokens, "search": search})
    files = [model / "config.json", *sorted(model.glob("*.safetensors"))]
    asked = sha256(b"".join([question.encode(), *map(Path.read_bytes, files)])).hexdigest()[:16]
    file = _kept(f"generated-{asked}", lambda file: _run("generate", str(model), str(file), question=question))
    tokens: list[list[list[int]]] = json.loads(file.read_text())
    return tokens


@cache
def _cached(case: str, *fields: str) -> Path:
    return _kept("-".join([case, *fields]), lambda folder: _run("save", case, str(folder), *fields))


def _kept(name: str, make: Callable[[Path], None]) -> Path:
    """Return a file or folder of the cache, made first where it is not there."""
    made_from = [Path(__file__).read_bytes()]
    made_from += [(ROOT / "tests/support" / name).read_bytes() for name in ("tiny_models.py", "tiny_mtp.py")]
    made_from += [version(package).encode() for package in ("torch", "transformers")]
    kept = cache_root() / "tests" / sha256(b"".join(made_from)).hexdigest()[:16] / name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        making = Path(mkdtemp(dir=kept.parent))
        make(making / name)
        # Another process may have been faster.
        with suppress(OSError):
            (making / name).rename(kept)
        shutil.rmtree(making)
    return kept


def _run(*arguments: str, question: str = "") -> None:
    command = [sys.executable, "-m", "tests.support.saved_models", *arguments]
    pipe = subprocess.PIPE
    with popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True) as program:
        said, _ = program.communicate(question)
    assert program.returncode == 0, said


def _save(case: str, folder: str, *fields: str) -> None:
    from tests.support.tiny_models import build
    from tests.support.tiny_mtp import save_with_mtp

    differing = {name: int(number) for name, _, number in (field.partition("=") for field in fields)}
    if case.startswith("mtp-"):
        save_with_mtp(case.removeprefix("mtp-"), Path(folder), is_apt=True, **differing)
        return
    build(case, **differing).save_pretrained(folder)


def _generate(model: str, file: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    question = json.load(sys.stdin)
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = []
    for prompt in question["prompts"]:
        found = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=question["max_tokens"],
            do_sample=False,
            pad_token_id=0,
            **{"eos_token_id": None, **question["search"]},
        )
        tokens.append(found[:, len(prompt) :].tolist())
    Path(file).write_text(json.dumps(tokens))


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"save": _save, "generate": _generate}
    commands[sys.argv[1]](*sys.argv[2:])
