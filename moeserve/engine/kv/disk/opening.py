"""Open the KV blocks on disk for a rank that is ready for its first step."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from kernels.cpu.checksum import fastest_crc32
from kernels.cpu.library import native_kernels
from moeserve.config import ConfigError
from moeserve.engine.fingerprint import fingerprint_of_kv
from moeserve.engine.kv.disk.copier import NUM_READERS, PAUSES, Memories, as_block_memory, block_bytes
from moeserve.engine.kv.disk.files import BlockFiles, disk_root, open_root, scan, seconds_to_read
from moeserve.engine.rank import Rank
from moeserve.run_context import RunContext
from moeserve.settings.quantities import show_size
from radix_cache import Kind, StoredBlock, StoredBlocks

_DAY_SECONDS = 86400.0
# The first guess of the disk's rate: number of blocks, spread over the times of their last use; seconds that it takes;
# bytes below which the time would be that of opening files, not of reading.
_PROBED_BLOCKS, _PROBE_SECONDS, _LEAST_PROBED_BYTES = 8, 0.1, 1 << 20

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KvDisk:
    """The blocks on disk, and their files.

    read_s: a first guess of the seconds that reading a KV block takes, by `CopyJob.is_gentle`; empty if there are too
    few to measure.
    """

    stored: StoredBlocks
    files: BlockFiles
    read_s: Mapping[bool, float]


class About(msgspec.Struct, frozen=True):
    """The facts that a fingerprint stands for, written for people. Bytes: of rank 0's layers."""

    model: str
    arithmetic: str
    block_size: int
    block_bytes: int
    window_bytes: int = 0
    state_bytes: int = 0


def memories_of(rank: Rank) -> Memories:
    """Return `Rank.block_tensors` on a CPU as arrays."""
    return {kind: as_block_memory(tensors) for kind, tensors in rank.block_tensors().items()}


def files_for(rank: Rank, root: Path, fingerprint: str) -> BlockFiles:
    """Return the files of a rank's blocks, or of its part of them."""
    crc32 = fastest_crc32(native_kernels() if rank.model.device == "cpu" else None)
    return BlockFiles(root, fingerprint, crc32, *rank.part)


def open_kv_disk(context: RunContext, rank: Rank) -> KvDisk:
    """Find the blocks of earlier runs. Raise ConfigError if the folder cannot be used."""
    config, model = context.config, rank.model
    assert config.kv_disk_path is not None
    root = disk_root(config.kv_disk_path)
    memories = rank.block_tensors()
    begun = time.monotonic()
    try:
        secret = open_root(root)
        fingerprint = fingerprint_of_kv(context, rank, root)
        files = files_for(rank, root, fingerprint)
        sizes = [block_bytes(memories.get(kind, ())) for kind in Kind]
        about = About(context.served_model_names[0], model.arithmetic, config.block_size, *sizes)
        files.describe(msgspec.json.encode(about) + b"\n")
        stored = StoredBlocks(secret, fingerprint, config.kv_disk_size, _DAY_SECONDS * config.kv_disk_age)
        now = time.time()
        stored.set_time(now, time.monotonic())
        found = sorted(scan(root, now), key=lambda block: (block.used_at, block.name))
        for block in found:
            stored.put(block)
    except OSError as error:
        where = config.kv_disk_path
        raise ConfigError(
            f"The folder of --kv-disk-path, {where}, cannot be used: {error.strerror or error}."
        ) from error
    num_own = stored.num_own
    read_s = _first_guess(root, [block for block in found if block.is_kv and block.folder.startswith(fingerprint)])
    log.info(
        "kv_disk",
        folder=os.fspath(root),
        blocks=num_own,
        tokens=num_own * config.block_size,
        size=f"{show_size(stored.num_bytes)} of {show_size(config.kv_disk_size)}",
        seconds=round(time.monotonic() - begun, 2),
    )
    return KvDisk(stored, files, read_s)


def _first_guess(root: Path, blocks: Sequence[StoredBlock]) -> Mapping[bool, float]:
    probed = blocks[:: max(1, len(blocks) // _PROBED_BLOCKS)][:_PROBED_BLOCKS]
    if sum(block.num_bytes for block in probed) < _LEAST_PROBED_BYTES:
        return {}
    found = seconds_to_read(root, probed, _PROBE_SECONDS)
    if found is None:
        return {}
    wall_s, used_s = (seconds * probed[0].num_bytes for seconds in found)
    return {False: wall_s, True: wall_s + PAUSES * used_s / NUM_READERS}
