"""One run of a service: its private directory for sockets and its context, gone when the service is.

A supervisor that is killed leaves its directory to a process beside it (`launcher.janitor`), which removes it. In case
both are killed, a supervisor holds an exclusive lock on the file `lock` in its directory for as long as it lives,
however it ends. So a directory whose lock can be taken belongs to no process, and the next supervisor removes it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.preflight import LaunchError
from moeserve.config import ServeConfig
from moeserve.engine.kv.disk.files import disk_root, open_root
from moeserve.model.contents import model_digest
from moeserve.model.file_hashes import sampled_hashes
from moeserve.model.spec import ModelError
from moeserve.run_context import ANY_NAME, RunContext

_PREFIX = "moeserve-"
# sockaddr_un holds 108 bytes with the final NUL; the longest socket name is heartbeat.<incarnation>.
_LONGEST_PATH = 107 - len("/heartbeat.4294967295")
_JANITOR = Path(__file__).with_name("janitor.py")
_SECONDS_FOR_JANITOR = 10.0
_DEMO_NAME = "demo"


@contextmanager
def run_directory(environment: Mapping[str, str]) -> Iterator[Path]:
    """Create a directory with mode 0700, locked by this process and removed at its end. Raise LaunchError."""
    base = base_directory(environment)
    remove_stale(base)
    path, lock = _create(base)
    try:
        with _janitor(path):
            yield path
    finally:
        # In case that process was killed.
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


@contextmanager
def _janitor(directory: Path) -> Iterator[None]:
    """Have a process beside this one clean up when this one dies, or when the context ends."""
    command = [sys.executable, "-I", "-S", str(_JANITOR), str(directory)]
    silent = subprocess.DEVNULL
    # Only this process has the other end of the pipe: descriptors are not inherited unless asked for.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, cwd="/", start_new_session=True
    ) as janitor:
        try:
            yield
        finally:
            assert janitor.stdin is not None
            janitor.stdin.close()
            # One that was stopped, as with a whole control group, would be waited for in vain.
            janitor.send_signal(signal.SIGCONT)
            with suppress(subprocess.TimeoutExpired):
                janitor.wait(_SECONDS_FOR_JANITOR)
            janitor.kill()


def run_directories(base: Path) -> Iterator[Path]:
    """Yield this user's run directories in `base`."""
    for path in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if not path.is_symlink() and path.stat().st_uid == os.getuid() and (path / "lock").exists():
                yield path


def is_alive(directory: Path) -> bool:
    """Return whether the supervisor of a run directory lives."""
    with _dead(directory) as is_dead:
        return is_dead is False


def remove_stale(base: Path) -> None:
    """Remove this user's run directories in `base` whose supervisors are dead."""
    for path in run_directories(base):
        with _dead(path) as is_dead:
            if is_dead:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _dead(directory: Path) -> Iterator[bool | None]:
    """Hold the lock of a dead supervisor's directory. Yield whether it is dead, None if there is no run directory."""
    try:
        lock = os.open(directory / "lock", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        # Not a run directory, or removed meanwhile.
        yield None
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_dead = True
    except BlockingIOError:
        is_dead = False
    try:
        yield is_dead
    finally:
        os.close(lock)


def base_directory(environment: Mapping[str, str]) -> Path:
    """Return the folder of run directories. Raise LaunchError."""
    for candidate in (environment.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        usable = os.path.isabs(candidate) and os.access(candidate, os.W_OK | os.X_OK)
        if usable and len(os.fsencode(candidate)) + len(f"/{_PREFIX}12345678") <= _LONGEST_PATH:
            return Path(candidate)
    raise LaunchError("No directory for sockets is writable and short enough: set XDG_RUNTIME_DIR to one that is.")


def _create(base: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another supervisor may have taken the lock, and removed the directory, before this one had it.
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)


def make_context(config: ServeConfig, model_dir: Path, directory: Path, *, meets_in_store: bool) -> RunContext:
    """Return the context of a run whose sockets are in `directory`."""
    names = tuple(name for name in config.served_model_name if name != ANY_NAME)
    return RunContext(
        config=config,
        model_dir=str(model_dir),
        model_hash=hash_model(model_dir),
        run_dir=str(directory),
        incarnation=1 + secrets.randbelow(2**31),
        secret=_secret(config),
        served_model_names=names or (_default_name(config.model),),
        meets_in_store=meets_in_store,
    )


def _secret(config: ServeConfig) -> str:
    """Return the secret that keys namespaces: a new one, or the one of the KV on disk, which outlives a run.

    Raise LaunchError if the folder cannot be used.
    """
    if config.kv_disk_path is None:
        return secrets.token_hex(32)
    try:
        return open_root(disk_root(config.kv_disk_path)).hex()
    except OSError as error:
        reason = error.strerror or error
        raise LaunchError(f"The folder of --kv-disk-path, {config.kv_disk_path}, cannot be used: {reason}.") from error


def _default_name(model: str | None) -> str:
    """Return a hub id as it is, the last part of a path, without `.gguf`, or the demo's name."""
    if model is None:
        return _DEMO_NAME
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def hash_model(folder: Path) -> str:
    """Return the digest (hex) of a model by which a frontend and an engine, and the nodes of a service, refuse each
    other.

    Weights count by samples: reading gigabytes would delay the start. Raise LaunchError for a file that cannot be read.
    """
    try:
        return model_digest(folder, sampled_hashes).hex()
    except ModelError as error:
        raise LaunchError(str(error)) from error
