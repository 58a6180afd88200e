"""Public prefixes: what one namespace publishes for all, and that nothing else crosses from one to another."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from radix_cache import PUBLIC, BudgetError, Lease, MissReason, PrefixCache, Shares, list_prefixes
from tests.support.cache_invariants import check_invariants, evict_all
from tests.support.jobs import finish
from tests.support.parameters import first

SIZE = 4
SYSTEM = list(range(100, 116))


def use(cache: PrefixCache, prompt: Sequence[int], namespace: str) -> int:
    """Serve a prompt as a request does. Return how many of its tokens were cached."""
    tokens = array("i", prompt)
    lease = cache.match(tokens, namespace)
    assert cache.extend(lease, -(-len(tokens) // SIZE) - len(lease.block_ids)) is not None
    cache.free(cache.publish(lease, tokens, len(tokens)))
    check_invariants(cache)
    cached = lease.num_cached_tokens
    cache.release(lease)
    check_invariants(cache)
    return cached


def test_every_namespace_hits_a_public_prefix_and_goes_on_alone() -> None:
    cache = PrefixCache(64, SIZE)
    use(cache, SYSTEM, PUBLIC)
    question = [*SYSTEM, 1, 2, 3, 4, 5]
    assert [use(cache, question, name) for name in ("a", "b", "a/salt", "")] == [16] * 4
    assert [use(cache, question, name) for name in ("a", "b", "a/salt", "")] == [20] * 4
    assert cache.peek(array("i", question), "c") == 16
    assert cache.peek(array("i", question), PUBLIC) == 16


def test_a_part_of_a_public_prefix_is_shared_as_well() -> None:
    cache = PrefixCache(64, SIZE)
    use(cache, SYSTEM, PUBLIC)
    other = [*SYSTEM[:8], 7, 7, 7, 7, 7]
    assert use(cache, other, "a") == 8
    assert use(cache, other, "a") == 12
    assert use(cache, other, "b") == 8
    assert use(cache, [*SYSTEM, 1], "b") == 16


def test_listing_dropping_and_reports_keep_to_ones_own_below_a_public_prefix() -> None:
    cache = PrefixCache(64, SIZE)
    use(cache, SYSTEM, PUBLIC)
    use(cache, [*SYSTEM, 1, 1, 1, 1], "a")
    use(cache, [*SYSTEM, 2, 2, 2, 2], "b")
    assert [prefix.preview for prefix in finish(list_prefixes(cache.tree, ("a",), 10)).prefixes] == [[1, 1, 1, 1]]
    assert len(finish(list_prefixes(cache.tree, None, 10)).prefixes) == 3
    tokens = array("i", [*SYSTEM, 2, 2, 2, 3, 3])
    lease = cache.match(tokens, "a")
    assert cache.explain(lease, tokens).reason is MissReason.NEVER_SEEN or 2 not in cache.explain(lease, tokens).nearest
    cache.release(lease)
    assert sum(cache.drop(("a",))) == 1
    assert use(cache, [*SYSTEM, 2, 2, 2, 2, 9], "b") == 20


def test_public_blocks_are_charged_to_nobody_elses_budget() -> None:
    cache = PrefixCache(64, SIZE, shares=Shares(retained=0.1))
    use(cache, SYSTEM, PUBLIC)
    assert cache.retentions.pin(array("i", SYSTEM), PUBLIC, 1.0, 1.0) == 16
    prompt = array("i", [*SYSTEM, *range(24)])
    use(cache, prompt, "a")
    assert cache.retentions.pin(prompt, "a") == 40
    assert cache.retentions.budget("a") == (6, 6, 6, 0)
    with pytest.raises(BudgetError):
        cache.retentions.pin(array("i", [*SYSTEM, 9, 9, 9, 9]), "a")
    assert cache.retentions.pin(array("i", SYSTEM), "b") == 16
    assert cache.retentions.budget("b") == (6, 0, 0, 6)
    lease = cache.match(prompt, "b")
    cache.retentions.retain(lease, 16, 60.0)
    assert cache.retentions.budget("b") == (6, 0, 0, 6)
    cache.release(lease)
    check_invariants(cache)


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(4, range(12)))
def test_no_block_serves_a_namespace_that_did_not_write_it_but_public_ones(seed: int) -> None:
    """A shadow of the KV memory says who wrote which prefix into a block; every lease is read against it."""
    draw = random.Random(seed)
    cache = PrefixCache(draw.randint(12, 40), SIZE, shares=Shares(retained=0.3))
    names = (PUBLIC, "a", "a/x", "b")
    content: dict[int, tuple[str, tuple[int, ...]]] = {}
    running: list[tuple[Lease, str, array[int]]] = []
    num_foreign = 0
    stems = [[draw.randint(0, 1) for _ in range(24)] for _ in range(3)]

    def prompt() -> list[int]:
        stem = draw.choice(stems)
        return [*stem[: draw.randint(0, 24)], *(draw.randint(0, 1) for _ in range(draw.randint(1, 8)))]

    def num_public_blocks() -> int:
        return sum(prefix.num_blocks for prefix in finish(list_prefixes(cache.tree, (PUBLIC,), 1000)).prefixes)

    def check(lease: Lease, name: str, tokens: array[int], blocks: int) -> int:
        foreign = 0
        for block in range(blocks):
            writer, written = content[lease.block_ids[block]]
            assert written == tuple(tokens[: (block + 1) * SIZE])
            assert writer in (name, PUBLIC)
            foreign += writer != name
        return foreign

    for step in range(1500):
        kind = draw.random()
        if kind < 0.3 and len(running) < 5:
            name = draw.choice(names)
            tokens = array("i", prompt())
            expected = cache.peek(tokens, name)
            lease = cache.match(tokens, name)
            assert lease.num_cached_tokens == expected
            num_foreign += check(lease, name, tokens, expected // SIZE)
            running.append((lease, name, tokens))
        elif kind < 0.75 and running:
            lease, name, tokens = draw.choice(running)
            covered = cache.advance(lease, tokens) // SIZE
            check(lease, name, tokens, covered)
            wanted = min(len(tokens) // SIZE, len(lease.block_ids) + draw.randint(0, 3))
            if wanted > len(lease.block_ids) and cache.extend(lease, wanted - len(lease.block_ids)) is None:
                continue
            for block in range(covered, len(lease.block_ids)):
                content[lease.block_ids[block]] = (name, tuple(tokens[: (block + 1) * SIZE]))
            computed = min(len(tokens), len(lease.block_ids) * SIZE)
            cache.free(cache.publish(lease, tokens, computed))
            check(lease, name, tokens, lease.num_published_tokens // SIZE)
        elif kind < 0.85 and running:
            lease, name, tokens = running.pop(draw.randrange(len(running)))
            cache.retentions.retain(lease, draw.randint(0, 28), draw.randint(1, 20))
            before = num_public_blocks()
            cache.release(lease, draw.choice((None, draw.randint(0, 28))))
            assert name == PUBLIC or num_public_blocks() == before
        elif kind < 0.9:
            cache.set_time(float(step // 10))
            cache.retentions.unpin(array("i", [0] * SIZE), draw.choice(names))
        elif kind < 0.95:
            try:
                cache.retentions.pin(array("i", prompt()[:12]), draw.choice(names))
            except BudgetError:
                continue
        elif kind < 0.97:
            name, before = draw.choice(names), num_public_blocks()
            sum(cache.drop((name,)))
            assert name == PUBLIC or num_public_blocks() == before
        check_invariants(cache)
    assert num_foreign > 20
    for lease, _, _ in running:
        cache.release(lease)
    evict_all(cache)
    check_invariants(cache)
    assert cache.counts.num_free == cache.num_blocks
