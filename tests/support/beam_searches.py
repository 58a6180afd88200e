"""Beam searches of the frontend over an engine in this process, which takes steps while they wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, cast

from moeserve.frontend.beam_search import BeamParams
from moeserve.frontend.beams import Beams
from moeserve.frontend.relay.engine_client import EngineClient
from moeserve.frontend.relay.request_group import RequestGroup
from moeserve.plan import SamplingParams
from moeserve.wire import Admitted, Generate, Output, pack_token_ids


class SearchedEngine(Protocol):
    """What a client of an engine needs of it."""

    def add(self, generate: Generate) -> None: ...

    def let_go_on(self, request_id: str) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> Sequence[Output]: ...


class SteppedClient:
    """Stands in for the client of an engine. `sent` are the requests that were submitted."""

    def __init__(self, engine: SearchedEngine) -> None:
        self.sent: list[Generate] = []
        self.groups: dict[str, RequestGroup] = {}
        self._engine = engine

    @asynccontextmanager
    async def submit(self, generates: list[Generate]) -> AsyncIterator[RequestGroup]:
        self.sent += generates
        group = RequestGroup(generates, lambda _: None, patience_s=60)
        self.groups |= dict.fromkeys((generate.request_id for generate in generates), group)
        self.hand_over(group)
        yield group
        for left in group.close():
            self._engine.abort(left.request_id)
        for generate in generates:
            del self.groups[generate.request_id]

    def hand_over(self, group: RequestGroup) -> None:
        """Send the open requests of a group to this life of the engine."""
        for generate in group.take_to_engine():
            group.answer(Admitted(generate.request_id))
            self._engine.add(generate)

    def let_go_on(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._engine.let_go_on(request_id)

    async def run(self) -> None:
        """Have the engine take steps for ever."""
        while True:
            for output in self._engine.step():
                if (group := self.groups.get(output.request_id)) is not None:
                    group.put(output)
            await asyncio.sleep(0)


def generates_of(prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generate]:
    return [Generate(f"r-{number}", pack_token_ids(list(prompt)), sampling) for number, prompt in enumerate(prompts)]


@asynccontextmanager
async def searching(client: SteppedClient, generates: list[Generate], params: BeamParams) -> AsyncIterator[Beams]:
    """Yield searches whose engine takes steps meanwhile."""
    running = asyncio.create_task(client.run())
    try:
        async with Beams(cast(EngineClient, client), generates, params) as beams:
            await beams.admitted()
            yield beams
    finally:
        running.cancel()


async def search(client: SteppedClient, generates: list[Generate], params: BeamParams) -> list[Output]:
    """Return the output of each choice, or the first failure."""
    found: dict[int, Output] = {}
    async with searching(client, generates, params) as beams:
        while len(found) < len(generates) * params.num_answers:
            found.update(await beams.next())
            if failed := [output for output in found.values() if output.has_failed]:
                return failed
    return [found[choice] for choice in sorted(found)]
