"""Why a match ended: reasons, places and texts' tokens, from prompts that were published and evicted by script."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from radix_cache import Miss, MissReason, PrefixCache
from radix_cache.evictions import EvictionRecord
from radix_cache.nodes import Node
from tests.support.cache_invariants import check_invariants
from tests.support.line_counts import num_lines

SIZE = 4
TAIL = list(range(100, 160))


def use(cache: PrefixCache, prompt: Sequence[int], namespace: str = "") -> Miss:
    """Serve a prompt as a request does: match, compute, publish, release. Return why it matched no further."""
    tokens = array("i", prompt)
    lease = cache.match(tokens, namespace)
    miss = cache.explain(lease, tokens)
    assert cache.extend(lease, -(-len(tokens) // cache.block_size) - len(lease.block_ids)) is not None
    cache.free(cache.publish(lease, tokens, len(tokens)))
    cache.release(lease)
    check_invariants(cache)
    return miss


def test_the_first_prompt_of_a_namespace_was_never_seen() -> None:
    assert use(PrefixCache(32, SIZE), TAIL) == Miss(MissReason.NEVER_SEEN, 0, 0)


@pytest.mark.parametrize(
    ("length", "matched", "reason"),
    [
        (16, 12, MissReason.LAST_TOKEN),
        (17, 16, MissReason.LAST_TOKEN),
        (18, 16, MissReason.BLOCK_BOUNDARY),
        (19, 16, MissReason.BLOCK_BOUNDARY),
        (3, 0, MissReason.BLOCK_BOUNDARY),
        (1, 0, MissReason.LAST_TOKEN),
    ],
)
def test_what_is_left_behind_a_full_match_is_named(length: int, matched: int, reason: MissReason) -> None:
    cache = PrefixCache(32, SIZE)
    use(cache, TAIL[:20])
    assert use(cache, TAIL[:length]) == Miss(reason, matched, matched)


def test_a_divergence_shows_the_newest_of_the_nearest_prefixes_around_its_place() -> None:
    cache = PrefixCache(64, SIZE)
    use(cache, [*TAIL[:20], 1, 1, 1, 1])
    use(cache, [*TAIL[:22], 2, 2, 2, 2])
    use(cache, [*TAIL[:22], 3, 3, 3, 3])
    miss = use(cache, [*TAIL[:22], 4, 4, 4, 4, 4])
    assert (miss.reason, miss.num_matched_tokens, miss.position) == (MissReason.DIVERGED, 20, 22)
    assert miss.nearest_start == 10
    # The fourth 3 is in no whole block.
    assert miss.nearest == [*TAIL[10:22], 3, 3]


def test_the_text_of_the_nearest_prefix_goes_on_over_the_end_of_its_run() -> None:
    cache = PrefixCache(64, SIZE)
    use(cache, [*TAIL[:8], *range(12), 7, 7, 7, 7])
    use(cache, [*TAIL[:8], *range(12), 8, 8, 8, 8])
    miss = use(cache, [*TAIL[:8], 50, 50, 50, 50, 50])
    assert miss.nearest[8:] == [*range(12)]


def test_the_end_of_what_is_cached_is_new_not_a_divergence() -> None:
    cache = PrefixCache(32, SIZE)
    use(cache, TAIL[:8])
    assert use(cache, TAIL[:20]) == Miss(MissReason.NEVER_SEEN, 8, 8)


def test_an_evicted_prefix_is_known_as_far_as_it_was_cached() -> None:
    cache = PrefixCache(16, SIZE)
    use(cache, TAIL[:24])
    use(cache, range(1000, 1060))
    assert cache.peek(array("i", TAIL[:24])) < 20
    miss = use(cache, TAIL[:40])
    assert miss.reason is MissReason.EVICTED
    assert miss.num_known_tokens == 24


def test_what_the_owner_dropped_counts_as_evicted() -> None:
    cache = PrefixCache(16, SIZE)
    use(cache, TAIL[:24], "a")
    assert sum(cache.drop(("a",))) == 6
    assert use(cache, TAIL[:24], "a").reason is MissReason.EVICTED


def test_evictions_are_found_through_splits_and_partial_cuts() -> None:
    cache = PrefixCache(12, SIZE)
    use(cache, TAIL[:24])
    use(cache, [*TAIL[:8], 1, 1, 1, 1, 1])
    for salt in range(3):
        use(cache, range(1000 + 100 * salt, 1040 + 100 * salt))
    assert use(cache, TAIL[:25]).num_known_tokens == 24


def test_a_record_that_was_overrun_says_not_known_for_that_account_alone() -> None:
    of_account = 2**14  # blocks that are recorded
    cache = PrefixCache(of_account + 12, 1)
    prompt = array("i", range(of_account + 6))
    use(cache, prompt, "a")
    use(cache, range(100_000, 100_012 + of_account), "a")
    # The head of a prompt is evicted last, so the record knows it longest.
    assert cache.explain(cache.match(prompt, "a"), prompt).num_known_tokens == of_account
    use(cache, range(200_000, 200_012 + of_account), "b")
    assert use(cache, prompt, "a").reason is MissReason.NOT_KNOWN
    assert use(cache, prompt, "c").reason is MissReason.NEVER_SEEN


def test_evictions_are_recorded_once_the_account_has_asked_and_not_known_before() -> None:
    cache = PrefixCache(16, SIZE)
    for account in ("a", "b"):
        for start in (0, 1000, 2000):
            lease = cache.match(array("i", range(start, start + 60)), account)
            assert cache.extend(lease, 15) is not None
            cache.publish(lease, array("i", range(start, start + 60)), 60)
            cache.release(lease)
    assert use(cache, range(60), "a").reason is MissReason.NOT_KNOWN
    use(cache, range(1000, 1060), "b")
    assert use(cache, range(60), "a") == Miss(MissReason.EVICTED, 4, 4, 56)
    # Earlier evictions stay unknown.
    assert use(cache, range(1000, 1060), "a").reason is MissReason.NOT_KNOWN
    assert use(cache, range(60), "c").reason is MissReason.NEVER_SEEN


def test_another_salt_of_the_account_is_named_where_it_may_be_and_another_account_never() -> None:
    cache = PrefixCache(64, SIZE)
    use(cache, TAIL[:24], "a/salt")
    tokens = array("i", TAIL[:24])
    told = [
        cache.explain(cache.match(tokens, namespace), tokens, tells_salts=tells_salts)
        for namespace, tells_salts in (("a", True), ("a", False), ("b", True))
    ]
    assert told[0] == Miss(MissReason.OTHER_SALT, 0, 0, 20)
    # Salts keep their prefixes from each other: only the operator's key learns of both.
    assert told[1:] == [Miss(MissReason.NEVER_SEEN, 0, 0)] * 2


def test_a_head_that_changes_with_every_request_is_found_with_its_place_and_length() -> None:
    cache = PrefixCache(128, SIZE)
    heads = ([7, 1, 1, 1], [7, 2, 2], [7, 3, 3, 3, 3, 3])
    misses = [use(cache, [*head, *TAIL]) for head in heads]
    assert [miss.reason for miss in misses] == [
        MissReason.NEVER_SEEN,
        MissReason.DIVERGED,
        MissReason.VOLATILE_HEAD,
    ]
    assert (misses[2].position, misses[2].num_volatile_tokens, misses[2].num_witnesses) == (1, 5, 2)


def test_prompts_that_differ_for_good_have_no_volatile_head() -> None:
    cache = PrefixCache(128, SIZE)
    for start in (1000, 2000, 3000, 4000):
        miss = use(cache, [*TAIL[:9], *range(start, start + 60)])
    assert miss.reason is MissReason.DIVERGED


def test_a_request_that_bypasses_the_cache_says_so() -> None:
    cache = PrefixCache(16, SIZE)
    tokens = array("i", TAIL[:8])
    lease = cache.match(tokens, use_cache=False)
    assert cache.explain(lease, tokens).reason is MissReason.BYPASSED
    assert use(PrefixCache(16, SIZE, caching=False), TAIL[:9]).reason is MissReason.BYPASSED


def test_explaining_changes_nothing() -> None:
    runs = []
    for explains in (True, False):
        cache = PrefixCache(16, SIZE)
        ids = []
        for number in range(30):
            tokens = array("i", [*TAIL[: number % 7 * 4], *range(number, number + 9)])
            lease = cache.match(tokens)
            if explains:
                cache.explain(lease, tokens)
            cache.extend(lease, -(-len(tokens) // SIZE) - len(lease.block_ids))
            cache.free(cache.publish(lease, tokens, len(tokens)))
            ids.append(lease.block_ids.tolist())
            cache.release(lease)
        runs.append(ids)
    assert runs[0] == runs[1]


def test_a_record_ends_a_while_after_the_last_report_and_begins_anew() -> None:
    cache = PrefixCache(16, SIZE)
    cache.set_time(0.0)
    use(cache, TAIL[:24], "a")
    cache.set_time(599.0)
    use(cache, range(1000, 1060), "a")
    assert use(cache, TAIL[:24], "a").reason is MissReason.EVICTED
    cache.set_time(599.0 + 601.0)
    assert use(cache, range(1000, 1060), "a").reason is MissReason.NOT_KNOWN
    assert use(cache, TAIL[:24], "a").reason is MissReason.EVICTED


def test_the_records_of_all_accounts_are_bounded_together() -> None:
    record = EvictionRecord(4 * SIZE, 100)
    nodes = [
        Node(f"a{number}", number, None, bytearray(4 * SIZE * 40), array("i", range(40))) for number in range(1000)
    ]
    for node in nodes:
        record.begin(node.namespace)
        parent = Node(node.namespace, 0, None, bytearray(), array("i"))
        node.parent = parent
        record.add(node, 40)
        assert record.num_recorded <= 100
    assert record.num_recorded == 100
    assert [record.is_incomplete(f"a{number}") for number in (0, 995, 996, 999)] == [True] * 4
    record.set_time(0.0)
    record.begin("late")
    record.set_time(601.0)
    assert record.num_recorded == 0


def test_the_work_of_a_report_does_not_grow_with_the_length_of_the_prefixes_beside() -> None:
    counts = []
    for length in (256, 4096):
        cache = PrefixCache(40_000, SIZE)
        for number in range(30):
            tokens = array("i", [9] * SIZE + [10 + number] * SIZE + list(range(length)))
            lease = cache.match(tokens)
            cache.extend(lease, -(-len(tokens) // SIZE) - len(lease.block_ids))
            cache.publish(lease, tokens, len(tokens))
            cache.release(lease)
        tokens = array("i", [9] * SIZE + [5] * SIZE + list(range(length)))
        lease = cache.match(tokens)
        assert lease.num_cached_tokens == SIZE
        counts.append(num_lines(lambda cache=cache, lease=lease, tokens=tokens: cache.explain(lease, tokens)))
    assert counts[1] <= 1.1 * counts[0]
