"""Compare fetched files of a hub model with the checksums that the hub lists."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moeserve.model.spec import ModelError, Progress

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_PIECE_BYTES = 2**22  # read at a time


def check_sums(folder: Path, files: Sequence[RepoSibling], report: Progress) -> None:
    """Compare files in a folder of the hub library's cache with their checksums.

    Large files have a sha256, others the sha1 that git gives them. Remove files that differ, with the copies that the
    cache's links lead to, and raise ModelError.
    """
    total, done, damaged = sum(file.size or 0 for file in files), 0, []
    for file in files:
        path, expected = folder / file.rfilename, file.blob_id
        if file.lfs is not None:
            expected, digest = file.lfs.sha256, hashlib.sha256()
        else:
            digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        with path.open("rb") as content:
            while piece := content.read(_PIECE_BYTES):
                digest.update(piece)
                done += len(piece)
                report("verify", min(done, total), total)
        if expected is not None and digest.hexdigest() != expected:
            damaged.append(file.rfilename)
            path.resolve().unlink()
            path.unlink(missing_ok=True)
    if damaged:
        raise ModelError(
            f"{len(damaged)} of {len(files)} files differ from the hub's checksums, the first is {damaged[0]}: they "
            "are removed, pull again to fetch them anew."
        )
