"""Why a prompt matched no further: the explanation of a miss, from the account's own prefixes alone.

Everything here reads; nothing changes the tree or its recency. All searches are bounded, since the service's loop waits
for them: the newest `_MAX_SIBLINGS` continuations at the place of the miss, `_MAX_NAMESPACES` namespaces.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from radix_cache.nodes import PUBLIC, Lease, Node
from radix_cache.retention import account_of
from radix_cache.tree import RadixTree

_MAX_SIBLINGS = 64
_MAX_NAMESPACES = 256
_MAX_VISITED = 4096  # children or namespaces that one search looks at
_TOKENS_BEFORE, _TOKENS_AFTER = 12, 12  # shown on both sides of a miss
# A head is volatile if a prompt diverges within its first _HEAD_TOKENS tokens, and after at most _MAX_DIFFERENT_TOKENS
# different tokens it equals at least _MIN_WITNESSES earlier prompts again for _SAME_TOKENS tokens. No more than
# _MAX_WITNESSES are counted.
_HEAD_TOKENS = 1024
_MAX_DIFFERENT_TOKENS = 96
_SAME_TOKENS = 24
_MIN_WITNESSES, _MAX_WITNESSES = 2, 16


class MissReason(StrEnum):
    """Why the match of a prompt ended where it did."""

    BYPASSED = "bypassed"  # the request did not ask the cache, or there is none
    LAST_TOKEN = "last_token"  # all but the last token, whose logits are needed, and the block that it ends
    BLOCK_BOUNDARY = "block_boundary"  # the rest is less than a block
    NO_STATE = "no_state"  # KV continues, but not with a snapshot of the recurrent state that the model needs too
    NO_WINDOW = "no_window"  # the KV of layers without a window continues, but not that of layers with a window
    EVICTED = "evicted"
    OTHER_SALT = "other_salt"
    VOLATILE_HEAD = "volatile_head"  # diverged, and behind a short difference the prompts are the same again
    DIVERGED = "diverged"
    NEVER_SEEN = "never_seen"
    NOT_KNOWN = "not_known"  # never seen, or evicted before its record began or too long ago for it


@dataclass(frozen=True, slots=True)
class Miss:
    """Where and why a match ended. `num_matched_tokens` are in whole blocks.

    `position`: the first token that is not in the nearest prefix (diverged, volatile head), else the first that did not
    match. `nearest`: the tokens of the nearest prefix from `nearest_start` on, with `position` among them.
    `num_known_tokens`: of a prefix that was evicted, is cached under another salt, or lacks a state or a window, the
    number of leading tokens equal to the prompt. `num_volatile_tokens` of the prompt differ in the head, as in
    `num_witnesses` other cached prompts.
    """

    reason: MissReason
    num_matched_tokens: int
    position: int
    num_known_tokens: int = 0
    nearest_start: int = 0
    nearest: list[int] = field(default_factory=list)
    num_volatile_tokens: int = 0
    num_witnesses: int = 0


def explain_miss(
    tree: RadixTree,
    lease: Lease,
    tokens: array[int],
    lacking: MissReason,
    *,
    tells_salts: bool,
) -> Miss:
    """Return why the lease, which covers the cached tokens of `tokens` in whole blocks, covers no more of them.

    lacking: the reason if the KV continues and something else is missing. tells_salts: whether OTHER_SALT may be it.
    """
    matched, block_size = lease.num_published_tokens, tree.block_size
    if not lease.use_cache:
        return Miss(MissReason.BYPASSED, 0, 0)
    if lease.num_known_tokens > matched:
        return Miss(lacking, matched, matched, lease.num_known_tokens)
    reusable = (len(tokens) - 1) // block_size * block_size
    if matched >= reusable:
        rest = len(tokens) - matched
        is_last = rest == 1 or rest == block_size
        return Miss(MissReason.LAST_TOKEN if is_last else MissReason.BLOCK_BOUNDARY, matched, matched)
    data = tokens[matched:reusable].tobytes()
    if num_evicted := tree.evictions.num_evicted(lease.node, data):
        return Miss(MissReason.EVICTED, matched, matched, matched + num_evicted * block_size)
    if tells_salts:
        whole = tokens[:reusable].tobytes()
        elsewhere = max((tree.depth(name, whole) for name in _other_namespaces(tree, lease.namespace)), default=0)
        if elsewhere * block_size > matched:
            return Miss(MissReason.OTHER_SALT, matched, matched, elsewhere * block_size)
    if diverged := _divergence(lease.node, tokens, matched, block_size, lease.namespace):
        return diverged
    incomplete = tree.evictions.is_incomplete(account_of(lease.namespace))
    return Miss(MissReason.NOT_KNOWN if incomplete else MissReason.NEVER_SEEN, matched, matched)


def _other_namespaces(tree: RadixTree, namespace: str) -> Iterator[str]:
    """Yield the newest namespaces of the same account."""
    account = account_of(namespace)
    visited = islice(reversed(tree.roots), _MAX_VISITED)
    own = (name for name in visited if name != namespace and account_of(name) == account)
    return islice(own, _MAX_NAMESPACES)


def _visible_children(node: Node, namespace: str) -> Iterator[Node]:
    """Yield the newest children of a node that are public or of a namespace."""
    newest = islice(reversed(node.children.values()), _MAX_VISITED)
    return islice((child for child in newest if child.namespace in (PUBLIC, namespace)), _MAX_SIBLINGS)


def _divergence(node: Node, tokens: array[int], matched: int, block_size: int, namespace: str) -> Miss | None:
    """Return where the prompt diverges from the nearest prefix that continues after `node`; None without one.

    It diverges within the first block: a child that has this block in common would have been matched.
    """
    rest = tokens[matched:]
    first = rest[:block_size]
    siblings = [
        (_num_common(array("i", bytes(child.tokens[: 4 * block_size])), first), child)
        for child in _visible_children(node, namespace)
    ]
    if not siblings:
        return None
    # The first one among equals is the newest.
    common, nearest = max(siblings, key=lambda sibling: sibling[0])
    position = matched + common
    if not position:
        return None
    start = max(0, position - _TOKENS_BEFORE)
    theirs = _newest_tokens(nearest, common + _TOKENS_AFTER, namespace)[common:]
    shown = tokens[start:position].tolist() + theirs.tolist()
    volatile, witnesses = 0, 0
    if position < _HEAD_TOKENS:
        alike = [child for length, child in siblings if length == common][:_MAX_WITNESSES]
        volatile, witnesses = _volatile(rest[common:], alike, common, namespace)
    reason = MissReason.DIVERGED if witnesses < _MIN_WITNESSES else MissReason.VOLATILE_HEAD
    if reason is MissReason.DIVERGED:
        volatile = witnesses = 0
    return Miss(reason, matched, position, 0, start, shown, volatile, witnesses)


def _num_common(one: array[int], other: array[int]) -> int:
    """Count the leading tokens that are equal."""
    limit = min(len(one), len(other))
    return next((index for index in range(limit) if one[index] != other[index]), limit)


def _newest_tokens(node: Node, count: int, namespace: str) -> array[int]:
    """Return up to `count` tokens from the beginning of a run on.

    At each branch it continues with the newest child that is public or of the namespace.
    """
    found: array[int] = array("i")
    current: Node | None = node
    while current is not None and len(found) < count:
        found.frombytes(bytes(current.tokens[: 4 * (count - len(found))]))
        current = next(_visible_children(current, namespace), None)
    return found


def _volatile(mine: array[int], siblings: list[Node], common: int, namespace: str) -> tuple[int, int]:
    """Count the leading tokens of `mine` that differ before it equals siblings again, and count these siblings.

    The siblings' runs equal the prompt for their first `common` tokens.
    """
    span = _MAX_DIFFERENT_TOKENS + _SAME_TOKENS
    size = 4 * _SAME_TOKENS
    data = mine[:span].tobytes()
    windows = [data[at : at + size] for at in range(0, len(data) - size + 1, 4)]
    lengths = []
    for sibling in siblings:
        theirs = _newest_tokens(sibling, common + span, namespace)[common:].tobytes()
        known = {theirs[at : at + size] for at in range(0, len(theirs) - size + 1, 4)}
        length = next((index for index, window in enumerate(windows) if window in known), None)
        if length is not None:
            lengths.append(length)
    return max(lengths, default=0), len(lengths)
