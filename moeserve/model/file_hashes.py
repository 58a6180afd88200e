"""Hashes of large files: of their whole content, remembered while a file stays the same, or of samples of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from tempfile import mkstemp

import msgspec

from moeserve.model.cache import Identity, identity_of, let_clock_tick, locked
from moeserve.model.spec import Progress, silent

WEIGHTS_MEMORY = "weights.json"  # The name of a memory of hashes.
# Bytes that a thread hashes at a time. The hash of a file is that of its pieces' hashes.
_PIECE_BYTES = 64 * 2**20
_READ_BYTES = 2**20
_MAX_THREADS = 8
# All files together are sampled at this number of places, and each file at one or more.
_NUM_SAMPLES, _SAMPLE_BYTES = 256, 16 * 2**10
# Smaller files are read whole instead of sampled.
_SMALL_BYTES = 16 * 2**20


class _Known(msgspec.Struct, frozen=True):
    """content: the hash of a file whose `identity_of` and sampled hash were `state`. In read-only images other weights
    may have the same identity: their times are set, and inodes are counted."""

    state: tuple[Identity, str]
    content: str


def whole_hashes(files: Sequence[Path], memory: Path, progress: Progress = silent) -> list[str]:
    """Return the hash (hex) of each file's whole content.

    memory: a file that remembers the hashes, so that gigabytes are read once. Of processes that ask at once the first
    one reads, and the others wait. A memory that cannot be written costs time. Raise OSError for a file that cannot be
    read, and whatever `progress` raises.
    """
    paths = [os.path.realpath(file) for file in files]
    states = {
        path: (identity_of(os.stat(path)), sample) for path, sample in zip(paths, sampled_hashes(files), strict=True)
    }

    def unknown() -> list[str]:
        return [path for path, state in states.items() if path not in known or known[path].state != state]

    known = _recall(memory)
    if unknown():
        with _alone(memory):
            known = _recall(memory)
            if new := unknown():
                let_clock_tick(identity for identity, _ in states.values())
                for path, content in zip(new, _hash_all(new, progress), strict=True):
                    known[path] = _Known(states[path], content)
                _remember(memory, known)
    return [known[path].content for path in paths]


def sampled_hashes(files: Sequence[Path]) -> list[str]:
    """Return a hash (hex) of each file's size and of samples of its content; of all of it if it is small.

    The content of other weights has another hash. A change of a few bytes may have none. Raise OSError.
    """
    sizes = [file.stat().st_size for file in files]
    total = sum(sizes)
    return [
        _sample(file, size, -(-_NUM_SAMPLES * size // max(total, 1))) for file, size in zip(files, sizes, strict=True)
    ]


def _sample(file: Path, size: int, count: int) -> str:
    digest = hashlib.sha256(f"{size}\n".encode())
    with file.open("rb", buffering=0) as stream:
        if size <= _SMALL_BYTES:
            digest.update(stream.read())
        else:
            for number in range(count):
                at = number * (size - _SAMPLE_BYTES) // max(count - 1, 1)
                digest.update(os.pread(stream.fileno(), _SAMPLE_BYTES, at))
    return digest.hexdigest()


def _hash_all(paths: Sequence[str], progress: Progress) -> list[str]:
    num_pieces = [max(1, -(-os.stat(path).st_size // _PIECE_BYTES)) for path in paths]
    places = [(path, number) for path, count in zip(paths, num_pieces, strict=True) for number in range(count)]
    hashes = []
    pool = ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))))
    try:
        for done, piece in enumerate(pool.map(_hash_piece, places)):
            progress("hash the weights", done, len(places))
            hashes.append(piece)
    finally:
        pool.shutdown(cancel_futures=True)
    of_each = iter(hashes)
    return [hashlib.sha256(b"".join(islice(of_each, count))).hexdigest() for count in num_pieces]


def _hash_piece(place: tuple[str, int]) -> bytes:
    path, number = place
    digest, buffer, left = hashlib.sha256(), bytearray(_READ_BYTES), _PIECE_BYTES
    with open(path, "rb", buffering=0) as stream:
        stream.seek(number * _PIECE_BYTES)
        while count := stream.readinto(memoryview(buffer)[:left]):
            digest.update(memoryview(buffer)[:count])
            left -= count
    return digest.digest()


def _recall(memory: Path) -> dict[str, _Known]:
    try:
        return msgspec.json.decode(memory.read_bytes(), type=dict[str, _Known])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}  # An unreadable memory costs only time.


def _remember(memory: Path, known: Mapping[str, _Known]) -> None:
    """Write the hashes of files that are still there, if they can be written."""
    content = msgspec.json.encode({path: one for path, one in known.items() if os.path.exists(path)})
    with suppress(OSError):
        descriptor, scratch = mkstemp(prefix=f".{memory.name}.", suffix=".new", dir=memory.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.rename(scratch, memory)
        except OSError:
            os.unlink(scratch)


@contextmanager
def _alone(memory: Path) -> Iterator[None]:
    """Hold the lock of a memory, if it can be had."""
    with ExitStack() as lock:
        with suppress(OSError):
            memory.parent.mkdir(parents=True, exist_ok=True)
            lock.enter_context(locked(memory.with_name(f".{memory.name}.lock"), silent))
        yield
