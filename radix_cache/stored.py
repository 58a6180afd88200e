"""Which KV blocks are stored in the tier below memory: on a disk, or in the host's memory below a GPU's.

There are no files and no clock here; the caller reports both. On a disk blocks are files, and the docstrings call them
so in either tier. A stored block is named by the tokens of its whole prefix: names are chained digests, keyed by a
secret, the fingerprint of everything that the bits of KV depend on, and the namespace. So names are the same in every
process with the secret, and nobody without it can tell a prompt from a name. As in the tree a prefix serves up to its
first block that is missing. Window blocks and snapshots have longer names, after the KV block that they belong to
(`border_name`).

If there are more bytes than the limit, the account that has most of them loses the blocks that it used longest ago
(`radix_cache.worth_queue`), the end of a prefix before its beginning. Blocks that were not used for `max_age` go, too.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import inf, log2

from radix_cache.block_copies import Kind, border_name
from radix_cache.errors import require
from radix_cache.retention import account_of
from radix_cache.worth_queue import WorthQueue

NAME_BYTES = 16
# A file that is used has a new time of last use written to it when the old one is as many seconds old.
_STAMP_SECONDS = 3600.0
# A clock that is off by more seconds was set; by fewer it was corrected.
_SET_SECONDS = 60.0
_NUM_NAMESPACES = 1024  # namespaces whose digests are remembered
# Rows of the queue are weighed in units of as many bytes.
_WEIGHED_BYTES = 1024


class Tier(StrEnum):
    """The memory below that of a device."""

    HOST = "host"  # of a GPU: it holds what leaves the device, and ends with the process
    DISK = "disk"  # it outlives the process, so it gets blocks soon after they are computed


def used_at(now: float, depth: int) -> float:
    """Return the time of last use of a block that is used now, with `depth` blocks before it in its prefix.

    The beginning of a prefix is to go last, also when its files are found again by their times alone.
    """
    return now - depth


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A KV block, a window block or a snapshot that is stored.

    folder: of its fingerprint and namespace. used_at: in seconds since the epoch, as its file says.
    """

    name: bytes
    folder: str
    num_bytes: int
    used_at: float

    @property
    def is_kv(self) -> bool:
        return len(self.name) == NAME_BYTES

    @property
    def path(self) -> str:
        """The path of the file within the folder of the cache."""
        return f"{self.folder}/{self.name.hex()}"


@dataclass(frozen=True, slots=True)
class Chores:
    """Files to be removed, and files that get a new time of last use."""

    removals: Sequence[str]
    stamps: Sequence[tuple[str, float]]


@dataclass(slots=True)
class _Entry:
    block: StoredBlock
    account: str
    used_at: float


