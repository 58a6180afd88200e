"""KV of turns that have called tools: retained for a time, within the account's budget, behind what clients retain."""

from __future__ import annotations

from array import array

from moeserve.plan import Asked, FinishReason, Request, SamplingParams, Terms
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.tool_waits import RETAINED_S, ToolWaits
from radix_cache import PrefixCache
from tests.support.cache_invariants import check_invariants

SIZE = 4


class Turns:
    """Turns of conversations over a tree without a scheduler, of four blocks each unless a call says more."""

    def __init__(self, num_blocks: int = 24) -> None:
        self.cache = PrefixCache(num_blocks, SIZE)
        self.waits = ToolWaits([self.cache])

    def compute(self, tokens: array[int], retained_for: float = 0.0) -> None:
        """Cache a prefix, which its client retains for a time."""
        lease = self.cache.match(tokens, "key")
        assert self.cache.extend(lease, len(tokens) // SIZE - len(lease.block_ids)) is not None
        self.cache.free(self.cache.publish(lease, tokens, len(tokens)))
        if retained_for:
            self.cache.retentions.retain(lease, len(tokens), retained_for)
        self.cache.release(lease)

    def end(self, first: int, num_tokens: int = 4 * SIZE, *, has_tools: bool = True, share: float | None = None) -> str:
        """End a request that has computed its tokens, and return its id."""
        tokens = array("i", range(first, first + num_tokens))
        self.compute(tokens)
        request = Request(f"{first}", tokens, SamplingParams(1), "key", asked=Asked(has_tools=has_tools))
        request.terms = Terms(retained=share)
        self.waits.left(RequestOutput(request, finish_reason=FinishReason.STOP))
        return request.request_id

    def call(self, first: int, num_tokens: int = 4 * SIZE, *, share: float | None = None) -> None:
        """End a request whose answer calls tools."""
        self.waits.turned(self.end(first, num_tokens, share=share))
        check_invariants(self.cache)

    def fill(self, num_blocks: int) -> None:
        """Use blocks for something else that is not kept."""
        lease = self.cache.match(array("i", [9]), "key")
        assert self.cache.extend(lease, num_blocks) is not None
        self.cache.release(lease)

    def cached(self, first: int, num_tokens: int = 4 * SIZE) -> int:
        return self.cache.peek(array("i", [*range(first, first + num_tokens), 1]), "key")


def test_a_turn_that_called_tools_outlives_later_prompts_and_others_do_not() -> None:
    turns = Turns()
    turns.call(100)
    turns.end(200)
    turns.end(300, has_tools=False)
    turns.waits.turned("300")
    turns.fill(21)
    # The last block of a prefix is computed again, for its logits.
    assert (turns.cached(100), turns.cached(200), turns.cached(300)) == (12, 0, 0)


def test_a_turn_whose_tools_take_longer_goes_like_any_other_prefix() -> None:
    turns = Turns()
    turns.cache.set_time(1.0)
    turns.call(100)
    turns.cache.set_time(RETAINED_S)
    assert turns.cache.retentions.num_blocks == 3
    turns.cache.set_time(RETAINED_S + 1.0)
    assert turns.cache.retentions.num_blocks == 0
    turns.end(200)
    turns.fill(20)
    assert (turns.cached(100), turns.cached(200)) == (0, 16)


def test_what_clients_retain_does_not_give_way_but_earlier_turns_do() -> None:
    turns = Turns()  # its account may retain 12 blocks
    turns.compute(array("i", range(500, 500 + 6 * SIZE)), retained_for=1000.0)
    turns.call(100)
    turns.call(200)
    assert turns.cache.retentions.num_blocks == 12
    turns.call(300)
    assert turns.cache.retentions.num_blocks == 12
    turns.fill(24)
    assert turns.cached(500, 6 * SIZE) == 0
    turns = Turns()
    turns.call(100)
    turns.compute(array("i", range(500, 500 + 12 * SIZE)), retained_for=1000.0)
    turns.call(200)
    assert turns.cache.retentions.num_blocks == 12
    turns.fill(12)
    assert (turns.cached(500, 12 * SIZE), turns.cached(100), turns.cached(200)) == (12 * SIZE, 0, 0)


def test_a_turn_that_is_too_long_for_the_budget_of_its_key_is_retained_in_part() -> None:
    turns = Turns()
    turns.call(100, 16 * SIZE)
    assert turns.cache.retentions.num_blocks == 12
    turns = Turns()
    turns.call(100, 16 * SIZE, share=0.25)
    assert turns.cache.retentions.num_blocks == 6


def test_a_turn_that_continues_a_retained_one_begins_its_time_anew() -> None:
    turns = Turns()
    turns.call(100)
    turns.cache.set_time(RETAINED_S - 1.0)
    lease = turns.cache.match(array("i", range(100, 100 + 6 * SIZE)), "key")
    turns.cache.retentions.record_hit(lease, 3 * SIZE)
    turns.cache.release(lease)
    turns.cache.set_time(RETAINED_S + 1.0)
    assert turns.cache.retentions.num_blocks == 3


def test_calls_of_unknown_requests_and_of_the_oldest_ended_ones_are_ignored() -> None:
    turns = Turns(num_blocks=2000)
    turns.waits.turned("never seen")
    for number in range(200):
        turns.end(1000 + 100 * number)
    turns.waits.turned("1000")
    assert turns.cache.retentions.num_blocks == 0
    turns.waits.turned(f"{1000 + 100 * 199}")
    turns.waits.turned(f"{1000 + 100 * 199}")
    assert turns.cache.retentions.num_blocks == 3
