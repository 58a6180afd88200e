"""Signatures of runs of tokens: their bytes, who makes them, and what is asked for by them."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from experts.memory.residency import Priority, ResidencyControl, lru
from experts.prediction.planning import SwitchRules
from experts.prediction.prefix_warmth import PrefixWarmth
from experts.routing.choices import RoutingShape
from experts.routing.signatures import MAX_SIGNATURE_BYTES, decode_signature, encode_signature, merge_signatures
from moeserve.engine.experts.observe import PrefixSigner
from moeserve.plan import Chunk, ChunkResult, SamplingParams, StepPlan, StepResult

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
SHAPE = RoutingShape(num_layers=2, num_experts=4, top_k=1)
EXPERT_BYTES = 10


def test_a_signature_of_many_experts_keeps_the_busiest_of_each_layer() -> None:
    rates = np.random.default_rng(1).random((58, 256), np.float32)
    data = encode_signature(rates)
    assert len(data) <= MAX_SIGNATURE_BYTES
    again = decode_signature(data, 58, 256)
    kept = again > 0
    assert kept.sum(axis=1).tolist() == [MAX_SIGNATURE_BYTES // (3 * 58)] * 58
    assert again[kept] == pytest.approx(rates[kept], abs=1 / 255)
    assert (np.where(kept, rates, 2).min(axis=1) >= np.where(kept, 0, rates).max(axis=1) - 1 / 255).all()
    assert merge_signatures([(3, data), (5, data)], 58, 256) == pytest.approx(again, abs=1e-6)


def test_a_signature_keeps_rates_to_a_byte_and_no_use_becomes_none():
    rates = np.array([[0.5, 0.0001], [0.0, 1.0]], np.float32)
    data = encode_signature(rates)
    assert len(data) == 4
    again = merge_signatures([(10, data)], 2, 2)
    assert again == pytest.approx(rates, abs=1 / 255)
    assert again[0, 1] > 0
    assert again[1, 0] == 0


def test_the_signatures_of_a_path_are_weighted_by_their_tokens():
    parts = [(30, encode_signature(np.array([[1.0, 0.0]]))), (10, encode_signature(np.array([[0.0, 1.0]])))]
    assert merge_signatures(parts, 1, 2).tolist() == [pytest.approx([0.75, 0.25])]
    with pytest.raises(ValueError, match="no tokens"):
        merge_signatures([], 1, 2)
    with pytest.raises(ValueError, match="2 bytes, expected 3"):
        merge_signatures(parts, 1, 3)


def test_bytes_of_other_sizes_are_no_signature() -> None:
    with pytest.raises(ValueError, match="expected 8"):
        decode_signature(b"\1" * 9, 2, 4)
    with pytest.raises(ValueError, match="more than 300 experts"):
        decode_signature(b"\xff" * len(encode_signature(np.zeros((20, 300), np.float32))), 20, 300)


def routed(plan: StepPlan) -> StepResult:
    """The token id is the expert that a token chooses, in each layer."""
    ids = [token for chunk in plan.chunks for token in chunk.token_ids]
    last = [chunk.token_ids[-1] for chunk in plan.chunks if chunk.sampling is not None]
    return StepResult(plan.step, [ChunkResult() for _ in plan.chunks], routing=bytes(ids + last))


def chunk(name: str, start: int, token_ids: list[int], sampled: bool = True) -> Chunk:
    return Chunk(name, array("i", token_ids), start, array("i", [0]), GREEDY if sampled else None)


def signer_of(block_size: int = 4) -> PrefixSigner:
    return PrefixSigner(SHAPE, block_size, keeps_routing=True)


def signatures(signer: PrefixSigner, *chunks: Chunk) -> list[list[list[float]] | None]:
    plan = StepPlan(1, list(chunks))
    result = routed(plan)
    signer.end(plan, result)
    return [
        None if found.annotation is None else decode_signature(found.annotation, 2, 4).round(2).tolist()
        for found in result.chunks
    ]


def test_a_chunk_of_a_prompt_is_described_by_its_rows_and_the_last_layer_by_those_it_computed() -> None:
    first, second = signatures(signer_of(), chunk("a", 0, [0, 0, 1, 2], sampled=False), chunk("b", 8, [3] * 5))
    assert first == [[0.5, pytest.approx(0.25, abs=0.01), pytest.approx(0.25, abs=0.01), 0], [0, 0, 0, 0]]
    assert second == [[0, 0, 0, 1], [0, 0, 0, 1]]


def test_a_chunk_that_ends_no_block_is_described_with_what_follows() -> None:
    signer = signer_of()
    assert signatures(signer, chunk("a", 0, [1, 1, 1], sampled=False)) == [None]
    assert signatures(signer, chunk("a", 3, [2, 2, 2])) == [[[0, 0.5, 0.5, 0], [0, 0, 1, 0]]]


def test_tokens_that_come_one_by_one_are_described_together_where_a_block_ends() -> None:
    signer = signer_of(block_size=10)
    found = [signatures(signer, chunk("a", position, [position % 2]))[0] for position in range(5, 85)]
    assert [5 + index for index, one in enumerate(found) if one] == [69]
    assert found[64] == [[pytest.approx(0.5, abs=0.01), pytest.approx(0.5, abs=0.01), 0, 0]] * 2


def test_what_a_request_saw_before_it_was_preempted_is_not_counted_twice() -> None:
    signer = signer_of()
    signatures(signer, chunk("a", 0, [1, 1, 1], sampled=False))
    assert signatures(signer, chunk("a", 0, [2, 2, 2, 2], sampled=False)) == [[[0, 0, 1, 0], [0, 0, 0, 0]]]


def test_requests_that_are_over_are_forgotten() -> None:
    signer = signer_of()
    for number in range(300):
        signatures(signer, chunk(f"r{number}", 0, [1]))
    assert len(signer._open) <= 128


def test_routing_that_nobody_else_wants_ends_here() -> None:
    plan = StepPlan(1, [chunk("a", 0, [1])])
    for keeps_routing in (True, False):
        result = routed(plan)
        PrefixSigner(SHAPE, 4, keeps_routing=keeps_routing).end(plan, result)
        assert (result.routing is not None) == keeps_routing


def control_of(num_slots: int) -> ResidencyControl:
    return ResidencyControl([num_slots] * 2, 4, EXPERT_BYTES, lambda layer: lru(4))


def drain(control: ResidencyControl) -> list[tuple[int, int, Priority]]:
    found = []
    while (transfer := control.next_transfer()) is not None:
        found.append((transfer.layer, transfer.expert, transfer.priority))
        control.moved(transfer, EXPERT_BYTES)
        control.finish(transfer)
    return found


def use(control: ResidencyControl, layer: int, experts: list[int]) -> None:
    control.access(layer, experts)
    drain(control)
    control.release(layer, experts)


def warmth_of(control: ResidencyControl, *rates: list[list[float]], **options: object) -> PrefixWarmth:
    warmth = PrefixWarmth(control, num_experts=4, **options)  # type: ignore[arg-type]
    for request, of_one in enumerate(rates):
        warmth.remember(request, np.array(of_one, np.float32))
    return warmth


def test_likely_absent_experts_of_all_layers_are_asked_for_behind_everything_else() -> None:
    control = control_of(4)
    warmth_of(control, [[0.9, 0.3, 0.5, 0.1], [0, 0, 0, 1]]).begin_step([0], may_ask=True)
    assert drain(control) == [(0, 0, Priority.SPECULATIVE), (0, 2, Priority.SPECULATIVE), (1, 3, Priority.SPECULATIVE)]


def test_nobody_makes_room_who_is_about_as_likely() -> None:
    control = control_of(2)
    use(control, 0, [0, 1])
    warmth = warmth_of(control, [[0.5, 0.45, 0.6, 0.1], [0] * 4])
    warmth.begin_step([0], may_ask=True)
    assert drain(control) == []
    warmth.remember(0, np.array([[0.5, 0.1, 0.6, 0.1], [0] * 4], np.float32))
    warmth.begin_step([0], may_ask=True)
    assert drain(control) == [(0, 2, Priority.SPECULATIVE)]
    assert control.layers[0].resident() == [0, 2]


def test_several_rows_and_requests_want_an_expert_together() -> None:
    control = control_of(4)
    warmth_of(control, [[0.3, 0, 0, 0.3], [0] * 4], [[0.3, 0, 0, 0], [0] * 4]).begin_step([0, 1], may_ask=True)
    assert [expert for _, expert, _ in drain(control)] == [0]


def test_a_rank_asks_for_what_it_holds() -> None:
    control = control_of(4)
    warmth = warmth_of(control, [[0.9, 0.9, 0.9, 0], [0] * 4], experts_here=lambda layer: {1, 3})
    warmth.begin_step([0], may_ask=True)
    assert [expert for _, expert, _ in drain(control)] == [1]


def test_a_layer_of_which_somebody_knows_more_is_left_alone() -> None:
    control = control_of(4)
    control.predict(0, [3], Priority.NEXT_LAYER)
    warmth_of(control, [[0.9] * 4] * 2).begin_step([0], may_ask=True)
    assert [(layer, expert) for layer, expert, _ in drain(control)] == [(0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_the_next_event_of_a_layer_is_asked_for_when_it_is_computed_until_the_first_decode() -> None:
    control = control_of(3)
    warmth = warmth_of(control, [[1, 0, 0, 0], [0, 0, 0, 1]])
    asked = []
    for rows, events in (([0, 0, 0], [[1, 2, 3], [0, 1, 2]]), ([0], [[0], [3]]), ([0], [[1], [1]])):
        warmth.begin_step(rows, may_ask=True)
        asked.append(drain(control))
        for layer, event in enumerate(events):
            use(control, layer, event)
            warmth.observed(layer, event)
            asked.append(drain(control))
        warmth.end_step(())
    at_begin, after_first, after_second = asked[0], asked[1], asked[2]
    assert [(layer, expert) for layer, expert, _ in at_begin] == [(0, 0), (1, 3)]
    assert after_first == []
    assert [(layer, expert) for layer, expert, _ in after_second] == [(0, 0)]
    assert [(layer, expert) for layer, expert, _ in asked[3]] == [(1, 3)]
    assert not any(asked[6:])
    assert warmth.is_idle


def test_who_may_not_ask_or_is_over_asks_for_nothing() -> None:
    control = control_of(4)
    warmth = warmth_of(control, [[0.9] * 4] * 2, [[0.9] * 4] * 2)
    warmth.begin_step([0], may_ask=False)
    warmth.end_step([1])
    assert warmth.is_idle
    assert drain(control) == []


def test_signatures_that_say_the_wrong_experts_are_left_alone_for_a_while() -> None:
    control = control_of(2)
    rules = SwitchRules(memory=4, trial=4, first_pause=10, longest_pause=10)
    warmth = warmth_of(control, switch=rules)
    asked_in = []
    for step in range(24):
        warmth.remember(step, np.array([[1, 0, 0, 0], [0] * 4], np.float32))
        use(control, 0, [2])
        use(control, 0, [3])
        warmth.begin_step([step], may_ask=True)
        if drain(control):
            asked_in.append(step)
        use(control, 0, [1])
        warmth.observed(0, [1])
        warmth.end_step(())
    assert asked_in == [0, 1, 2, 3, 14, 15, 16, 17]
