"""Searches over an engine that gives one token at a time: they find what a search finds that has all at hand."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from functools import lru_cache
from math import log
from random import Random

import msgspec
import pytest

from moeserve.frontend.beam_search import BeamParams, BeamSearch, FoundText
from moeserve.frontend.relay.request_group import EngineGone
from moeserve.plan import CacheWish, FinishReason, PromptProgress, SamplingParams, TokenLogprobs
from moeserve.wire import Generate, Output, unpack_token_ids
from tests.support.beam_searches import SteppedClient, generates_of, search, searching

VOCAB = 40
STOP = 3
WIDE = BeamParams(3, 2, early_stopping="never")


@lru_cache(maxsize=1 << 12)
def _likeliest(prefix: bytes) -> list[tuple[int, float]]:
    weights = Random(prefix).choices(range(1, 1000), k=VOCAB)
    found = [(token, log(weight / sum(weights))) for token, weight in enumerate(weights)]
    return sorted(found, key=lambda pair: -pair[1])


class ScriptedEngine:
    """Gives tokens to some of its requests in each step. Its model has a made-up distribution behind each text."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._open: dict[str, tuple[Generate, array[int]]] = {}
        self._num_allowed: dict[str, int] = {}
        self.num_steps = 0

    @property
    def is_idle(self) -> bool:
        return not self._open

    def add(self, generate: Generate) -> None:
        assert generate.request_id not in self._open
        text = unpack_token_ids(generate.output_token_ids)
        self._open[generate.request_id] = generate, text
        self._num_allowed[generate.request_id] = len(text) + 1

    def let_go_on(self, request_id: str) -> None:
        if request_id in self._open:
            self._num_allowed[request_id] += 1

    def abort(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def die(self) -> None:
        self._open.clear()

    def step(self) -> list[Output]:
        self.num_steps += 1
        free = [name for name, (_, text) in self._open.items() if len(text) < self._num_allowed[name]]
        return [self.output(name) for name in free if self._random.random() < 0.7]

    def output(self, name: str) -> Output:
        """Return the next output of a request."""
        generate, text = self._open[name]
        is_first = not text and not generate.resumes
        top = tuple(_likeliest((unpack_token_ids(generate.token_ids) + text).tobytes())[: generate.sampling.logprobs])
        text.append(top[0][0])
        reason = FinishReason.LENGTH if len(text) == generate.sampling.max_tokens else None
        if reason is not None:
            del self._open[name]
        logprobs = [TokenLogprobs(top[0][1], top)]
        return Output(name, [top[0][0]], reason, 7 if is_first else 0, None, logprobs)


def plain(prompt: Sequence[int], params: BeamParams, sampling: SamplingParams) -> list[FoundText]:
    """Return what a search finds without any engine."""
    found = BeamSearch(
        params, max_tokens=sampling.max_tokens, min_tokens=sampling.min_tokens, stop_token_ids=sampling.stop_token_ids
    )
    while not found.is_done:
        texts = [(array("i", prompt) + beam.token_ids).tobytes() for beam in found.beams]
        found.advance([_likeliest(text)[: found.num_alternatives] for text in texts])
    return found.best()


@pytest.mark.parametrize("seed", range(30))
def test_searches_of_several_prompts_find_the_texts_of_a_plain_search(seed: int) -> None:
    random = Random(seed)
    prompts = [random.choices(range(VOCAB), k=random.randint(1, 20)) for _ in range(random.randint(1, 3))]
    width, early = random.randint(2, 5), random.choice([True, False, "never"])
    logprobs = random.choice([None, 0, 2])
    params = BeamParams(width, random.randint(1, width), random.choice([-0.5, 0.0, 1.0, 1.7]), early, logprobs)
    sampling = SamplingParams(random.randint(1, 12), min_tokens=random.choice([0, 3]), stop_token_ids=(STOP, 9))
    engine = ScriptedEngine(seed)
    client = SteppedClient(engine)
    found = asyncio.run(search(client, generates_of(prompts, sampling), params))
    wanted = [text for prompt in prompts for text in plain(prompt, params, sampling)]
    assert [output.token_ids for output in found] == [text.token_ids for text in wanted]
    assert [output.finish_reason for output in found] == [text.finish_reason for text in wanted]
    assert [output.logprobs or [] for output in found] == [text.logprobs for text in wanted]
    assert {output.num_cached_tokens for output in found} == {7}
    assert len(client.sent) == len({generate.request_id for generate in client.sent})
    assert engine.is_idle
    assert not client.groups


def test_a_search_goes_by_log_probabilities_whatever_a_checkpoint_has_for_sampling() -> None:
    sampling = SamplingParams(8, 0.7, top_k=2, top_p=0.5, repetition_penalty=1.3, stop_token_ids=(STOP,), seed=4)
    client = SteppedClient(ScriptedEngine())
    asyncio.run(search(client, generates_of([[1, 2]], sampling), WIDE))
    assert {generate.sampling for generate in client.sent} == {SamplingParams(8, 0.0, logprobs=4)}


def test_only_the_first_request_of_a_prompt_is_new_to_the_engine() -> None:
    (generate,) = generates_of([[1, 2]], SamplingParams(8))
    generate = msgspec.structs.replace(generate, cache=CacheWish(report=True), reports_progress=True, has_tools=True)
    client = SteppedClient(ScriptedEngine())
    asyncio.run(search(client, [generate], WIDE))
    first, *later = client.sent
    assert (first.resumes, first.cache, first.reports_progress) == (False, generate.cache, True)
    for one in later:
        assert (one.resumes, one.cache, one.reports_progress, one.terms.patient) == (True, None, False, True)
        assert one.request_id.startswith("r-0/")
    assert not any(one.has_tools for one in client.sent)
    assert all(one.led for one in client.sent)
    assert {one.forks for one in later} <= {one.request_id for one in client.sent}


def test_a_beam_that_goes_on_with_its_likeliest_token_keeps_its_request() -> None:
    client = SteppedClient(ScriptedEngine())
    asyncio.run(search(client, generates_of([[1, 2]], SamplingParams(12)), WIDE))
    assert len(client.sent) < 1 + WIDE.width * 11


def test_an_engine_that_takes_the_place_of_another_one_goes_on_with_the_same_texts() -> None:
    class Mortal(ScriptedEngine):
        def step(self) -> list[Output]:
            outputs = super().step()
            if self.num_steps in (5, 9):
                self.die()
                for group in [*client.groups.values()]:
                    group.lose_engine()
                    asyncio.get_running_loop().call_soon(client.hand_over, group)
                return []  # what was computed is lost
            return outputs

    async def run() -> tuple[list[Output], int]:
        found: dict[int, Output] = {}
        async with searching(client, generates_of([[1, 2]], sampling), WIDE) as beams:
            while len(found) < 2:
                found.update(await beams.next())
            return [found[0], found[1]], beams.num_deaths

    client, sampling = SteppedClient(Mortal()), SamplingParams(12)
    outputs, num_deaths = asyncio.run(run())
    assert [output.token_ids for output in outputs] == [text.token_ids for text in plain([1, 2], WIDE, sampling)]
    assert num_deaths == 2


def test_a_beam_that_fails_ends_its_search() -> None:
    class Failing(ScriptedEngine):
        def output(self, name: str) -> Output:
            if "/" not in name or name.endswith("/1"):
                return super().output(name)
            self.abort(name)
            return Output(name, [], FinishReason.ERROR, error="no")

    engine = Failing()
    (output,) = asyncio.run(search(SteppedClient(engine), generates_of([[1, 2]], SamplingParams(8)), WIDE))
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "no")
    assert engine.is_idle


