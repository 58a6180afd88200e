"""Which folders of `--expert-store-dir` hold expert files: each file has one of its own, named after its source."""

from __future__ import annotations

import re
from pathlib import Path

from moeserve.model.cache import built_names, made_by

EXPERT_FILE = "experts.bin"
# The beginning of the name of the builder of all expert files.
BUILDER = "moeserve expert file"
_SOURCE_DIGITS = 16
_NAME = re.compile(rf".+-[0-9a-f]{{{_SOURCE_DIGITS}}}")


def find_folder(root: Path, model: str, digest: bytes) -> Path:
    """Return the folder of a model's expert file: the one with this digest, whatever the model was called when it was
    made, or else a new one."""
    digits = digest.hex()[:_SOURCE_DIGITS]
    found = sorted(path for path in root.glob(f"*-{digits}") if not path.name.startswith("."))
    return found[0] if found else root / f"{model}-{digits}"


def expert_folders(root: Path) -> list[str]:
    """Return the names of the folders whose files were made here, also of builds that were never finished."""
    return [name for name in built_names(root) if _NAME.fullmatch(name) and _is_own(root / name)]


def is_expert_store(root: Path) -> bool:
    """Return whether a folder holds expert files, held some, or holds what builds of some left."""
    locks = (path.name[1:].removesuffix(".lock") for path in root.glob(".*.lock"))
    return bool(expert_folders(root)) or any(_NAME.fullmatch(name) and not (root / name).exists() for name in locks)


def _is_own(folder: Path) -> bool:
    """A folder that does not exist is a build that was not finished; one with other files is left alone."""
    return not folder.exists() or (made_by(folder) or "").startswith(BUILDER)
