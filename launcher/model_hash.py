"""Names the content of a model folder, so that a frontend and an engine of different models refuse each other."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SMALL = 16 * 2**20


def hash_model(folder: Path) -> str:
    """SHA-256 (hex) over every file's name and size, and the bytes of those below 16 MiB.

    Weights count by name and size alone: reading gigabytes would delay the start, and both sides read the same disk.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        if size < _SMALL:
            digest.update(path.read_bytes())
    return digest.hexdigest()