def test_a_search_that_finds_too_few_texts_fails() -> None:
    class Certain(ScriptedEngine):
        def output(self, name: str) -> Output:
            self.abort(name)
            return Output(name, [STOP], FinishReason.LENGTH, 0, 1, [TokenLogprobs(0.0, ((STOP, 0.0),))])

    sampling = SamplingParams(8, stop_token_ids=(STOP,))
    (output,) = asyncio.run(search(SteppedClient(Certain()), generates_of([[1, 2]], sampling), WIDE))
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "too few texts were found")


def test_an_engine_that_takes_no_further_request_is_gone() -> None:
    class Refusing(ScriptedEngine):
        def add(self, generate: Generate) -> None:
            super().add(generate)
            if generate.resumes:
                client.groups[generate.request_id].fail(EngineGone("away"))

    client = SteppedClient(Refusing())
    with pytest.raises(EngineGone, match="away"):
        asyncio.run(search(client, generates_of([[1, 2]], SamplingParams(8)), WIDE))


def test_patience_ends_though_steps_are_taken() -> None:
    async def run() -> list[tuple[int, Output]]:
        generates = generates_of([[1, 2]], SamplingParams(1_000_000))
        async with searching(SteppedClient(ScriptedEngine()), generates, WIDE) as beams:
            return await beams.next(0.05)

    assert asyncio.run(run()) == []


def test_the_progress_of_prompts_is_told_by_their_first_choices() -> None:
    class Silent(ScriptedEngine):
        def step(self) -> list[Output]:
            return []

    async def run() -> list[tuple[int, PromptProgress]]:
        client = SteppedClient(Silent())
        async with searching(client, generates_of([[1], [2]], SamplingParams(4)), WIDE) as beams:
            client.groups["r-1"].tell(progress)
            return beams.take_progress()

    progress = PromptProgress("r-1", 1, 0, 0, 0.0, 0.0)
    assert asyncio.run(run()) == [(2, progress)]
