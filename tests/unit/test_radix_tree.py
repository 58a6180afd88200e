import random
from array import array

from radix_cache.nodes import Node
from radix_cache.tree import RadixTree

SIZE = 2


def data(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def ids(*blocks: int) -> "array[int]":
    return array("i", blocks)


def cache(tree: RadixTree, tokens: bytes, blocks: "array[int]", namespace: str = "") -> Node:
    """What one request leaves behind: it starts at the root, publishes everything and goes."""
    start = tree.root(namespace)
    tree.acquire(start)
    node, _ = tree.insert(start, tokens, blocks, namespace)
    tree.move(start, node)
    tree.release(node, namespace)
    return node


def test_descend_returns_the_blocks_of_the_longest_cached_prefix() -> None:
    tree = RadixTree(SIZE)
    cache(tree, data(1, 2, 3, 4, 5, 6), ids(10, 11, 12))
    found = array("i")
    tree.descend(tree.root(""), data(1, 2, 3, 4, 9, 9), found, "")
    assert found == ids(10, 11)


def test_split_keeps_the_existing_object_as_the_lower_part() -> None:
    tree = RadixTree(SIZE)
    node = cache(tree, data(1, 2, 3, 4, 5, 6), ids(10, 11, 12))
    tree.acquire(node)
    upper = tree.descend(tree.root(""), data(1, 2), array("i"), "")
    assert upper is node.parent
    assert (upper.blocks, node.blocks) == (ids(10), ids(11, 12))
    assert (upper.tokens, node.tokens) == (data(1, 2), data(3, 4, 5, 6))
    assert (upper.refs, upper.pins, node.refs) == (0, 1, 1)
    assert tree.num_evictable_blocks == 0
    tree.release(node, "")
    assert tree.num_evictable_blocks == 3


def test_prompts_that_differ_within_a_block_share_only_the_blocks_before_it() -> None:
    tree = RadixTree(SIZE)
    cache(tree, data(1, 2, 3, 4), ids(0, 1))
    cache(tree, data(1, 2, 3, 5), ids(8, 2))
    assert tree.num_blocks == 3
    assert tree.depth("", data(1, 2, 3, 5)) == 2
    assert tree.depth("", data(1, 2, 3, 6)) == 1


def test_run_that_nobody_else_ends_at_grows_in_place() -> None:
    tree = RadixTree(SIZE)
    root = tree.root("")
    tree.acquire(root)
    node, _ = tree.insert(root, data(1, 2), ids(0), "")
    tree.move(root, node)
    longer, _ = tree.insert(node, data(3, 4), ids(1), "")
    assert longer is node
    assert node.blocks == ids(0, 1)
    assert tree.num_pinned_blocks == 2


def test_run_that_another_lease_ends_at_gets_a_child_instead() -> None:
    tree = RadixTree(SIZE)
    node = cache(tree, data(1, 2), ids(0))
    tree.acquire(node)
    tree.acquire(node)
    child, _ = tree.insert(node, data(3, 4), ids(1), "")
    assert child is not node
    assert child.parent is node
    assert node.blocks == ids(0)


def test_insert_reports_the_ids_the_tree_already_had() -> None:
    tree = RadixTree(SIZE)
    cache(tree, data(1, 2, 3, 4), ids(0, 1))
    root = tree.root("")
    tree.acquire(root)
    node, canonical = tree.insert(root, data(1, 2, 3, 4, 5, 6), ids(7, 8, 9), "")
    assert canonical == ids(0, 1)
    assert node.blocks == ids(0, 1, 9)


def test_eviction_trims_the_tail_of_the_least_recently_used_leaf() -> None:
    tree = RadixTree(SIZE)
    cache(tree, data(1, 1, 2, 2, 3, 3), ids(0, 1, 2))
    cache(tree, data(5, 5, 6, 6), ids(3, 4))
    assert tree.evict(2) == ids(1, 2)
    assert tree.depth("", data(1, 1, 2, 2, 3, 3)) == 1
    assert tree.evict(2) == ids(0, 4)


def test_prefix_is_as_recently_used_as_the_continuation_it_lost() -> None:
    tree = RadixTree(SIZE)
    prefix = cache(tree, data(1, 1), ids(0))
    tree.acquire(prefix)
    tree.acquire(prefix)
    child, _ = tree.insert(prefix, data(3, 3), ids(2), "")
    tree.move(prefix, child)
    tree.release(prefix, "")
    cache(tree, data(2, 2), ids(1))
    tree.release(child, "")
    assert tree.trim(child, 1, "") == ids(2)
    assert tree.evict(2) == ids(1, 0)


def test_inner_and_referenced_nodes_are_not_evictable() -> None:
    tree = RadixTree(SIZE)
    cache(tree, data(1, 1, 2, 2), ids(0, 1))
    cache(tree, data(1, 1, 3, 3), ids(9, 2))
    leaf = tree.descend(tree.root(""), data(1, 1, 3, 3), array("i"), "")
    tree.acquire(leaf)
    assert tree.num_evictable_blocks == 1
    assert tree.evict(1) == ids(1)
    tree.release(leaf, "")
    assert tree.num_evictable_blocks == 2


def test_trim_stops_at_blocks_that_something_else_continues() -> None:
    tree = RadixTree(SIZE)
    cache(tree, data(1, 1, 2, 2), ids(0, 1))
    node = cache(tree, data(1, 1, 3, 3, 4, 4), ids(9, 2, 3))
    assert tree.trim(node, 3, "") == ids(2, 3)
    assert tree.depth("", data(1, 1, 2, 2)) == 2


def test_namespaces_do_not_meet_and_vanish_when_empty() -> None:
    tree = RadixTree(SIZE)
    cache(tree, data(1, 1), ids(0), "a")
    cache(tree, data(1, 1), ids(1), "b")
    assert tree.depth("c", data(1, 1)) == 0
    assert list(tree.roots) == ["a", "b"]
    assert tree.evict(1) == ids(0)
    assert list(tree.roots) == ["b"]
    assert tree.depth("b", data(1, 1)) == 1


def test_eviction_queue_is_bounded_by_the_blocks_and_stays_in_order() -> None:
    tree = RadixTree(SIZE)
    nodes = [cache(tree, data(token, token), ids(token)) for token in range(200)]
    draw = random.Random(0)
    for _ in range(20):
        draw.shuffle(nodes)
        for node in nodes:
            tree.acquire(node)
            tree.release(node, "")
    assert sorted(tree.victims.queued_serials()) == sorted(node.serial for node in nodes)
    order = [node.blocks[0] for node in nodes]
    for count in (1, 99, 60):
        assert tree.evict(count).tolist() == [order.pop(0) for _ in range(count)]
        tree.victims.queued_serials()


def test_trimmed_nodes_do_not_pile_up_in_the_eviction_queue() -> None:
    tree = RadixTree(SIZE)
    nodes = [cache(tree, data(token, token), ids(token)) for token in range(200)]
    for node in nodes:
        assert len(tree.trim(node, 1, "")) == 1
        tree.victims.queued_serials()
    assert tree.num_nodes == tree.num_blocks == 0
