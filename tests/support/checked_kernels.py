"""Tell if all tests marked `kernel_change` have passed with the code of the GPU path as it is.

`python -m tests.support.checked_kernels` exits with 0 if so.

A test that takes seconds in Triton's interpreter, or compiles for a GPU that is absent, is marked `kernel_change`.
`make test` leaves these tests out while the code that they run, apart from comments and docstrings, and the versions of
torch and Triton equal the record in the repository. A run that passes writes the record: `--record`.
"""

from __future__ import annotations

import ast
import sys
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path("tests/kernels/checked.sha256")
# Everything between a step's plan and its result on a GPU, and the tests themselves.
CHECKED = (
    "kernels",
    "experts",
    "moeserve/model",
    "moeserve/engine/experts",
    "moeserve/engine/ranks",
    "moeserve/device.py",
    "moeserve/engine/gpu_body.py",
    "moeserve/engine/gpu_transformers_body.py",
    "moeserve/engine/kv/host.py",
    "moeserve/plan.py",
    "moeserve/engine/rank.py",
    "benchmarks/kernels",
    "tests/kernels",
    "tests/behaviour",
)


def digest(root: Path) -> str:
    """Return the digest of the checked files and of the versions that compile them."""
    found = sha256()
    for path in _files(root):
        content = _code(path)
        found.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    pinned = (root / "constraints.txt").read_text().splitlines()
    found.update("\n".join(line for line in pinned if line.startswith(("torch==", "triton=="))).encode())
    return found.hexdigest()


def _code(path: Path) -> bytes:
    """Return the content of a file; of Python, what remains without comments, docstrings and layout."""
    content = path.read_bytes()
    if path.suffix != ".py":
        return content
    try:
        tree = ast.parse(content)
    except SyntaxError:
        return content
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            del body[0]
    return ast.dump(tree).encode()


def _files(root: Path) -> list[Path]:
    found = []
    for name in CHECKED:
        path = root / name
        found += [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sorted(path for path in found if "__pycache__" not in path.parts and path != root / RECORD)


def main(root: Path, *arguments: str) -> int:
    """Return 0 if the record is that of the code, or has become so, else 1."""
    record = root / RECORD
    if "--record" in arguments:
        record.write_text(digest(root) + "\n")
    return int(not record.exists() or record.read_text().strip() != digest(root))


if __name__ == "__main__":
    sys.exit(main(ROOT, *sys.argv[1:]))
