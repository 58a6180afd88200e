"""What others keep with cached prefixes."""

from array import array

import numpy as np
import pytest

from experts.signatures import encode_signature, merge_signatures
from radix_cache import LeaseError, PrefixCache

SIZE = 4


def tokens(count: int, first: int = 0) -> "array[int]":
    return array("i", range(first, first + count))


def publish(cache: PrefixCache, prompt: "array[int]", annotation: bytes, namespace: str = "") -> None:
    lease = cache.match(prompt, namespace)
    assert cache.extend(lease, -(-len(prompt) // SIZE) - len(lease.block_ids)) is not None
    cache.free(cache.publish(lease, prompt, len(prompt)))
    cache.annotate(lease, annotation)
    cache.release(lease)


def kept(cache: PrefixCache, prompt: "array[int]", namespace: str = "") -> list[tuple[int, bytes]]:
    lease = cache.match(prompt, namespace)
    found = cache.annotations(lease)
    cache.release(lease)
    return found


def test_a_hit_finds_what_was_kept_along_its_prefix_in_order() -> None:
    cache = PrefixCache(16, SIZE)
    publish(cache, tokens(8), b"head")
    publish(cache, tokens(8) + tokens(4, 50), b"one")
    publish(cache, tokens(8) + tokens(4, 70), b"other")
    assert kept(cache, tokens(8) + tokens(9, 50)) == [(8, b"head"), (4, b"one")]
    assert kept(cache, tokens(8) + tokens(9, 70)) == [(8, b"head"), (4, b"other")]
    assert kept(cache, tokens(20, 90)) == []


def test_both_parts_of_a_run_that_is_cut_keep_it() -> None:
    cache = PrefixCache(16, SIZE)
    publish(cache, tokens(12), b"run")
    assert kept(cache, tokens(5)) == [(4, b"run")]
    assert kept(cache, tokens(13)) == [(4, b"run"), (8, b"run")]


def test_it_goes_with_the_blocks_and_stays_in_its_namespace() -> None:
    cache = PrefixCache(16, SIZE)
    publish(cache, tokens(8), b"mine", "me")
    assert kept(cache, tokens(9), "you") == []
    assert kept(cache, tokens(9), "me") == [(8, b"mine")]
    cache.reset()
    publish(cache, tokens(8), b"", "me")
    assert kept(cache, tokens(9), "me") == []


def test_nothing_is_kept_where_nothing_was_published() -> None:
    cache = PrefixCache(16, SIZE)
    lease = cache.match(tokens(9))
    cache.annotate(lease, b"lost")
    assert cache.annotations(lease) == []
    cache.release(lease)
    for call in (lambda: cache.annotate(lease, b""), lambda: cache.annotations(lease)):
        with pytest.raises(LeaseError):
            call()


def test_the_expert_signature_of_a_prefix_is_merged_from_its_runs() -> None:
    cache = PrefixCache(16, SIZE)
    publish(cache, tokens(8), encode_signature(np.array([[1.0, 0.0]], np.float32)))
    publish(cache, tokens(12), encode_signature(np.array([[0.0, 1.0]], np.float32)))
    found = merge_signatures(kept(cache, tokens(13)), num_layers=1, num_experts=2)
    assert found.tolist() == [pytest.approx([2 / 3, 1 / 3])]
    publish(cache, tokens(8) + tokens(4, 60), encode_signature(np.array([[1.0, 0.0]], np.float32)))
    found = merge_signatures(kept(cache, tokens(8) + tokens(5, 60)), num_layers=1, num_experts=2)
    assert found.tolist() == [[1.0, 0.0]]
