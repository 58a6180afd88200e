"""Reads the small files of a model folder, whose content is untrusted: regular files only, within bounds of size."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from moeserve.model.spec import CheckpointError, MissingWeights, ModelError

_MIB = 2**20
# The beginning of what Git LFS leaves in the place of a file that it has not fetched.
_LFS_POINTER = b"version https://git-lfs"
# In a folder that was made for a GGUF file: names the file.
GGUF_POINTER = "gguf.json"
# By name or ending of a file that is read whole, its most bytes: several times the largest known of real models.
_BOUNDS = {
    "manifest.json": 16 * _MIB,
    ".verified.json": 16 * _MIB,
    "config.json": 4 * _MIB,
    "generation_config.json": _MIB,
    "tokenizer.json": 128 * _MIB,
    "tokenizer_config.json": 16 * _MIB,
    "quantize_config.json": _MIB,
    "quant_config.json": _MIB,
    "hf_quant_config.json": 16 * _MIB,
    GGUF_POINTER: _MIB,
    "model.safetensors.index.json": 128 * _MIB,
    ".jinja": 4 * _MIB,
}


def is_gguf_folder(directory: Path) -> bool:
    """Return whether the folder was made for a GGUF file (`moeserve.model.gguf.folder`), which holds the weights."""
    return (directory / GGUF_POINTER).is_file()


def size_bound(path: Path) -> int | None:
    """Return the most bytes that a file of this name may have; None for one that is never read whole."""
    return _BOUNDS.get(path.name) or _BOUNDS.get(path.suffix)


def check_file(path: Path) -> int:
    """Return the size of a regular file. Raise ModelError for everything else: no pipe or device is ever opened."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from None
    return _check(path, status)


def check_weights_file(path: Path) -> int:
    """Return the size of a file of weights. Raise ModelError for one that is none, or that holds nothing."""
    size = check_file(path)
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from None
    if not start:
        raise CheckpointError(f"{path} is empty: download it again.")
    if start == _LFS_POINTER:
        raise MissingWeights(f"{path} is a pointer of Git LFS and no weights: run git lfs pull in its folder.")
    return size


def read_file(path: Path) -> bytes:
    """Return the content of a regular file within its bound. Raise ModelError before anything large is read."""
    bound = size_bound(path)
    assert bound is not None, f"{path.name} has no bound"
    try:
        # Do not wait if the file has been swapped for a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            size = _check(path, os.fstat(descriptor))
            # One byte more than allowed: a file can grow meanwhile.
            content = file.read(bound + 1) if size <= bound else b""
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from None
    size = max(size, len(content))
    if size > bound:
        raise ModelError(f"{path} has {size} bytes; at most {bound} are read.")
    return content


def read_text(path: Path) -> str:
    """Return the text of a file within its bound. Raise ModelError, also where it is not UTF-8."""
    try:
        return read_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not text in UTF-8 (byte {error.start}).") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file within its bound. Raise ModelError, also for NaN and for endless nesting.

    Infinite numbers, which older configurations of Mamba have, become the objects that transformers writes for them.
    """
    try:
        content = json.loads(read_file(path).decode("utf-8"), parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object.")
    return content


def _check(path: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path} is not a regular file, so it is not read.")
    return status.st_size


def _constant(name: str) -> dict[str, str]:
    """Return the object for a number that Python writes and JSON lacks. Raise ValueError for NaN."""
    if name == "NaN":
        raise ValueError(f"{name} is no number of JSON")
    return {"__float__": name}
