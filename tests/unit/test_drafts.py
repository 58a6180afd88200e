"""Draft tokens in plans: with any drafts, right or wrong, requests get the tokens of an undisturbed run."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from moeserve.config import SpeculativeConfig
from moeserve.plan import Request, SamplingParams
from moeserve.scheduling.draft_sources import Guess
from moeserve.scheduling.drafting import Drafting
from tests.support.kv_oracle import draw
from tests.support.parameters import pairs
from tests.support.scheduler_simulation import VOCAB_SIZE, Simulation
from tests.unit.test_scheduler_oracle import converse, make_conversations

MOST_DRAFTS = 5


class KnowingDrafting(Drafting):
    """Guesses as the oracle draws, but now and then wrongly, and now and then not at all."""

    def __init__(self, random: Random, share_right: float) -> None:
        super().__init__(SpeculativeConfig("suffix", MOST_DRAFTS))
        self._random, self._share_right = random, share_right

    def _guesses(self, request: Request, known: object, memory: object) -> list[Guess]:
        tokens, sampling = request.token_ids[:], request.sampling
        num_known = len(tokens)
        for _ in range(self._random.randrange(MOST_DRAFTS + 1)):
            is_banned = len(tokens) - request.num_prompt_tokens < sampling.min_tokens
            banned = sampling.stop_token_ids if is_banned else ()
            token = draw(tokens, sampling.seed, VOCAB_SIZE, banned)
            tokens.append(token if self._random.random() < self._share_right else (token + 1) % VOCAB_SIZE)
        guess = self._until_stop(request, tokens[num_known:])
        return [Guess("own", 9, guess)] if guess else []


@pytest.mark.parametrize(("block_size", "depth", "share_right"), pairs([1, 3, 4, 16], [0, 1], [0.0, 0.7, 1.0]))
def test_conversations_with_drafts_get_the_tokens_of_an_undisturbed_run(
    block_size: int, depth: int, share_right: float
) -> None:
    tiny, roomy = -(-63 // block_size) + 1, 1000 // block_size
    for number, (budget, num_blocks, run_ahead) in enumerate(product([8, 13, 64], [tiny, roomy], [False, True])):
        random = Random(f"{number} {block_size} {depth} {share_right}")
        simulation = Simulation(
            num_blocks=num_blocks,
            block_size=block_size,
            budget=budget,
            depth=depth,
            run_ahead=run_ahead and depth > 0,
            drafting=KnowingDrafting(random, share_right),
            most_drafts=MOST_DRAFTS,
        )
        converse(simulation, make_conversations(random), random)
        counters = simulation.scheduler.draft_counters
        assert counters is not None
        assert counters.chunks > 0
        assert (sum(counters.accepted) > 0) == (share_right > 0)
        if share_right == 1.0:
            assert sum(counters.accepted) > 0.5 * counters.tokens


def test_drafts_that_are_right_take_fewer_steps() -> None:
    steps = {}
    for share_right in (0.0, 1.0):
        simulation = Simulation(
            num_blocks=32, block_size=4, drafting=KnowingDrafting(Random(1), share_right), most_drafts=MOST_DRAFTS
        )
        simulation.add("r", [1, 2, 3], SamplingParams(max_tokens=40))
        simulation.run()
        simulation.check_all_done()
        steps[share_right] = len(simulation.plans)
    assert steps[0.0] == 40
    assert steps[1.0] < 20


def test_what_followed_a_prompt_is_drafted_for_its_own_namespace_alone() -> None:
    steps = []
    simulation = Simulation(
        num_blocks=64,
        block_size=4,
        drafting=Drafting(SpeculativeConfig("suffix", MOST_DRAFTS)),
        most_drafts=MOST_DRAFTS,
    )
    for name, namespace in [("first", "a"), ("again", "a"), ("other", "b")]:
        num_before = len(simulation.plans)
        simulation.add(name, [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=40, seed=7), namespace=namespace)
        simulation.run()
        steps.append(len(simulation.plans) - num_before)
    simulation.check_all_done()
    assert steps[0] == steps[2]
    assert steps[1] < steps[0] / 3
