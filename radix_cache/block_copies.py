"""The blocks that are copied between memory and disk, or wait for it. No files here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from radix_cache.errors import require


class Kind(IntEnum):
    """The memory of a copy: KV blocks, window blocks, or rows of recurrent states."""

    KV = 0
    WINDOW = 1
    STATE = 2


def border_name(name: bytes, kind: Kind) -> bytes:
    """Return the name on disk of the window block, or of the snapshot at the end, of the KV block with a name."""
    return name + bytes((kind,))


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block of memory, and the file that has the same content or will have it.

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
        """The path of the file within the folder of the cache."""
        return f"{self.folder}/{self.name.hex()}"


class BlockCopies:
    """The blocks of memory that wait to be written to disk, and the blocks that are being copied, either way.

    A block that leaves tree and leases while it is copied is *in copy* until the copy has ended, and is freed then.
    """

    def __init__(self) -> None:
        self._wanted: dict[int, BlockCopy] = {}
        # By block that is being copied: its copy if it is written, and True once nothing but the copy holds it.
        self._copied: dict[int, tuple[BlockCopy | None, bool]] = {}
        self._names: set[bytes] = set()
        # The names of blocks that are being written and are not to stay on disk.
        self._revoked: set[bytes] = set()
        self.num_in_copy = 0

    @property
    def num_wanted(self) -> int:
        return len(self._wanted)

    @property
    def num_copied(self) -> int:
        """The number of blocks that are being copied: none of them can be given away at once."""
        return len(self._copied)

    @property
    def is_used(self) -> bool:
        """True while a block is to be copied, or is being copied."""
        return bool(self._wanted or self._copied)

    def __contains__(self, name: bytes) -> bool:
        """Return True for a block that is to be written or is being written."""
        return name in self._names

    def want(self, copy: BlockCopy) -> None:
        """Have a block of the tree written. Do nothing if a block of that name, or that block, is on its way."""
        if copy.name not in self._names and copy.block not in self._wanted and copy.block not in self._copied:
            self._wanted[copy.block] = copy
            self._names.add(copy.name)

    def hurry(self, names: Iterable[bytes]) -> None:
        """Have the blocks of these names that wait written before all others, in the order in which they wait."""
        hurried = set(names)
        first = {block: copy for block, copy in self._wanted.items() if copy.name in hurried}
        self._wanted = first | self._wanted

    def revoke(self, names: Iterable[bytes]) -> None:
        """Keep none of these blocks on disk, whether they wait or are being written."""
        gone = self._names.intersection(names)
        waiting = {copy.name: block for block, copy in self._wanted.items() if copy.name in gone}
        for block in waiting.values():
            del self._wanted[block]
        self._names -= waiting.keys()
        self._revoked |= gone - waiting.keys()

    def revoke_all(self, keeps: Callable[[BlockCopy], bool]) -> None:
        """Write no block that `keeps` is False for, and keep none on disk that is being written."""
        waiting = [copy.name for copy in self._wanted.values() if not keeps(copy)]
        written = [copy.name for copy, _ in self._copied.values() if copy is not None and not keeps(copy)]
        self.revoke((*waiting, *written))

    def take(self, most: int) -> list[BlockCopy]:
        """Begin to write the blocks that have waited longest, at most `most`."""
        taken = []
        for block in list(self._wanted)[:most]:
            copy = self._wanted.pop(block)
            taken.append(copy)
            self._copied[block] = (copy, False)
        return taken

    def begin(self, blocks: Iterable[int]) -> None:
        """Note that a lease's blocks are being filled."""
        for block in blocks:
            require(block not in self._copied, f"block {block} is copied twice at once")
            self._copied[block] = (None, False)

    def end(self, block: int) -> tuple[bool, bool]:
        """Note the end of a block's copy. Return whether it is to be freed now, and whether its file may stay."""
        copy, is_alone = self._copied.pop(block)
        self.num_in_copy -= is_alone
        stays = copy is None or copy.name not in self._revoked
        if copy is not None:
            self._names.discard(copy.name)
            self._revoked.discard(copy.name)
        return is_alone, stays

    def let_go(self, blocks: Iterable[int]) -> list[int]:
        """Return the blocks that can be freed now; a copied block is freed after its copy. Nothing else holds them."""
        free = []
        for block in blocks:
            if (copy := self._wanted.pop(block, None)) is not None:
                self._names.discard(copy.name)
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
