"""Which blocks a rank's tree holds, as routers know them: by hashes that are the same in every process.

The hash of a block is chained from its salt over all tokens up to its end, so replicas that hold the same prefix give
its blocks the same hashes. `KvBlocks` turns the facts of a tree into events, and knows at any time which events lead
from nothing to the present blocks. Blocks become known after the blocks before them, and are removed before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from radix_cache import PUBLIC, Fact, Published


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks are cached, one behind the other. parent: the hash of the block before them, None at the beginning.

    token_ids: int32 bytes. salt: of the prompt, where the first block is its beginning; None for unsalted prompts.
    """

    block_hashes: list[int]
    parent: int | None
    token_ids: bytes
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks are no longer cached, each before the one in front of it."""

    block_hashes: list[int]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is cached: earlier facts are void."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(slots=True)
class _Known:
    """A block that routers know. num_holders: the number of the tree's blocks with this content, and of namespaces that
    see it."""

    parent: int | None
    token_ids: bytes
    salt: str | None
    num_holders: int = 0


@dataclass(frozen=True, slots=True)
class _Held:
    """A block of the tree. before: the tree's block in front of it. lent: hashes under which its namespace knows the
    public blocks that it follows."""

    view: str
    hash: int
    before: int | None
    token_ids: bytes
    lent: tuple[int, ...]


class KvBlocks:
    """The blocks of one rank's tree and their hashes.

    The salt of a prompt is the name of its namespace. Prompts without a salt may use public prefixes, so these have no
    salt. Where another namespace continues a public prefix, the prefix is also published under its salt, as long as
    that lasts.
    """

    def __init__(self, block_size: int) -> None:
        self._block_bytes = 4 * block_size
        self._held: dict[int, _Held] = {}
        # By hash; a parent comes before its children.
        self._known: dict[int, _Known] = {}

    def apply(self, facts: Iterable[Fact]) -> list[Event]:
        """Return the events of facts, in their order."""
        events: list[Event] = []
        for fact in facts:
            if isinstance(fact, Published):
                self._publish(fact, events)
            elif removed := [gone for block in reversed(fact.blocks) for gone in self._evict(block)]:
                events.append(BlockRemoved(removed))
        return events

    def restart(self, facts: Iterable[Fact]) -> list[Event]:
        """Forget all blocks; return the event of that, and the events of the facts since."""
        self._held.clear()
        self._known.clear()
        return [AllBlocksCleared(), *self.apply(facts)]

    def snapshot(self, most: int) -> Iterator[list[Event]]:
        """Yield events in lists that lead from anything to the present blocks, `most` blocks in each."""
        events: list[Event] = [AllBlocksCleared()]
        run: list[int] = []
        num_blocks = 0
        for name, known in self._known.items():
            if run and (known.parent != run[-1] or num_blocks == most):
                events.append(self._stored(run))
                run = []
            if num_blocks == most:
                yield events
                events, num_blocks = [], 0
            run.append(name)
            num_blocks += 1
        if run:
            events.append(self._stored(run))
        yield events

    def _stored(self, hashes: list[int]) -> BlockStored:
        known = [self._known[name] for name in hashes]
        return BlockStored(hashes, known[0].parent, b"".join(one.token_ids for one in known), known[0].salt)

    def _publish(self, fact: Published, events: list[Event]) -> None:
        view = "" if fact.namespace == PUBLIC else fact.namespace
        parent = None if fact.parent is None else self._held[fact.parent]
        lent: list[int] = []
        if parent is not None and parent.view != view:
            lent = self._hold(view, None, list(self._path(fact.parent)), events)
        above = lent[-1] if lent else None if parent is None else parent.hash
        size = self._block_bytes
        tokens = [fact.tokens[start : start + size] for start in range(0, len(fact.tokens), size)]
        hashes = self._hold(view, above, tokens, events)
        before = fact.parent
        for block, name, token_ids in zip(fact.blocks, hashes, tokens, strict=True):
            self._held[block] = _Held(view, name, before, token_ids, tuple(lent))
            before, lent = block, []

    def _path(self, block: int | None) -> list[bytes]:
        """Return the tokens of the blocks up to one of the tree."""
        tokens = []
        while block is not None:
            held = self._held[block]
            tokens.append(held.token_ids)
            block = held.before
        return tokens[::-1]

    def _hold(self, view: str, above: int | None, tokens: list[bytes], events: list[Event]) -> list[int]:
        """Count a holder of each block behind `above`; publish blocks that had none. Return their hashes."""
        hashes: list[int] = []
        num_known = 0
        parent = above
        for token_ids in tokens:
            name = block_hash(view, parent, token_ids)
            known = self._known.get(name)
            if known is None:
                known = self._known[name] = _Known(parent, token_ids, (view or None) if parent is None else None)
            else:
                num_known += 1  # the first ones: a block that is known has parents that are
            known.num_holders += 1
            hashes.append(name)
            parent = name
        if num_known < len(hashes):
            events.append(self._stored(hashes[num_known:]))
        return hashes

    def _evict(self, block: int) -> Iterator[int]:
        """Forget a block of the tree; yield the hashes that have no holder any more."""
        held = self._held.pop(block)
        for name in (held.hash, *reversed(held.lent)):
            known = self._known[name]
            known.num_holders -= 1
            if not known.num_holders:
                del self._known[name]
                yield name


def block_hash(salt: str, parent: int | None, token_ids: bytes) -> int:
    """Return the hash of a block, 64 bits, unsigned. parent: of the block before it, None at a prompt's beginning.

    token_ids: int32 bytes, the lowest byte first.
    """
    if parent is None:
        start, kind = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).digest(), b"root"
    else:
        start, kind = parent.to_bytes(8, "big"), b"next"
    return int.from_bytes(blake2b(token_ids, digest_size=8, key=start, person=kind).digest(), "big")
