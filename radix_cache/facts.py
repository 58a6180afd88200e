"""The changes of a tree's blocks, in order. From these facts the service tells routers which blocks are cached."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from radix_cache.nodes import Node


@dataclass(frozen=True, slots=True)
class Published:
    """Blocks became part of the tree, one behind the other.

    `parent`: the block before the first one, None at the beginning of a prompt; it may belong to PUBLIC. `tokens`: of
    the blocks, as int32 bytes.
    """

    namespace: str
    parent: int | None
    blocks: array[int]
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Evicted:
    """Blocks left the tree, in the order of their prefix. None of them has a child there."""

    blocks: array[int]


Fact = Published | Evicted


class Facts:
    """The facts of one tree, for those who tell others. `are_noted`: False until a reader wants them."""

    def __init__(self, roots: Mapping[str, Node]) -> None:
        """roots: by namespace."""
        self._facts: list[Fact] = []
        self._roots = roots
        self.are_noted = False

    def begin(self) -> None:
        """Note publications and evictions from now on."""
        self.are_noted = True

    def note(self, fact: Fact) -> None:
        self._facts.append(fact)

    def take(self) -> list[Fact]:
        """Return the publications and evictions since the last call, in order."""
        taken, self._facts = self._facts, []
        return taken

    def published(self) -> Iterator[Published]:
        """Yield all that is cached, as if it had been published just now. O(blocks)."""
        return facts_of(self._roots.values())


def facts_of(roots: Iterable[Node]) -> Iterator[Published]:
    """Yield the facts that lead from an empty tree to the one below `roots`, parents before their children."""
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node.parent is not None:
            above = node.parent.blocks
            yield Published(node.namespace, above[-1] if above else None, node.blocks[:], bytes(node.tokens))
        waiting.extend(node.children.values())
