"""The blocks that are copied between memory and the lower tier, or wait for that. This module copies nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from radix_cache.block_allocator import BlockAllocator
from radix_cache.errors import require


class Kind(IntEnum):
    """The memory of a copy: KV blocks, window blocks, or rows of recurrent states."""

    KV = 0
    WINDOW = 1
    STATE = 2


def border_name(name: bytes, kind: Kind) -> bytes:
    """Return the stored name of the window block, or of the snapshot at the end, of the KV block with a name."""
    return name + bytes((kind,))


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block of memory, and the stored block that has the same content or will have it.

    block: its number in the memory of its kind; for a snapshot, the row. depth: the number of KV blocks before it in
    its prefix. tokens: int32 ids of the KV block that it belongs to, or that a snapshot follows.
    """

    block: int
    name: bytes
    folder: str
    depth: int
    tokens: bytes
    kind: Kind = Kind.KV

    @property
    def path(self) -> str:
        """Its key in the lower tier; on a disk, the path of its file within the folder of the cache."""
        return f"{self.folder}/{self.name.hex()}"


Owner = TypeVar("Owner", bound=Hashable)


class WriteQueue(Generic[Owner]):
    """The copies that wait to be written, by the memory that has their content, and those being written."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Owner, BlockCopy] = OrderedDict()
        self._written: dict[bytes, BlockCopy] = {}
        # The names of all these copies.
        self._names: set[bytes] = set()
        # The names of copies that are being written and are not to stay in the lower tier.
        self._revoked: set[bytes] = set()

    def __len__(self) -> int:
        """The number of copies that wait."""
        return len(self._waiting)

    def __contains__(self, name: bytes) -> bool:
        """Return True for the name of a copy that waits or is being written."""
        return name in self._names

    def want(self, owner: Owner, copy: BlockCopy) -> None:
        """Queue the content of `owner` to be written. Do nothing if it is queued, or a copy of that name is being
        written."""
        if copy.name not in self._names and owner not in self._waiting:
            self._waiting[owner] = copy
            self._names.add(copy.name)

    def hurry(self, names: Iterable[bytes]) -> None:
        """Move the waiting copies of these names to the front of the queue, in their order."""
        hurried = set(names)
        for owner in reversed([owner for owner, copy in self._waiting.items() if copy.name in hurried]):
            self._waiting.move_to_end(owner, last=False)

    def forget(self, owner: Owner) -> None:
        """Do not write the content of `owner`, if its copy waits."""
        if (copy := self._waiting.pop(owner, None)) is not None:
            self._names.discard(copy.name)

    def begin(self) -> tuple[Owner, BlockCopy]:
        """Begin to write the copy that has waited longest."""
        owner, copy = self._waiting.popitem(last=False)
        self._written[copy.name] = copy
        return owner, copy

    def begin_of(self, owner: Owner) -> BlockCopy | None:
        """Begin to write the content of `owner`. Return None if no copy of it waits."""
        copy = self._waiting.pop(owner, None)
        if copy is not None:
            self._written[copy.name] = copy
        return copy

    def end(self, name: bytes) -> bool:
        """Record the end of a copy that has begun. Return whether its file may stay."""
        stays = name not in self._revoked
        del self._written[name]
        self._names.discard(name)
        self._revoked.discard(name)
        return stays

    def revoke(self, names: Collection[bytes]) -> None:
        """Keep none of these files in the lower tier, whether their copies wait or are being written."""
        if not self._names.isdisjoint(names):
            gone = set(names)
            self.revoke_all(lambda copy: copy.name not in gone)

    def revoke_all(self, keeps: Callable[[BlockCopy], bool]) -> None:
        """Forget the waiting copies for which `keeps` is False, and keep no file of those that are being written."""
        for owner in [owner for owner, copy in self._waiting.items() if not keeps(copy)]:
            self.forget(owner)
        self._revoked |= {copy.name for copy in self._written.values() if not keeps(copy)}


class BlockCopies:
    """The blocks that are being copied to or from the lower tier, and the `queue` of blocks that wait to be written.

    A block that leaves tree and leases while it is copied is *in copy* until the copy has ended, and is freed then.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self.queue: WriteQueue[int] = WriteQueue()
        # By block that is being copied: its copy if it is written, and True once nothing but the copy holds it.
        self._copied: dict[int, tuple[BlockCopy | None, bool]] = {}
        self.num_in_copy = 0

    @property
    def num_copied(self) -> int:
        """The number of blocks that are being copied: none of them can be given away at once."""
        return len(self._copied)

    @property
    def is_used(self) -> bool:
        """True while a block is to be copied, or is being copied."""
        return bool(self.queue or self._copied)

    def want(self, copy: BlockCopy) -> None:
        """Queue a block of the tree to be written. Do nothing if this block, or one of that name, is queued or being
        copied."""
        if copy.block not in self._copied:
            self.queue.want(copy.block, copy)

    def take(self, most: int) -> list[BlockCopy]:
        """Begin to write the blocks that have waited longest, at most `most`."""
        taken: list[BlockCopy] = []
        while self.queue and len(taken) < most:
            block, copy = self.queue.begin()
            taken.append(copy)
            self._copied[block] = (copy, False)
        return taken

    def take_of(self, blocks: Iterable[int]) -> list[BlockCopy]:
        """Begin to write these blocks, as far as copies of them wait."""
        taken: list[BlockCopy] = []
        for block in blocks:
            if (copy := self.queue.begin_of(block)) is not None:
                taken.append(copy)
                self._copied[block] = (copy, False)
        return taken

    def begin(self, blocks: Iterable[int]) -> None:
        """Record that a lease's blocks are being filled; `end` ends each. They are freed only after that."""
        for block in blocks:
            require(block not in self._copied, f"block {block} is copied twice at once")
            self._copied[block] = (None, False)

    def end(self, block: int) -> bool:
        """Record the end of a block's copy; free the block if nothing holds it. Return whether its file may stay."""
        copy, is_alone = self._copied.pop(block)
        if is_alone:
            self.num_in_copy -= 1
            self._allocator.free([block])
        return copy is None or self.queue.end(copy.name)

    def let_go(self, blocks: Iterable[int]) -> list[int]:
        """Return the blocks that can be freed now; a copied block is freed after its copy. Nothing else holds them."""
        free = []
        for block in blocks:
            self.queue.forget(block)
            if (copied := self._copied.get(block)) is not None:
                require(not copied[1], f"block {block} is freed twice")
                self._copied[block] = (copied[0], True)
                self.num_in_copy += 1
            else:
                free.append(block)
        return free

    def in_copy(self) -> list[int]:
        """Return the blocks that only their copy holds."""
        return [block for block, (_, is_alone) in self._copied.items() if is_alone]
