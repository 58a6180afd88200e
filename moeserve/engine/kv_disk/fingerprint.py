"""The fingerprint of KV blocks: a digest of everything that their bits depend on, but tokens.

Blocks of another fingerprint are never read. So a change of weights, settings or code makes a cache cold, not wrong.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

import experts
import kernels
import moeserve.model
from moeserve.config import VERSION
from moeserve.engine.kv_disk.files import if_it_can_be_written, replace_file

_HASHES = "weights.json"
_SOURCES = (experts, kernels, moeserve.model)
_SOURCE_SUFFIXES = {".py", ".cpp", ".h"}


class _Hashed(msgspec.Struct, frozen=True):
    """A file's identity (size, times, inode) when its content had this SHA-256 (hex)."""

    identity: tuple[int, int, int, int]
    sha256: str


def fingerprint_of(model_dir: Path, root: Path, facts: Sequence[object]) -> str:
    """Return the fingerprint, 32 hex digits, of a model's files, this code and `facts`, whose `repr` counts.

    Weights are hashed whole; the hashes are remembered in the folder `root` for as long as the files stay the same.
    Raise OSError for a file that cannot be read.
    """
    digest = hashlib.sha256(repr((VERSION, *facts)).encode())
    for name, content in _hash_model(model_dir, root / _HASHES):
        digest.update(f"{name}\0{content}\0".encode())
    digest.update(_hash_sources())
    return digest.hexdigest()[:32]


def _hash_model(folder: Path, memory: Path) -> list[tuple[str, str]]:
    """Return (name, SHA-256) of every visible file of a folder."""
    try:
        known = msgspec.json.decode(memory.read_bytes(), type=dict[str, _Hashed])
    except (OSError, msgspec.MsgspecError):
        known = {}
    hashed, is_new = [], False
    # Hidden files are notes of one machine.
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        status, key = path.stat(), str(path.absolute())
        identity = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        if key not in known or known[key].identity != identity:
            with path.open("rb") as file:
                known[key] = _Hashed(identity, hashlib.file_digest(file, "sha256").hexdigest())
            is_new = True
        hashed.append((path.name, known[key].sha256))
    if is_new:
        with if_it_can_be_written():
            replace_file(memory, [msgspec.json.encode(known)], time.time())
    return hashed


def _hash_sources() -> bytes:
    """Return a digest of the code that computes."""
    digest = hashlib.sha256()
    for package in _SOURCES:
        folder = Path(next(iter(package.__path__)))
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCE_SUFFIXES):
            digest.update(f"{path.relative_to(folder)}\0".encode())
            digest.update(path.read_bytes())
    return digest.digest()
