"""A cache of folders that are built once, checked at every start, and rebuilt or refused when broken.

A build goes to a temporary folder beside its target and is renamed into place once it is complete and on disk, under a
file lock. So no half-written folder is ever served, and two processes that start together build once.

A folder is checked against a sha256 manifest. Hashing costs seconds per gigabyte, so a check that succeeds notes beside
the manifest the identity of every file (size, times, inode). While it stays the same, the next check is a few stat
calls.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from stat import S_ISREG

import msgspec

from moeserve.model.files import read_file
from moeserve.model.spec import ModelError, Progress, silent
from moeserve.settings.quantities import show_size

MANIFEST_NAME = "manifest.json"
VERDICT_NAME = ".verified.json"
# The builder of a folder that was not built here.
RECORDED = "moeserve verify --record"
_HASH_THREADS = 2  # hashlib releases the interpreter lock
_CLOCK_TICK_SECONDS = 0.02  # at least the resolution of file times on Linux's local file systems

# The size, mtime, ctime and inode of a file. The ctime catches an edit that restores the mtime.
Identity = tuple[int, int, int, int]
# (folder, progress): writes all files of the folder.
Build = Callable[[Path, Progress], None]


class ManifestError(ModelError):
    """The folder differs from its manifest, or has no usable manifest."""


class OtherBuilderError(ManifestError):
    """The folder was made by another builder than the requested one."""


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
    """Return `target`, complete and verified. Run `build(folder, progress)` first if it is missing or broken.

    builder: name and version of what `build` makes; a folder of another builder is rebuilt. bytes_needed: free disk
    space that a build demands. refuse_damaged: a file of the folder; while it exists, a broken folder is refused, not
    rebuilt. advice: for the user, if the folder cannot be written. Raise ModelError if the folder is refused, cannot
    be written or does not fit on the disk, and whatever `build` raises; the temporary folder is removed.
    """
    report = progress or silent
    if _why_bad(target, builder, report) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.parent / f".{target.name}.lock", report):
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


def find_built(target: Path, *, builder: str, refuse_damaged: str, progress: Progress | None) -> bool:
    """Return whether `target` is complete and verified; see `ensure_built`, also for the error that is raised."""
    why = _why_bad(target, builder, progress or silent)
    if why is not None and not isinstance(why, OtherBuilderError):
        _refuse(target / refuse_damaged, why)
    return why is None


def built_names(root: Path) -> list[str]:
    """Return the names of the folders in `root` that were built, or whose build was not finished and left something."""
    folders = {path.parent.name for path in root.glob(f"*/{MANIFEST_NAME}")}
    unfinished = {path.name[1:].rpartition(".tmp-")[0] for path in root.glob(".*.tmp-*")}
    return sorted(folders | unfinished)


def remove_built(target: Path) -> int:
    """Remove a folder and the remains of unfinished builds of it. Wait for a running build. Return the bytes freed."""
    with locked(target.parent / f".{target.name}.lock", silent):
        folders = [target, *target.parent.glob(f".{target.name}.tmp-*")]
        num_bytes = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
        _remove_leftovers(target)
        if target.exists():
            # Under its name the folder is always whole.
            scratch = target.with_name(f".{target.name}.tmp-removed")
            target.rename(scratch)
            shutil.rmtree(scratch)
    return num_bytes


def _why_bad(target: Path, builder: str, report: Progress) -> ManifestError | None:
    try:
        verify(target, builder=builder, progress=report)
    except ManifestError as error:
        return error
    return None


def _refuse(file: Path, why: ManifestError) -> None:
    """Raise ModelError if the file exists: only a complete build gets this name, so it was damaged afterwards."""
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
        # From here on the verdict trusts file times, so the content must survive a power failure.
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
def locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel releases it if this process dies. The file stays."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("wait for another process that builds the model", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(target: Path) -> None:
    """Remove temporary folders of killed builds. The caller holds the lock."""
    for leftover in target.parent.glob(f".{target.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _check_disk(target: Path, bytes_needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < bytes_needed:
        raise ModelError(
            f"Building the model needs {show_size(bytes_needed, up=True)} in {target.parent}, but only "
            f"{show_size(free)} are free there: free some space or set MOESERVE_CACHE to a folder on a larger disk."
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileEntry(msgspec.Struct, frozen=True):
    """size: in bytes. sha256: of the content, in hex."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """builder: name and version of what made the files. files: by their relative POSIX path."""

    builder: str
    files: dict[str, FileEntry]


class _Verdict(msgspec.Struct, frozen=True):
    """manifest: the sha256 of the checked manifest. files: the identities of the files that passed, by name."""

    manifest: str
    files: dict[str, Identity]


def write_manifest(folder: Path, *, builder: str, progress: Progress | None = None) -> Manifest:
    """Hash every file below `folder` but manifest and verdict, write the manifest, and remember the verdict."""
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (MANIFEST_NAME, VERDICT_NAME)
    )
    identities = _identities(folder, names)
    let_clock_tick(identities.values())
    hashes = _hash_all(folder, names, "hash files", progress or silent)
    files = {name: FileEntry(size=identities[name][0], sha256=hashes[name]) for name in names}
    manifest = Manifest(builder=builder, files=files)
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST_NAME).write_bytes(encoded + b"\n")
    _remember(folder, _Verdict(hashlib.sha256(encoded + b"\n").hexdigest(), identities))
    return manifest


def verify(
    folder: Path, *, builder: str | None = None, thorough: bool = False, progress: Progress | None = None
) -> Manifest:
    """Check `folder` against its manifest and return it. Raise ManifestError, which names the first difference.

    builder: the folder must come from this builder, if given. thorough: hash even where an earlier verdict still holds.
    Files that the manifest does not name are ignored.
    """
    raw, manifest = _read_manifest(folder)
    if builder is not None and manifest.builder != builder:
        raise OtherBuilderError(f"{folder} was made by {manifest.builder!r}, not by {builder!r}.")
    digest = hashlib.sha256(raw).hexdigest()
    identities = _identities(folder, manifest.files)
    for name, entry in manifest.files.items():
        if identities[name][0] != entry.size:
            raise ManifestError(f"{folder / name} has {identities[name][0]} bytes, but its manifest says {entry.size}.")
    verdict = _Verdict(digest, identities)
    if not thorough and _recall(folder) == verdict:
        return manifest
    let_clock_tick(identities.values())
    hashes = _hash_all(folder, manifest.files, "verify files", progress or silent)
    for name, entry in manifest.files.items():
        if hashes[name] != entry.sha256:
            raise ManifestError(f"{folder / name} does not have the content (sha256) that its manifest says.")
    _remember(folder, verdict)
    return manifest


def record(folder: Path, progress: Progress | None = None) -> Manifest:
    """Write the manifest of a folder that was not built here. Raise ModelError, also for another builder's."""
    path = folder / MANIFEST_NAME
    try:
        if path.exists() and not is_recorded(folder):
            raise ModelError(f"{path} is there already and was not recorded by moeserve verify: it is left as it is.")
        return write_manifest(folder, builder=RECORDED, progress=progress)
    except OSError as error:
        raise ModelError(f"{path} cannot be written ({error.strerror or error}).") from error


