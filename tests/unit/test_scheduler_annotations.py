"""What ranks want kept with cached prefixes comes back with the requests that find them, and means nothing here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from moeserve.plan import MAX_ANNOTATION_BYTES, Chunk, ChunkResult, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.scheduler import Scheduler
from radix_cache import PrefixCache

SIZE = 4


def joined(parts: Sequence[tuple[int, bytes]]) -> bytes:
    return b" ".join(b"%d:%s" % part for part in parts)


class Service:
    """A scheduler whose rank draws token 99 and annotates each chunk that ends a block with its positions."""

    def __init__(self, merge=joined, num_blocks=32, budget=8, run_ahead=False):
        self.caches = [PrefixCache(num_blocks, SIZE)]
        self.scheduler = Scheduler(
            self.caches,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_num_queued_reqs=9,
            max_model_len=num_blocks * SIZE,
            run_ahead=run_ahead,
            merge_annotations=merge,
        )
        self.chunks: list[Chunk] = []

    def add(self, name: str, prompt: list[int], max_tokens: int = 1, namespace: str = "") -> None:
        self.scheduler.add(Request(name, array("i", prompt), SamplingParams(max_tokens=max_tokens), namespace))

    def step(self) -> bool:
        plans = self.scheduler.schedule()
        if plans is not None:
            self.chunks += plans[0].chunks
            self.scheduler.commit(plans, [self.result(plans[0])])
        return plans is not None

    def run(self) -> None:
        while self.step():
            continue
        self.scheduler.check_idle()

    def result(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, [self.computed(chunk) for chunk in plan.chunks])

    def computed(self, chunk: Chunk) -> ChunkResult:
        end = chunk.start + len(chunk.token_ids)
        note = b"%d-%d" % (chunk.start, end) if end // SIZE > chunk.start // SIZE else None
        return ChunkResult(None if chunk.sampling is None else 99, annotation=note)

    def carried(self, name: str) -> list[bytes | None]:
        return [chunk.annotation for chunk in self.chunks if chunk.request_id == name]


def test_the_first_chunk_behind_a_hit_carries_what_is_kept_along_it_and_no_other_does() -> None:
    service = Service()
    service.add("a", list(range(18)))
    service.run()
    service.add("b", list(range(16)) + [50] * 12, max_tokens=2)
    service.run()
    assert service.carried("a") == [None, None, None]
    assert service.carried("b") == [b"8:0-8 8:8-16", None, None]


def test_a_prefix_that_is_cut_keeps_it_in_both_parts() -> None:
    service = Service()
    service.add("a", list(range(9)))
    service.run()
    service.add("b", [*range(4), 50])
    service.run()
    service.add("c", list(range(9)))
    service.run()
    assert service.carried("b") == [b"4:0-8"]
    assert service.carried("c") == [b"4:0-8 4:0-8"]


def test_a_tail_that_fills_no_block_does_not_replace_what_is_kept() -> None:
    service = Service()
    service.add("a", list(range(8)))
    service.run()
    service.computed = lambda chunk: ChunkResult(None if chunk.sampling is None else 99, annotation=b"tail")  # type: ignore[method-assign]
    service.add("b", [*range(8), 50])
    service.run()
    service.add("c", [*range(8), 60])
    service.run()
    assert service.carried("c") == [b"8:0-8"]


def test_what_is_too_much_to_travel_stays() -> None:
    for size, expected in ((MAX_ANNOTATION_BYTES, True), (MAX_ANNOTATION_BYTES + 1, False)):
        service = Service(merge=lambda _, size=size: bytes(size))
        service.add("a", list(range(9)))
        service.run()
        service.add("b", list(range(9)))
        service.run()
        assert [note is not None for note in service.carried("b")] == [expected]


def test_without_anybody_to_merge_nothing_is_kept_or_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(PrefixCache, "annotate", refuse)
    monkeypatch.setattr(PrefixCache, "annotations", refuse)
    service = Service(merge=None)
    for name in ("a", "b"):
        service.add(name, list(range(9)))
        service.run()
        assert service.carried(name) == [None] * len(service.carried(name))


def test_it_goes_with_its_blocks_and_does_not_cross_namespaces() -> None:
    service = Service()
    service.add("a", list(range(9)), namespace="me")
    service.run()
    service.add("b", list(range(9)), namespace="you")
    service.run()
    assert service.carried("b") == [None, None]
    service.caches[0].reset()
    service.add("c", list(range(9)), namespace="me")
    service.run()
    assert service.carried("c") == [None, None]


def test_who_is_aborted_or_fails_leaves_nothing_behind() -> None:
    service = Service()
    service.add("a", list(range(9)))
    assert service.step()
    ended = service.scheduler.abort("a")
    assert ended is not None
    service.run()
    service.add("b", list(range(9)))
    service.computed = lambda chunk: ChunkResult(error="failed", annotation=b"of what failed")  # type: ignore[method-assign]
    service.run()
    assert service.carried("b") == [b"8:0-8"]
    service.caches[0].reset()
    assert service.caches[0].num_free == service.caches[0].num_blocks


def test_a_preempted_request_hears_of_its_own_prefix_when_it_runs_again() -> None:
    service = Service(num_blocks=6, budget=12)
    service.add("a", list(range(8)), max_tokens=8)
    service.add("b", list(range(40, 48)), max_tokens=8)
    service.run()
    assert service.scheduler.counters.preemptions > 0
    again = [note for note in service.carried("b") if note is not None]
    assert again
    assert all(note.startswith(b"4:0-4") for note in again)


def test_a_plan_that_runs_ahead_does_not_carry_it_twice() -> None:
    service = Service(run_ahead=True)
    service.add("a", list(range(9)))
    service.run()
    service.add("b", list(range(9)), max_tokens=4)
    first = service.scheduler.schedule()
    second = service.scheduler.schedule()
    assert first is not None
    assert second is not None
    assert [plans[0].chunks[0].annotation for plans in (first, second)] == [b"8:0-8", None]
    for plans in (first, second):
        service.scheduler.commit(plans, [service.result(plans[0])])
    service.run()
