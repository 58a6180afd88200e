"""What the cost model of ranks says: orders that hold whatever its constants are, and bytes that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeserve.engine.ways import (
    ETHERNET,
    NVLINK,
    PCIE,
    Estimate,
    Link,
    ModelCosts,
    RankMachine,
    Way,
    advised,
    estimates_of,
    ways_of,
)

GIB = 2**30
MIXTURE = ModelCosts(48, 2048, (2, 4, 8), 4, GIB // 2, 3 * GIB, 96 * 1024, 48, 128, 8, 9 * 2**20)
DENSE = ModelCosts(64, 5120, (2, 4, 8), 8, GIB, 60 * GIB, 256 * 1024)
MACHINE = RankMachine(70 * GIB, 3e12, 50e-6)
FREE = Link("free", 1e30, 0.0)


def speed(way: Way, model: ModelCosts = DENSE, link: Link = FREE, num_requests: int = 1, context: int = 0) -> float:
    return way.tokens_per_second(model, MACHINE, link, num_requests, context)


def test_a_single_request_is_no_faster_on_stages_and_many_are_as_much_as_there_are_stages() -> None:
    alone = speed(Way())
    assert speed(Way(stages=4)) == pytest.approx(alone)
    assert speed(Way(stages=4), num_requests=4) == pytest.approx(4 * alone)
    assert speed(Way(stages=4), link=ETHERNET) < alone


def test_shards_read_at_once_and_pay_two_sums_in_each_layer() -> None:
    seconds = 1 / speed(Way(shards=4))
    read = DENSE.others_bytes / MACHINE.bytes_per_second
    assert seconds == pytest.approx(read / 4 + 64 * MACHINE.layer_s)
    paid = 1 / speed(Way(shards=4), link=PCIE) - seconds
    assert paid == pytest.approx(2 * 64 * (PCIE.seconds + 3 * 5120 * 4 / PCIE.bytes_per_second))


def test_a_dense_model_takes_shards_over_a_fast_link_and_stages_over_a_slow_one() -> None:
    for link, expected in ((NVLINK, Way(shards=4)), (replace(ETHERNET, seconds=2e-3), Way(stages=4))):
        taken = advised(estimates_of(DENSE, MACHINE, link, 4, 1, 0))
        assert taken is not None
        assert taken[0].way == expected


def test_experts_over_ranks_hold_all_other_weights_each_and_serve_many_requests() -> None:
    way = Way(experts=4)
    experts = 48 * 128 * MIXTURE.expert_bytes
    assert way.rank_bytes(MIXTURE) == MIXTURE.others_bytes + MIXTURE.embedding_bytes + experts // 4
    assert speed(way, MIXTURE, NVLINK, 256, 1000) > 2 * speed(Way(), MIXTURE, NVLINK, 256, 1000)


def test_all_ways_use_all_ranks_and_none_cuts_what_cannot_be_cut() -> None:
    assert set(ways_of(DENSE, 4)) == {Way(stages=4), Way(shards=4)}
    two, both = Way(stages=2, experts=2), Way(experts=2, shards=2)
    assert set(ways_of(MIXTURE, 4)) == {Way(stages=4), two, Way(experts=4), both, Way(shards=4)}
    assert set(ways_of(replace(MIXTURE, shard_counts=(3,), num_layers=3), 4)) == {Way(experts=4), two}
    assert list(ways_of(DENSE, 1)) == [Way()]


def test_ranks_that_cannot_have_equally_many_experts_do_not_share_them() -> None:
    assert set(ways_of(replace(MIXTURE, shard_counts=(2, 4)), 3)) == {Way(stages=3)}
    # Four experts are on two ranks, and not on the eight of four groups.
    few = replace(MIXTURE, num_experts=4, shard_counts=(2, 4))
    assert set(ways_of(few, 8)) == {Way(stages=8), Way(stages=4, experts=2), Way(stages=2, experts=4)}


def test_heads_of_keys_and_values_are_not_cut() -> None:
    assert [Way(shards=count).kv_bytes(MIXTURE) for count in (2, 4, 8)] == [48 * 1024, 24 * 1024, 24 * 1024]
    assert Way(stages=4).kv_bytes(MIXTURE) == 24 * 1024


def test_what_does_not_fit_is_not_advised() -> None:
    small = replace(MACHINE, num_bytes=18 * GIB)
    estimates = estimates_of(DENSE, small, NVLINK, 4, 16, 8192)
    assert {one.way: one.fits for one in estimates} == {Way(stages=4): True, Way(shards=4): True}
    assert advised(estimates_of(DENSE, replace(small, num_bytes=15 * GIB), NVLINK, 4, 16, 8192)) is None
    flags = ("--pipeline-parallel-size", "2", "--expert-parallel-size", "2")
    assert Way(stages=2, experts=2).flags == flags


def test_of_equally_fast_ways_the_one_that_is_better_otherwise_is_advised() -> None:
    a, b = Estimate(Way(stages=2), 0, True, 100.0, 500.0), Estimate(Way(shards=2), 0, True, 103.0, 300.0)
    assert advised([a, b]) == (a, a)