class StoredBlocks:
    """The blocks in the lower tier, of all fingerprints and namespaces, and their order of removal."""

    def __init__(
        self, secret: bytes, fingerprint: str, max_bytes: int, max_age: float = inf, tier: Tier = Tier.DISK
    ) -> None:
        """secret: 32 bytes. fingerprint: of the blocks that this process makes, in hex. max_age: in seconds."""
        self.tier = tier
        self._secret = secret
        self._fingerprint = fingerprint
        self._max_bytes = max_bytes
        self._max_age = max_age
        # Seconds since the epoch, and the same at the beginning of the clock that nobody sets.
        self._now, self._beginning = 0.0, 0.0
        # The block that was used longest ago first.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._queue: WorthQueue[bytes] = WorthQueue(_excess)
        # KV blocks, and bytes of all files.
        self._num_of_folder: Counter[str] = Counter()
        self._bytes_of_folder: Counter[str] = Counter()
        # Of the namespaces that were used last: clients may make up any number of them.
        self.folder_of = lru_cache(_NUM_NAMESPACES)(self._folder_of)
        self._seed_of = lru_cache(_NUM_NAMESPACES)(self._make_seed)
        self._removals: list[str] = []
        # The paths of files that are to be removed, until they are.
        self._going: set[str] = set()
        self._stamps: list[tuple[str, float]] = []
        self.num_bytes = 0
        self.num_evicted = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_own(self) -> int:
        """The number of KV blocks of this process's fingerprint."""
        start = f"{self._fingerprint}/"
        return sum(number for folder, number in self._num_of_folder.items() if folder.startswith(start))

    @property
    def oldest_age(self) -> float:
        """The seconds since the block was used that was used longest ago; 0 without blocks."""
        return max(0.0, self._now - next(iter(self._entries.values())).used_at) if self._entries else 0.0

    def has_any(self, namespace: str) -> bool:
        """Return whether a namespace has a KV block in the lower tier."""
        return self._num_of_folder[self.folder_of(namespace)] > 0

    def num_of(self, namespaces: Collection[str] | None) -> tuple[int, int]:
        """Return the numbers of KV blocks and of bytes of namespaces, or of all of this fingerprint (None)."""
        if namespaces is None:
            folders = [folder for folder in self._num_of_folder if folder.startswith(f"{self._fingerprint}/")]
        else:
            folders = [self.folder_of(namespace) for namespace in namespaces]
        return sum(self._num_of_folder[one] for one in folders), sum(self._bytes_of_folder[one] for one in folders)

    def name(self, names: list[bytes], namespace: str, tokens: array[int], count: int, block_size: int) -> None:
        """Extend `names`, the names of the first blocks of `tokens`, to `count` names."""
        if len(names) >= count:
            return
        parent, data = names[-1] if names else self._seed_of(namespace), tokens[: count * block_size].tobytes()
        size = 4 * block_size
        for start in range(len(names) * size, count * size, size):
            parent = hashlib.blake2b(data[start : start + size], digest_size=NAME_BYTES, key=parent).digest()
            names.append(parent)

    def depth(self, names: Sequence[bytes], first: int) -> int:
        """Return the number of the first block from number `first` on that is not stored; at most len(names)."""
        while first < len(names) and names[first] in self._entries:
            first += 1
        return first

    def set_time(self, now: float, steady: float) -> None:
        """Set the time, in seconds since the epoch, and remove blocks that were not used for long.

        steady: the seconds of a clock that nobody sets. Where the other one was set, times of last use move with it:
        blocks are as old as before.
        """
        jump = now - steady - self._beginning
        if abs(jump) > _SET_SECONDS:
            self._beginning += jump
            for entry in self._entries.values():
                self._set_used_at(entry, min(entry.used_at + jump, now))
        self._now = now
        while self._entries:
            name, entry = next(iter(self._entries.items()))
            if now - entry.used_at <= self._max_age:
                return
            self.discard(name)
            self.num_evicted += 1

    def put(self, block: StoredBlock) -> None:
        """Enter a block whose file is there, or enter it anew, and remove others while there are too many bytes."""
        self._forget(block.name)
        fingerprint, account = block.folder.split("/", 1)
        owner = f"{fingerprint}/{account.split('.', 1)[0]}"
        self._entries[block.name] = _Entry(block, owner, block.used_at)
        self._count(block, 1)
        self._queue.count(owner, _weight(block))
        self._queue.put(block.name, owner, self._queue.age + 1)
        while self.num_bytes > self._max_bytes and (victim := self._queue.first(owner)) is not None:
            self._queue.evict(victim)
            self.discard(victim)
            self.num_evicted += 1

    def touch(self, names: Sequence[bytes], kinds: Sequence[Kind] = ()) -> None:
        """Record that a prefix is used: its blocks are the last to go, its beginning after its end.

        kinds: of the files that its KV blocks may have beside them.
        """
        for depth in range(len(names) - 1, -1, -1):
            self._touch(names[depth], depth)
            for kind in kinds:
                self._touch(border_name(names[depth], kind), depth)

    def _touch(self, name: bytes, depth: int) -> None:
        entry = self._entries.get(name)
        if entry is None:
            return
        self._entries.move_to_end(name)
        self._queue.put(name, entry.account, self._queue.age + 1)
        self._set_used_at(entry, used_at(self._now, depth))

    def _set_used_at(self, entry: _Entry, seconds: float) -> None:
        block, entry.used_at = entry.block, seconds
        if abs(seconds - block.used_at) > _STAMP_SECONDS:
            entry.block = StoredBlock(block.name, block.folder, block.num_bytes, seconds)
            self._stamps.append((block.path, seconds))

    def discard(self, name: bytes) -> None:
        """Remove a block, and have its file removed. Do nothing if it is not in the lower tier."""
        block = self._forget(name)
        if block is not None:
            self.remove(block.path)

    def remove(self, path: str) -> None:
        """Have a file removed that is no block's."""
        self._removals.append(path)
        self._going.add(path)

    def end_removals(self, paths: Iterable[str]) -> None:
        """Record that files of `take_chores` are gone, or could not be removed."""
        self._going.difference_update(set(paths).difference(self._removals))

    @property
    def going(self) -> Collection[str]:
        """The paths of the files that are to be removed now, and may be there still."""
        return frozenset(self._going)

    def is_going(self, block: StoredBlock) -> bool:
        """Return whether a block's file is to be removed, and may be there still."""
        return block.path in self._going

    def drop(self, namespaces: Collection[str] | None) -> None:
        """Remove the blocks of namespaces, or all blocks (None)."""
        folders = None if namespaces is None else {self.folder_of(namespace) for namespace in namespaces}
        if folders is not None and not any(self._bytes_of_folder[folder] for folder in folders):
            return
        for name in [one for one, entry in self._entries.items() if folders is None or entry.block.folder in folders]:
            self.discard(name)

    def take_chores(self) -> Chores | None:
        """Return, once, the files to be removed and to be stamped; None without any."""
        if not (self._removals or self._stamps):
            return None
        chores = Chores(self._removals, self._stamps)
        self._removals, self._stamps = [], []
        return chores

    def check(self) -> None:
        """Raise InvariantError unless counters, queue and entries agree."""
        entries = self._entries.values()
        require(self.num_bytes == sum(entry.block.num_bytes for entry in entries), "num_bytes is wrong")
        require(sorted(self._queue) == sorted(self._entries), "the queue differs from the blocks in the lower tier")
        weights: Counter[str] = Counter()
        for entry in entries:
            weights[entry.account] += _weight(entry.block)
        self._queue.check(dict(weights))
        folders = Counter(entry.block.folder for entry in entries if entry.block.is_kv)
        require(self._num_of_folder == folders, "blocks of a folder are miscounted")
        sizes: Counter[str] = Counter()
        for entry in entries:
            sizes[entry.block.folder] += entry.block.num_bytes
        require(dict(self._bytes_of_folder) == sizes, "bytes of a folder are miscounted")

    def _forget(self, name: bytes) -> StoredBlock | None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        block = entry.block
        self._queue.discard(name)
        self._queue.count(entry.account, -_weight(block))
        self._count(block, -1)
        return block

    def _count(self, block: StoredBlock, number: int) -> None:
        self.num_bytes += number * block.num_bytes
        self._num_of_folder[block.folder] += number * block.is_kv
        self._bytes_of_folder[block.folder] += number * block.num_bytes
        for counter in (self._num_of_folder, self._bytes_of_folder):
            if not counter[block.folder]:
                del counter[block.folder]

    def _folder_of(self, namespace: str) -> str:
        """Return the folder of a namespace's blocks. Its name tells neither key nor salt."""
        account, own = self._mac("account", account_of(namespace)), self._mac("namespace", namespace)
        return f"{self._fingerprint}/{account.hex()}.{own.hex()}"

    def _make_seed(self, namespace: str) -> bytes:
        return self._mac(f"blocks of {self._fingerprint}", namespace)

    def _mac(self, purpose: str, text: str) -> bytes:
        return hmac.digest(self._secret, f"{purpose}\0{text}".encode(), "sha256")[:NAME_BYTES]


def _weight(block: StoredBlock) -> int:
    return max(1, block.num_bytes // _WEIGHED_BYTES)


def _excess(_: str, weight: int) -> float:
    """Return a measure of an account's holding: the account that has most is the first to lose a block."""
    return log2(weight) if weight else -inf