def is_recorded(folder: Path) -> bool:
    """Return whether `record` wrote the folder's manifest."""
    try:
        return _read_manifest(folder)[1].builder == RECORDED
    except ManifestError:
        return False


def made_by(folder: Path) -> str | None:
    """Return the builder of the folder; None if it has no manifest, or a file that the manifest does not name."""
    try:
        _, manifest = _read_manifest(folder)
    except ManifestError:
        return None
    known = {*manifest.files, MANIFEST_NAME, VERDICT_NAME}
    strange = any(path.relative_to(folder).as_posix() not in known for path in folder.rglob("*") if not path.is_dir())
    return None if strange else manifest.builder


def _read_manifest(folder: Path) -> tuple[bytes, Manifest]:
    try:
        raw = read_file(folder / MANIFEST_NAME)
        manifest = msgspec.json.decode(raw, type=Manifest)
    except ModelError as error:
        raise ManifestError(f"{folder} has no readable {MANIFEST_NAME}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{folder / MANIFEST_NAME} is not a manifest ({error}).") from error
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ManifestError(f"{folder / MANIFEST_NAME} names the file {name!r} outside of its folder.")
    return raw, manifest


def identity_of(status: os.stat_result) -> Identity:
    """Return the facts that distinguish a file from a later one at its path."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _identities(folder: Path, names: Iterable[str]) -> dict[str, Identity]:
    identities = {}
    for name in names:
        try:
            stat = (folder / name).stat()
        except OSError as error:
            raise ManifestError(f"{folder / name} cannot be read ({error.strerror}).") from error
        if not S_ISREG(stat.st_mode):
            raise ManifestError(f"{folder / name} is not a regular file, so it is not read.")
        identities[name] = identity_of(stat)
    return identities


def let_clock_tick(identities: Iterable[Identity]) -> None:
    """Wait until the clock is past the files' times, or a change made from now on could leave their identities."""
    newest = max((changed for _, _, changed, _ in identities), default=0) / 1e9
    time.sleep(min(max(newest + _CLOCK_TICK_SECONDS - time.time(), 0.0), _CLOCK_TICK_SECONDS))


def _hash_all(folder: Path, names: Iterable[str], stage: str, report: Progress) -> dict[str, str]:
    ordered = list(names)
    hashes = {}
    report(stage, 0, len(ordered))
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        digests = pool.map(lambda name: _hash(folder / name), ordered)
        for done, (name, digest) in enumerate(zip(ordered, digests, strict=True), start=1):
            hashes[name] = digest
            report(stage, done, len(ordered))
    return hashes


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ManifestError(f"{path} cannot be read ({error.strerror}).") from error


def _recall(folder: Path) -> _Verdict | None:
    try:
        return msgspec.json.decode(read_file(folder / VERDICT_NAME), type=_Verdict)
    except (ModelError, msgspec.DecodeError, UnicodeDecodeError):
        return None  # an unreadable verdict only costs a new check


def _remember(folder: Path, verdict: _Verdict) -> None:
    path = folder / VERDICT_NAME
    try:
        path.write_bytes(msgspec.json.encode(verdict))
    except OSError:
        return  # a folder that is read-only is checked in full every time
