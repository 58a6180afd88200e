"""Beam searches over an engine that knows none: a beam is a request that goes on with the likeliest token.

The search leads it: behind each token it waits until the search has chosen the next beams. Where the search follows a
beam by another token, a new request forks the beam's: it resumes, as one does that an earlier life of the engine had,
from the text with that token. The prefix cache shares the blocks of the beams' common text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

import msgspec

from moeserve.frontend.beam_search import Beam, BeamParams, BeamSearch
from moeserve.frontend.relay.engine_client import EngineClient
from moeserve.frontend.relay.request_group import EngineGone, RequestGroup, RequestRejected
from moeserve.plan import FinishReason, PromptProgress, SamplingParams, TokenLogprobs
from moeserve.wire import Generate, Output, pack_token_ids


@dataclass(eq=False, slots=True)
class _Run:
    """A request, and the tokens and log probabilities behind its beam's text that are known and not used yet."""

    request_id: str
    submitted: AbstractAsyncContextManager[RequestGroup]
    group: RequestGroup
    num_deaths_before: int  # lives of the engine that ended before the request was sent
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    async def leave(self) -> None:
        await self.submitted.__aexit__(None, None, None)


class _Prompt:
    """A prompt that is searched, and the requests for it. `runs`: of the search's beams, in their order."""

    def __init__(self, generate: Generate, params: BeamParams, first_choice: int) -> None:
        """generate: asks for the longest text. first_choice: the number of the first of the prompt's answers."""
        sampling = generate.sampling
        self.first_choice = first_choice
        self.search = BeamSearch(
            params,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
        )
        self.runs: list[_Run] = []
        self.told: Output | None = None  # the first output, which tells how much of the prompt was cached
        self._num_answers = params.num_answers
        # A search goes by log probabilities alone, whatever a checkpoint has for sampling.
        alone = SamplingParams(sampling.max_tokens, 0.0, logprobs=self.search.num_alternatives)
        self.begin = msgspec.structs.replace(generate, sampling=alone, has_tools=False, led=True)
        self._num_made = 0

    def forked(self, beam: Beam) -> Generate:
        """Return a request that goes on from the text of a beam, beside the request of the beam that it continues."""
        self._num_made += 1
        return msgspec.structs.replace(
            self.begin,
            request_id=f"{self.begin.request_id}/{self._num_made}",
            cache=None,
            terms=replace(self.begin.terms, patient=True),
            output_token_ids=pack_token_ids(beam.token_ids),
            resumes=True,
            reports_progress=False,
            forks=self.runs[beam.parent].request_id,
        )

    def answers(self) -> list[tuple[int, Output]]:
        """Return the texts that were found, each with its choice; one failure if they are too few."""
        found, told = self.search.best(), self.told
        assert told is not None
        if len(found) < self._num_answers:
            error = Output(told.request_id, [], FinishReason.ERROR, error="too few texts were found")
            return [(self.first_choice, error)]
        answers = []
        for choice, text in enumerate(found, self.first_choice):
            of_text = {"token_ids": text.token_ids, "num_output_tokens": len(text.token_ids)}
            of_text |= {"finish_reason": text.finish_reason, "logprobs": text.logprobs or None}
            answers.append((choice, msgspec.structs.replace(told, **of_text)))
        return answers


