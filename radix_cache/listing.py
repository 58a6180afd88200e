"""The prefixes of a tree as a list: for their owner, or for an operator who wants to see all of them."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from heapq import heappush, heappushpop
from itertools import islice

from radix_cache.nodes import PUBLIC, Node
from radix_cache.tree import RadixTree

MAX_VISITED_NODES = 20_000  # runs that one listing looks at
# Runs that one slice of a listing visits, and entries that it makes.
_VISITED_AT_ONCE = 500
_LISTED_AT_ONCE = 200
_PREVIEW_TOKENS = 24


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A run of the tree. `num_prefix_tokens` is the length of the prefix that it ends, its own tokens included.

    `hits` and `tokens_saved` count the requests whose match ended in this run. Ages and remaining times are in the
    caller's time: `unused_for` is the time since the last request that used it ended (0: a request uses it),
    `retained_for` the time left (None: not retained by this run itself). `is_retained`: by the retention of this run or
    of a run below it. `preview`: the first tokens of the run.
    """

    serial: int
    parent: int | None
    namespace: str
    num_prefix_tokens: int
    num_tokens: int
    num_blocks: int
    hits: int
    tokens_saved: int
    unused_for: float
    retained_for: float | None
    is_retained: bool
    is_pinned: bool
    is_leased: bool
    preview: list[int]


@dataclass(frozen=True, slots=True)
class Listing:
    """Prefixes in their order, the number of visited runs, and whether these were all."""

    prefixes: list[CachedPrefix]
    num_visited: int
    complete: bool


# (tokens saved, time of the latest use, recency of the run, number among the visited, the run)
_Place = tuple[int, float, int, int, Node]


def list_prefixes(tree: RadixTree, namespaces: Collection[str] | None, limit: int) -> Generator[None, None, Listing]:
    """Return the prefixes of namespaces (None: of all) with the most tokens saved, the most recently used among equals.

    At most `MAX_VISITED_NODES` runs are visited, the newest first. It is a generator, so that the tree can be used
    between its slices, each a fraction of a millisecond. The list then shows each run as it was when its slice came: a
    run that was evicted meanwhile is left out, and one that was added or split may be.
    """
    visited: list[Node] = []
    complete = yield from _visit(tree, namespaces, visited)
    places = yield from _best(visited, limit)
    prefixes: list[CachedPrefix] = []
    depths: dict[Node, int] = {}
    for number, (_, used_at, _, _, node) in enumerate(places):
        if node.parent is not None:
            prefixes.append(_prefix(tree, node, _depth(node, depths), used_at))
        if number % _LISTED_AT_ONCE == _LISTED_AT_ONCE - 1:
            yield
    return Listing(prefixes, len(visited), complete)


def find_prefix(tree: RadixTree, namespaces: Collection[str], serial: int) -> Generator[None, None, array[int] | None]:
    """Return the tokens of the prefix that ends with the run of a listing, None where it is gone. For the generator see
    `list_prefixes`."""
    visited: list[Node] = []
    yield from _visit(tree, namespaces, visited)
    node: Node | None = next((node for node in visited if node.serial == serial and node.parent is not None), None)
    if node is None:
        return None
    runs = []
    while node is not None:
        runs.append(bytes(node.tokens))
        node = node.parent
    return array("i", b"".join(reversed(runs)))


def _visit(tree: RadixTree, namespaces: Collection[str] | None, visited: list[Node]) -> Generator[None, None, bool]:
    """Append the runs of namespaces to `visited`, each before the runs below it. Return whether these were all."""
    waiting, complete = _tops(tree, namespaces)
    work = 0
    while waiting and len(visited) < MAX_VISITED_NODES:
        node = waiting.pop()
        if node.parent is not None:
            visited.append(node)
        num_below, room = len(node.children), MAX_VISITED_NODES - len(visited)
        if num_below:
            newest = list(islice(reversed(node.children.values()), room))
            if namespaces is not None and node.namespace == PUBLIC:
                newest = [child for child in newest if child.namespace == PUBLIC]  # the others' runs are their own
            waiting += reversed(newest)
            complete = complete and num_below <= room
        work += 1 + num_below // 16
        if work >= _VISITED_AT_ONCE:
            work = 0
            yield
    return complete and not waiting


def _tops(tree: RadixTree, namespaces: Collection[str] | None) -> tuple[list[Node], bool]:
    """Return the nodes below which all runs of namespaces lie, the newest last, and whether none is missing."""
    if namespaces is None:
        found = list(islice(reversed(tree.roots.values()), MAX_VISITED_NODES))
        return found[::-1], len(found) == len(tree.roots)
    tops: list[Node] = []
    complete = True
    for name in namespaces:
        if (root := tree.roots.get(name)) is not None:
            tops.append(root)
        own = tree.branches.get(name, {})
        tops += list(islice(reversed(own), MAX_VISITED_NODES))[::-1]
        complete = complete and len(own) <= MAX_VISITED_NODES
    return tops, complete


def _best(visited: Sequence[Node], limit: int) -> Generator[None, None, list[_Place]]:
    """Return the best places, the first one first. The use of a run below a run counts as its own use, too."""
    latest: dict[Node, float] = {}
    best: list[_Place] = []
    for number, node in enumerate(reversed(visited)):
        used_at = max(latest.pop(node, 0.0), node.used_at)
        if node.parent is not None:
            latest[node.parent] = max(latest.get(node.parent, 0.0), used_at)
            place = (node.saved_tokens, used_at, node.last_used, number, node)
            if len(best) < limit:
                heappush(best, place)
            else:
                heappushpop(best, place)
        if number % _VISITED_AT_ONCE == _VISITED_AT_ONCE - 1:
            yield
    return sorted(best, reverse=True)


def _depth(node: Node, depths: dict[Node, int]) -> int:
    """Return the number of blocks up to the end of a run. depths: of runs, filled in."""
    path = []
    above: Node | None = node
    while above is not None and above not in depths:
        path.append(above)
        above = above.parent
    depth = 0 if above is None else depths[above]
    for below in reversed(path):
        depth += len(below.blocks)
        depths[below] = depth
    return depth


def _prefix(tree: RadixTree, node: Node, depth: int, used_at: float) -> CachedPrefix:
    retention, parent = node.retention, node.parent
    has_deadline = retention is not None and retention.until > 0
    return CachedPrefix(
        serial=node.serial,
        parent=None if parent is None or parent.parent is None else parent.serial,
        namespace=node.namespace,
        num_prefix_tokens=depth * tree.block_size,
        num_tokens=len(node.blocks) * tree.block_size,
        num_blocks=len(node.blocks),
        hits=node.hits,
        tokens_saved=node.saved_tokens,
        unused_for=0.0 if node.pins else tree.now - used_at,
        retained_for=max(0.0, retention.until - tree.now) if retention is not None and has_deadline else None,
        is_retained=node.keeps > 0,
        is_pinned=retention is not None and retention.is_pinned,
        is_leased=node.pins > 0,
        preview=array("i", bytes(node.tokens[: 4 * _PREVIEW_TOKENS])).tolist(),
    )
