"""Whether the GPU kernels are those with which all tests marked `kernel_change` have passed.

`python -m tests.support.checked_kernels` exits with 0 where they are.

What takes minutes in Triton's interpreter, or compiles for a GPU that is absent, is marked `kernel_change`. `make test`
leaves it out while `kernels/gpu`, and the versions of torch and Triton, are those of the record in the repository. A
run that passes writes the record: `--record`.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path("tests/kernels/checked.sha256")
KERNELS = Path("kernels/gpu")


def digest(root: Path) -> str:
    """Of the kernels' files and of what compiles them."""
    found = sha256()
    for path in sorted((root / KERNELS).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            found.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    pinned = (root / "constraints.txt").read_text().splitlines()
    found.update("\n".join(line for line in pinned if line.startswith(("torch==", "triton=="))).encode())
    return found.hexdigest()


def main(root: Path, *arguments: str) -> int:
    """Returns 0 if the kernels are those of the record, or have become so, else 1."""
    record = root / RECORD
    if "--record" in arguments:
        record.write_text(digest(root) + "\n")
    return int(not record.exists() or record.read_text().strip() != digest(root))


if __name__ == "__main__":
    sys.exit(main(ROOT, *sys.argv[1:]))
