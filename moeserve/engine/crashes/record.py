"""A mapped file in the run directory that shows, after an engine's death, which requests it was working on.

The engine writes before it launches a step and before it takes a request. A write is a copy into memory, which the
kernel keeps when the process dies. Each slot holds a checksum, so that one that was being written when the process
died counts as empty: at that moment its work had not begun.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import structlog

from moeserve.engine.crashes.judgement import LastWork

log = structlog.get_logger(__name__)

_MAGIC = b"moework2"
_FILE_HEAD = struct.Struct("<8sqqq")  # magic, incarnation, bytes of a slot, slots of steps
_NUMBER = struct.Struct("<q")
_STEPS_DONE = _FILE_HEAD.size
_ARRIVALS_DONE = _STEPS_DONE + _NUMBER.size
_SLOTS = _ARRIVALS_DONE + _NUMBER.size
_SLOT_HEAD = struct.Struct("<II")  # crc32 and length of the bytes that follow
# The slots of steps, which take turns, come first, then one of an arrival and one of the suspects.
_OTHER_SLOTS = 2
_BYTES_PER_REQUEST = 64  # a request's id, its number of tokens, and what MessagePack adds
_OTHER_BYTES = 512


class WorkRecord:
    """Written by the engine's thread alone. Numbers of steps, and of arrivals, begin with 1 and grow."""

    def __init__(self, path: Path, incarnation: int, max_requests: int, max_steps: int = 2) -> None:
        """Create the file. max_requests: the most that one step has; ids beyond the room for them are left out.
        max_steps: the most that are in flight.

        Without room on the disk nothing is recorded, and a line in the log says so.
        """
        self._room, self._num_steps = _OTHER_BYTES + _BYTES_PER_REQUEST * max_requests, max_steps
        size = _place_of(max_steps + _OTHER_SLOTS, self._room)
        try:
            self._map = _create(path, size)
        except OSError as error:
            log.warning("work_record_absent", error=str(error))
            self._map = mmap.mmap(-1, size)
        _FILE_HEAD.pack_into(self._map, 0, _MAGIC, incarnation, self._room, max_steps)

    def begin_step(self, step: int, request_ids: list[str], ends: list[int], trial: tuple[str, str] | None) -> None:
        """Name the requests of a step, or of the part of it that is computed again, before it is launched.

        ends: the number of tokens of each that are computed after the step. trial: the id and the digest of the suspect
        among them.
        """
        self._write(step % self._num_steps, step, request_ids, ends, trial)

    def end_steps(self, step: int) -> None:
        _NUMBER.pack_into(self._map, _STEPS_DONE, step)

    def begin_arrival(self, number: int, request_id: str, end: int, trial: tuple[str, str] | None) -> None:
        """Name a request before it is taken."""
        self._write(self._num_steps, number, [request_id], [end], trial)

    def end_arrival(self, number: int) -> None:
        _NUMBER.pack_into(self._map, _ARRIVALS_DONE, number)

    def keep_suspects(self, places: dict[str, int]) -> None:
        """Record the suspects that have not passed yet."""
        self._write(self._num_steps + 1, 0, list(places), list(places.values()), None)

    def _write(
        self, slot: int, number: int, request_ids: Sequence[str], ends: Sequence[int], trial: tuple[str, str] | None
    ) -> None:
        data: bytes = msgpack.packb((number, trial, request_ids, ends))
        while len(data) > self._room:
            half = len(request_ids) // 2
            request_ids, ends = request_ids[:half], ends[:half]
            data = msgpack.packb((number, trial if half else None, request_ids, ends))
        start = _place_of(slot, self._room)
        self._map[start : start + _SLOT_HEAD.size + len(data)] = _SLOT_HEAD.pack(zlib.crc32(data), len(data)) + data


def read_record(path: Path, incarnation: int) -> LastWork | None:
    """Return the requests in the steps of the engine of that incarnation at its death; None without a record of it."""
    try:
        data = path.read_bytes()
        magic, written_by, room, num_steps = _FILE_HEAD.unpack_from(data)
        [steps_done], [arrivals_done] = (_NUMBER.unpack_from(data, place) for place in (_STEPS_DONE, _ARRIVALS_DONE))
    except (OSError, struct.error):
        return None
    num_slots = num_steps + _OTHER_SLOTS
    if (magic, written_by, len(data)) != (_MAGIC, incarnation, _place_of(num_slots, room)):
        return None
    *work, suspects = (_read_slot(data, slot, room) for slot in range(num_slots))
    done = [steps_done] * num_steps + [arrivals_done]
    begun = [slot for slot, number in zip(work, done, strict=True) if slot is not None and slot[0] > number]
    named: dict[str, int] = {}
    for _, _, request_ids, ends in begun:
        for request_id, end in zip(request_ids, ends, strict=True):
            named[request_id] = max(end, named.get(request_id, 0))
    trials = [(trial[0], trial[1]) for _, trial, _, _ in begun if trial is not None]
    return LastWork(named, trials, {} if suspects is None else dict(zip(*suspects[2:], strict=True)))


def _create(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # A page that finds no room on the disk later would end the process.
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _place_of(slot: int, room: int) -> int:
    return _SLOTS + slot * (_SLOT_HEAD.size + room)


def _read_slot(data: bytes, slot: int, room: int) -> Any:
    """Return the number, trial, ids and ends in a slot; None if it is empty or torn."""
    start = _place_of(slot, room)
    checksum, length = _SLOT_HEAD.unpack_from(data, start)
    content = data[start + _SLOT_HEAD.size :][: min(length, room)]
    return msgpack.unpackb(content) if content and zlib.crc32(content) == checksum else None
