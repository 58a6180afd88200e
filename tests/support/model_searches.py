"""Beam searches of the frontend over a model in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks.token_engine import TokenEngine, advance
from moeserve.frontend.beam_search import BeamParams
from moeserve.plan import Asked, Request, SamplingParams
from moeserve.wire import Generate, Output, unpack_token_ids
from tests.support.beam_searches import SteppedClient, generates_of, search


class _Model:
    """The engine of searches."""

    def __init__(self, engine: TokenEngine) -> None:
        self._engine = engine

    def add(self, generate: Generate) -> None:
        request = Request(
            generate.request_id,
            unpack_token_ids(generate.token_ids),
            generate.sampling,
            terms=generate.terms,
            resumes=generate.resumes,
            earlier_output=unpack_token_ids(generate.output_token_ids),
            asked=Asked(led=generate.led, forks=generate.forks),
        )
        self._engine.scheduler.add(request)

    def let_go_on(self, request_id: str) -> None:
        self._engine.led.continued(request_id)

    def abort(self, request_id: str) -> None:
        self._engine.scheduler.abort(request_id)

    def step(self) -> list[Output]:
        outputs = []
        for output in advance(self._engine.steps, self._engine.masks) or []:
            assert output.token_id is not None, output.error
            assert output.logprobs is not None
            told = [output.token_id], output.finish_reason, output.request.num_cached_tokens
            outputs.append(Output(output.request.request_id, *told, logprobs=[output.logprobs]))
        return outputs


def searched(
    engine: TokenEngine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, params: BeamParams
) -> list[list[Output]]:
    """Return the answers that searches over a model in this process find for each prompt."""
    found = asyncio.run(search(SteppedClient(_Model(engine)), generates_of(prompts, sampling), params))
    while advance(engine.steps, engine.masks) is not None:  # steps of requests that were left
        pass
    return [found[first : first + params.num_answers] for first in range(0, len(found), params.num_answers)]
