"""Draft tokens in plans: with any drafts, right or wrong, requests get the tokens of an undisturbed run."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.plan import Asked, ChunkResult, Request, SamplingParams, StepResult
from moeserve.scheduling.draft_sources import Guess, PredictedText
from moeserve.scheduling.drafting import Drafting
from moeserve.scheduling.request_states import StatePolicy
from moeserve.scheduling.scheduler import Scheduler
from moeserve.settings.drafts import SpeculativeConfig
from radix_cache import PrefixCache
from tests.support.examples import examples
from tests.support.kv_oracle import draw, undisturbed
from tests.support.parameters import first, pairs
from tests.support.scheduler_simulation import VOCAB_SIZE, Simulation
from tests.unit.test_scheduler_oracle import ACTION, SETUP, Script, converse, make_conversations

MOST_DRAFTS = 5


class KnowingDrafting(Drafting):
    """Guesses as the oracle draws, but now and then wrongly, and now and then not at all."""

    def __init__(self, random: Random, share_right: float) -> None:
        super().__init__(SpeculativeConfig("suffix", MOST_DRAFTS))
        self._random, self._share_right = random, share_right

    def _guesses(self, request: Request, known: object, memory: object, predicted: object) -> Iterator[Guess]:
        tokens, sampling = request.token_ids[:], request.sampling
        num_known = len(tokens)
        for _ in range(self._random.randrange(MOST_DRAFTS + 1)):
            is_banned = len(tokens) - request.num_prompt_tokens < sampling.min_tokens
            banned = sampling.stop_token_ids if is_banned else ()
            token = draw(tokens, sampling.seed, VOCAB_SIZE, banned)
            tokens.append(token if self._random.random() < self._share_right else (token + 1) % VOCAB_SIZE)
        yield Guess("own", 9, tokens[num_known:])


@pytest.mark.parametrize("half", first(1, [0, 1]))
@pytest.mark.parametrize(("block_size", "depth", "share_right"), pairs([1, 3, 4, 16], [0, 1], [0.0, 0.7, 1.0]))
def test_conversations_with_drafts_get_the_tokens_of_an_undisturbed_run(
    block_size: int, depth: int, share_right: float, half: int
) -> None:
    tiny, roomy = -(-63 // block_size) + 1, 1000 // block_size
    settings = enumerate(product([tiny, roomy], [False, True], [8, 13, 64]))
    for number, (num_blocks, run_ahead, budget) in list(settings)[half::2]:
        random = Random(f"{number} {block_size} {depth} {share_right}")
        drafting = KnowingDrafting(random, share_right)
        simulation = Simulation(
            num_blocks=num_blocks,
            block_size=block_size,
            budget=budget,
            depth=depth,
            run_ahead=run_ahead and depth > 0,
            drafting=drafting,
            most_drafts=MOST_DRAFTS,
        )
        converse(simulation, make_conversations(random), random)
        counters = drafting.counters
        assert counters.chunks > 0
        assert (sum(counters.accepted) > 0) == (share_right > 0)
        if share_right == 1.0:
            assert sum(counters.accepted) > 0.5 * counters.tokens


@pytest.mark.slow
@pytest.mark.parametrize("half", first(1, [0, 1]))
@pytest.mark.parametrize(("block_size", "depth", "share_right"), pairs([1, 3, 4, 16], [0, 1], [0.0, 0.7, 1.0]))
def test_conversations_with_drafts_and_recurrent_states_get_the_tokens_of_an_undisturbed_run(
    block_size: int, depth: int, share_right: float, half: int
) -> None:
    settings = enumerate(product([False, True], [4, 7, 16], [0, 2, 30]))
    for number, (run_ahead, slots, snapshots) in list(settings)[half::2]:
        random = Random(f"{number} {block_size} {depth} {share_right}")
        drafting = KnowingDrafting(random, share_right)
        simulation = Simulation(
            num_blocks=random.choice([-(-63 // block_size) + 1, 1000 // block_size]),
            block_size=block_size,
            budget=random.choice([8, 13, 64]),
            depth=depth,
            run_ahead=run_ahead and depth > 0,
            states=StatePolicy(slots, random.choice([1, 4]), random.choice([8, 16])),
            num_snapshots=snapshots,
            drafting=drafting,
            most_drafts=MOST_DRAFTS,
        )
        converse(simulation, make_conversations(random), random)
        counters = drafting.counters
        if slots == 16:
            assert counters.chunks > 0
        assert share_right > 0 or not sum(counters.accepted)
        if share_right == 1.0:
            assert sum(counters.accepted) >= 0.5 * counters.tokens


@pytest.mark.slow
@examples(1.0)
@given(SETUP, st.lists(ACTION, min_size=20, max_size=50), st.sets(st.integers(0, 30), max_size=2), st.integers(0, 99))
def test_random_scripts_with_drafts_leave_every_output_and_every_block_right(
    setup: dict[str, object], actions: list[tuple[str, object]], faulty: set[int], seed: int
) -> None:
    random = Random(seed)
    drafting = KnowingDrafting(random, random.choice([0.3, 0.8, 1.0]))
    script = Script({**setup, "drafting": drafting, "most_drafts": MOST_DRAFTS})
    script.simulation.oracle.fails = lambda chunk: int(chunk.request_id) in faulty and chunk.start > 10
    for name, argument in actions:
        script.act(name, argument)
    script.simulation.run()
    script.simulation.check_all_done()


@pytest.mark.parametrize("states", [None, StatePolicy(4, 4, 16)])
def test_drafts_that_are_right_take_fewer_steps(states: StatePolicy | None) -> None:
    steps = {}
    for share_right in (0.0, 1.0):
        simulation = Simulation(
            num_blocks=32,
            block_size=4,
            drafting=KnowingDrafting(Random(1), share_right),
            most_drafts=MOST_DRAFTS,
            states=states,
        )
        simulation.add("r", [1, 2, 3], SamplingParams(max_tokens=40))
        simulation.run_and_check()
        steps[share_right] = len(simulation.plans)
    assert steps[0.0] == 40
    assert steps[1.0] < 20


def test_a_wrong_draft_costs_the_tokens_since_the_last_state_and_no_step() -> None:
    policy = StatePolicy(4, 4, 16)
    simulation = Simulation(
        num_blocks=32, block_size=4, drafting=KnowingDrafting(Random(1), 0.8), most_drafts=5, states=policy
    )
    simulation.add("r", [1, 2, 3], SamplingParams(max_tokens=60))
    simulation.run_and_check()
    chunks = [chunk for plan in simulation.plans for chunk in plan.chunks]
    again = [chunk for chunk in chunks[1:] if len(chunk.token_ids) - chunk.num_drafts > 1]
    assert again
    # Nothing is computed again that was computed before the last boundary.
    assert all(len(chunk.token_ids) <= 16 for chunk in chunks)
    assert len(chunks) < 50


def test_a_draft_leaves_the_last_free_state_to_a_request_that_waits() -> None:
    simulation = Simulation(
        num_blocks=64,
        block_size=4,
        max_num_seqs=3,
        drafting=KnowingDrafting(Random(1), 1.0),
        most_drafts=MOST_DRAFTS,
        states=StatePolicy(3, 4, 16),
    )
    for number in range(2):
        simulation.add(f"{number}", [number] * 5, SamplingParams(max_tokens=60))
    for _ in range(8):
        simulation.step()
    assert any(chunk.num_drafts for plan in simulation.plans for chunk in plan.chunks)
    late = simulation.add("late", [7] * 5, SamplingParams(max_tokens=60))
    simulation.step()
    assert late.request.lease is not None
    simulation.run_and_check()


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


def followed(predicted: list[int], *parts: list[int]) -> list[int]:
    """Return the tokens that are guessed once an answer has come in parts."""
    text, output = PredictedText(array("i", predicted)), array("i")
    for part in parts:
        output.extend(part)
        text.follow(part, output[-3:])
    return text.guess(4).tokens.tolist()


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([[1]], [2, 3, 4, 5]),
        ([[1, 2], [3, 4]], [5, 6, 7, 8]),
        ([[30]], []),
        ([[1, 2], [30]], []),
        ([[1, 2], [30, 4]], [5, 6, 7, 8]),
        ([[1, 2, 30, 31, 32, 3, 4], [5]], [6, 7, 8, 9]),
        ([[1, 2, 6, 7], [8]], [9]),
        ([[6, 7, 8], [1, 2, 3]], [4, 5, 6, 7]),
        ([[20, 21, 22, 1, 2, 3]], [4, 5, 6, 7]),
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9]], []),
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]], []),
    ],
    ids=[
        "from the beginning",
        "along it",
        "another beginning",
        "at an edit",
        "behind an exchanged token",
        "behind added tokens",
        "behind tokens left out",
        "before tokens that came first",
        "behind another beginning",
        "nothing at its end",
        "nothing beyond its end",
    ],
)
def test_predicted_text_is_guessed_along_the_answer_and_found_again_behind_each_edit(
    parts: list[list[int]], expected: list[int]
) -> None:
    assert followed([1, 2, 3, 4, 5, 6, 7, 8, 9], *parts) == expected


def test_tokens_are_found_at_whole_places_alone() -> None:
    # The bytes of three tokens of 257 stand at every place of this text, but at no whole one.
    assert followed([0x01000001, 0x01000001, 0x01000001, 0x01000001, 5], [7, 0x00000101, 0x00000101, 0x00000101]) == []


def test_predicted_tokens_are_the_next_drafts_and_chunks_of_prompts_name_the_token_behind_them() -> None:
    scheduler = Scheduler(
        [PrefixCache(32, 4)],
        max_num_seqs=2,
        max_num_batched_tokens=6,
        max_num_queued_reqs=9,
        max_model_len=64,
        parts=[Drafting(SpeculativeConfig("mtp", 16, 3, 2))],
    )
    scheduler.add(Request("r", array("i", range(10)), SamplingParams(max_tokens=5)))
    results = [
        ChunkResult(),
        ChunkResult(40, drafts=(41, 42)),
        # The second draft is wrong, so nothing was predicted behind it.
        ChunkResult(40, further=((41, None),), drafts=(43,)),
    ]
    shown = []
    for step, result in enumerate(results, start=1):
        plans = scheduler.schedule()
        assert plans is not None
        (chunk,) = plans[0].chunks
        shown.append((chunk.token_ids.tolist(), chunk.num_drafts, chunk.following))
        scheduler.commit(plans, [StepResult(step, [result])])
    assert shown == [([0, 1, 2, 3, 4, 5], 0, 6), ([6, 7, 8, 9], 0, None), ([40, 41, 42], 2, None)]
    plans = scheduler.schedule()
    assert plans is not None
    assert plans[0].chunks[0].token_ids.tolist() == [41, 43]


def test_right_tokens_of_a_prediction_take_fewer_steps_and_are_counted_with_wrong_ones() -> None:
    sampling = SamplingParams(max_tokens=40, seed=3)
    tokens, _ = undisturbed([1, 2, 3], sampling, VOCAB_SIZE)
    edited = [*tokens[:10], (tokens[10] + 1) % VOCAB_SIZE, *tokens[11:]]
    steps, judged = {}, {}
    for name, predicted in {
        "none": [],
        "right": tokens,
        "edited": edited,
        "wrong": [(t + 1) % VOCAB_SIZE for t in tokens],
    }.items():
        drafting = Drafting(SpeculativeConfig("ngram", MOST_DRAFTS, 32))
        simulation = Simulation(num_blocks=32, block_size=4, drafting=drafting, most_drafts=MOST_DRAFTS)
        simulation.add("r", [1, 2, 3], sampling, predicted=predicted)
        outputs = []
        while not simulation.scheduler.is_idle:
            outputs += simulation.step()
        simulation.check_all_done()
        steps[name] = len(simulation.plans)
        judged[name] = tuple(map(sum, zip(*(output.judged for output in outputs), strict=True)))
    assert steps["none"] == 40
    assert judged["none"] == (0, 0)
    assert steps["right"] == 8
    assert judged["right"] == (32, 0)
    assert steps["edited"] < 14
    assert judged["edited"][0] > 25
    assert judged["edited"][1] > 0
    assert judged["wrong"][0] < 10


def test_no_text_is_read_while_no_drafts_can_pay_and_all_of_it_once_they_can() -> None:
    scheduler = Scheduler(
        [PrefixCache(64, 4)],
        max_num_seqs=8,
        max_num_batched_tokens=200,
        max_num_queued_reqs=9,
        max_model_len=64,
        parts=[Drafting(SpeculativeConfig("auto", MOST_DRAFTS))],
    )
    predicted = array("i", range(100, 140))
    for number in range(8):
        sampling = SamplingParams(max_tokens=30 if number == 0 else 12)
        scheduler.add(Request(f"{number}", array("i", [number, 2, 3]), sampling, asked=Asked(predicted=predicted)))
    drafts = list[tuple[int, int]]()
    while (plans := scheduler.schedule()) is not None:
        chunks, results = plans[0].chunks, []
        for chunk in chunks:
            done = chunk.start + len(chunk.token_ids) - chunk.num_drafts - 3
            token, *further = predicted[done : done + 1 + chunk.num_drafts]
            results.append(ChunkResult(token, further=tuple((each, None) for each in further)))
        drafts.append((len(chunks), sum(chunk.num_drafts for chunk in chunks)))
        scheduler.commit(plans, [StepResult(plans[0].step, results)])
        # The first eight rows of a step cost as much as one, each further row as much as these.
        scheduler.count_step(float(max(1, plans[0].num_tokens - 7)))
    # The first step with drafts finds out that they do not pay.
    assert not any(number for streams, number in drafts[4:] if streams == 8)
    assert max(number for streams, number in drafts if streams == 1) == MOST_DRAFTS