class Beams:
    """The searches of one HTTP request: to its handler a `RequestGroup` in which each choice has one output.

    The prompts take their steps together. `num_deaths`: see `RequestGroup`.
    """

    def __init__(self, engine: EngineClient, generates: Sequence[Generate], params: BeamParams) -> None:
        """generates: of each prompt."""
        self._engine = engine
        self._prompts = [_Prompt(one, params, n * params.num_answers) for n, one in enumerate(generates)]
        self._awaited: RequestGroup | None = None
        self.num_deaths = 0

    async def __aenter__(self) -> Beams:
        for prompt in self._prompts:
            prompt.runs = [await self._run(prompt.begin)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for run in [run for prompt in self._prompts for run in prompt.runs]:
            await run.leave()

    async def admitted(self) -> None:
        """Wait until the engine has admitted every prompt. Raise as `RequestGroup.admitted`."""
        for prompt in self._prompts:
            for run in prompt.runs:
                await run.group.admitted()

    async def next(self, patience_s: float | None = None) -> list[tuple[int, Output]]:
        """Return the outputs of searches that have ended, each with its choice. See `RequestGroup.next`."""
        clock = asyncio.get_running_loop().time
        until = None if patience_s is None else clock() + patience_s
        while self._prompts:
            for prompt in self._prompts:
                while lacking := [run for run in prompt.runs if not run.logprobs]:
                    outputs = await self._outputs(lacking[0], None if until is None else until - clock())
                    if not outputs:
                        return []
                    if failed := [output for output in outputs if output.has_failed]:
                        return [(prompt.first_choice, failed[0])]
                    prompt.told = prompt.told or outputs[0]
            if ended := await self._advance():
                return ended
        return []

    def take_progress(self) -> list[tuple[int, PromptProgress]]:
        """Return how far prompts are, each with its first choice, where there is news."""
        news = [(prompt, run.group.take_progress()) for prompt in self._prompts for run in prompt.runs]
        return [(prompt.first_choice, told) for prompt, found in news for _, told in found]

    def interrupt(self) -> None:
        """Make a waiting call of `next` return nothing."""
        if self._awaited is not None:
            self._awaited.interrupt()

    def finish(self, index: int, keep_tokens: int) -> None:
        """Do nothing: once a text is known the engine has ended its requests."""

    def turn(self, index: int) -> None:
        """Do nothing: no blocks are kept for a search while tools run."""

    async def _outputs(self, run: _Run, patience_s: float | None) -> list[Output]:
        """Return new outputs of a request, none if none come in time."""
        self._awaited = run.group
        try:
            outputs = [output for _, output in await run.group.next(patience_s)]
        except RequestRejected as error:
            raise EngineGone(f"the engine cannot go on with the search: {error}") from error
        self.num_deaths = max(self.num_deaths, run.num_deaths_before + run.group.num_deaths)
        for output in outputs:
            run.token_ids += output.token_ids
            run.logprobs += output.logprobs or []
        return outputs

    async def _advance(self) -> list[tuple[int, Output]]:
        """Let each prompt take a step. Return the answers of the searches that have ended."""
        ended = list[tuple[int, Output]]()
        for prompt in self._prompts:
            prompt.search.advance([run.logprobs.pop(0).top for run in prompt.runs])
            await self._follow(prompt, [run.token_ids.pop(0) for run in prompt.runs])
            if prompt.search.is_done:
                ended += prompt.answers()
        self._prompts = [prompt for prompt in self._prompts if not prompt.search.is_done]
        return ended

    async def _follow(self, prompt: _Prompt, drawn: list[int]) -> None:
        """Give each beam a request: its parent's if this goes on with the same token, or a new one. Leave the others.

        drawn: the next token of each request.
        """
        before = prompt.runs
        beams = [] if prompt.search.is_done else prompt.search.beams
        going_on = {n: before[b.parent] for n, b in enumerate(beams) if b.token_ids[-1] == drawn[b.parent]}
        going_on = {n: run for n, run in going_on.items() if run.group.num_open or run.logprobs}
        prompt.runs = [going_on.get(n) or await self._run(prompt.forked(beam)) for n, beam in enumerate(beams)]
        # Forks wait for the requests that they fork, so that one step computes all of them.
        if going_on:
            self._engine.let_go_on([run.request_id for run in going_on.values()])
        for run in before:
            if run not in going_on.values():
                await run.leave()

    async def _run(self, generate: Generate) -> _Run:
        submitted = self._engine.submit([generate])
        return _Run(generate.request_id, submitted, await submitted.__aenter__(), self.num_deaths)
