"""The prefixes of a tree as a list: for their owner, or for an operator who wants to see all of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from radix_cache.nodes import PUBLIC, Node
from radix_cache.retention import account_of
from radix_cache.tree import RadixTree

MAX_VISITED_NODES = 20_000
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


def list_prefixes(
    tree: RadixTree, block_size: int, account: str | None, limit: int
) -> tuple[list[CachedPrefix], int, bool]:
    """Return the prefixes of an account (None: of all) with the most tokens saved, the most recently used among equals.

    Return also the number of visited runs, and whether the visit ended before all runs were visited.
    """
    visited: list[tuple[int, Node]] = []
    complete = True
    for depth, node in _runs(tree, account):
        if len(visited) == MAX_VISITED_NODES:
            complete = False
            break
        visited.append((depth, node))
    latest = _latest_uses(visited)
    best = nlargest(limit, visited, key=lambda run: (run[1].saved_tokens, latest[run[1]], run[1].last_used))
    found = [_prefix(tree, node, depth, block_size, latest[node]) for depth, node in best]
    return found, len(visited), complete


def _runs(tree: RadixTree, account: str | None) -> Iterator[tuple[int, Node]]:
    """Yield (blocks up to its end, node) for the runs of an account."""
    for namespace, root in reversed(tree.roots.items()):
        if account is not None and account_of(namespace) != account and namespace != PUBLIC:
            continue
        waiting = [(0, root)]
        while waiting:
            above, node = waiting.pop()
            depth = above + len(node.blocks)
            is_own = account is None or account_of(node.namespace) == account
            if node.parent is not None and is_own:
                yield depth, node
            if is_own or node.namespace == PUBLIC:
                waiting.extend((depth, child) for child in node.children.values())


def _latest_uses(visited: Sequence[tuple[int, Node]]) -> dict[Node, float]:
    """Return the time of each run's latest use; the use of a run below it counts too. Parents are visited first."""
    latest = {node: node.used_at for _, node in visited}
    for _, node in reversed(visited):
        if node.parent in latest:
            latest[node.parent] = max(latest[node.parent], latest[node])
    return latest


def _prefix(tree: RadixTree, node: Node, depth: int, block_size: int, used_at: float) -> CachedPrefix:
    retention, parent = node.retention, node.parent
    has_deadline = retention is not None and retention.until > 0
    return CachedPrefix(
        serial=node.serial,
        parent=None if parent is None or parent.parent is None else parent.serial,
        namespace=node.namespace,
        num_prefix_tokens=depth * block_size,
        num_tokens=len(node.blocks) * block_size,
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
