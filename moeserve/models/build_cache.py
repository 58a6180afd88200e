"""A cache of folders that are built once, checked at every start, and rebuilt or refused when broken.

A build goes to a temporary folder beside its target and is renamed into place when it is complete and on disk, under
a file lock, so a half-written folder is never served and two processes that start together build once.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moeserve.models.cache_folder import cache_root as cache_root
from moeserve.models.errors import ModelError
from moeserve.models.manifest import ManifestError, OtherBuilderError, verify, write_manifest
from moeserve.models.progress import Progress, silent

Build = Callable[[Path, Progress], None]


def ensure_built(
    target: Path,
    *,
    builder: str,
    build: Build,
    bytes_needed: int,
    progress: Progress | None = None,
    refuse_damaged: str | None = None,
    advice: str = "set MOESERVE_CACHE to a folder that can be",
) -> Path:
    """Return `target`, complete and verified; runs `build(folder, progress)` first if it is missing or broken.

    builder: name and version of what `build` makes; a folder made by another one is rebuilt. bytes_needed: disk
    space to demand before building. refuse_damaged: a file of the folder; while it is there, a folder that is broken is
    not rebuilt but refused. advice: what to do where the folder cannot be written. Raises ModelError for both and where
    the disk is too small, and whatever `build` raises; the temporary folder is removed.
    """
    report = progress or silent
    if _why_bad(target, builder, report) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock", report):
            # Another process may have built it while this one waited for the lock.
            if (why := _why_bad(target, builder, report)) is not None:
                if refuse_damaged is not None and not isinstance(why, OtherBuilderError):
                    _refuse(target / refuse_damaged, why)
                _remove_leftovers(target)
                _check_disk(target, bytes_needed)
                _build(target, builder, build, report)
    except OSError as error:
        raise ModelError(
            f"The folder {target.parent} cannot be written ({error.strerror or error}): {advice}."
        ) from error
    return target


def _why_bad(target: Path, builder: str, report: Progress) -> ManifestError | None:
    try:
        verify(target, builder=builder, progress=report)
    except ManifestError as error:
        return error
    return None


def _refuse(file: Path, why: ManifestError) -> None:
    """Raises ModelError if the file is there: nothing half-made gets its name, so it was damaged afterwards."""
    if file.exists():
        reason = str(why).removesuffix(".")
        raise ModelError(f"{reason}: delete {file}, and the next start builds it anew.")


def _build(target: Path, builder: str, build: Build, report: Progress) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
    try:
        fresh = scratch / "new"
        build(fresh, report)
        write_manifest(fresh, builder=builder, progress=report)
        report("write to disk", 0, 0)
        # The verdict trusts file times from here on, so the content must not be lost in a power failure.
        for path in fresh.rglob("*"):
            _sync(path)
        _sync(fresh)
        if target.exists():
            target.rename(scratch / "broken")
        fresh.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel releases it if this process dies. The file stays."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("wait for another process that builds the model", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(target: Path) -> None:
    """Remove temporary folders of builds that were killed. Only the holder of the lock may."""
    for leftover in target.parent.glob(f".{target.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _check_disk(target: Path, bytes_needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < bytes_needed:
        raise ModelError(
            f"Building the model needs {bytes_needed / 1e9:.2f} GB in {target.parent}, but only {free / 1e9:.2f} GB "
            "are free there: free some space or set MOESERVE_CACHE to a folder on a larger disk."
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
