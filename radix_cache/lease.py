"""What a request holds of the KV memory."""

from __future__ import annotations

from array import array

from radix_cache.tree import Node


class Lease:
    """One request's reference to KV blocks, made by `PrefixCache.match` and released exactly once.

    `block_ids` (int32) is the request's block table: block i holds tokens ``[i * block_size, (i + 1) * block_size)``.
    It only ever grows, except that `publish` and `advance` may put another id of the same content in place of one.
    Its first `num_published_tokens` tokens are in the tree. `num_cached_tokens` counts the tokens whose KV this request
    was given instead of computing it. `owner` is the cache that gave it, None once it was released. All fields are
    read-only for others; copy `block_ids` rather than keep a view.
    """

    __slots__ = (
        "block_ids",
        "namespace",
        "node",
        "num_cached_tokens",
        "num_published_tokens",
        "number",
        "owner",
        "use_cache",
    )

    def __init__(self, owner: object, number: int, namespace: str, node: Node, use_cache: bool) -> None:
        self.owner: object | None = owner
        self.number = number
        self.namespace = namespace
        self.node = node
        self.use_cache = use_cache
        self.block_ids: array[int] = array("i")
        self.num_published_tokens = 0
        self.num_cached_tokens = 0
