"""Checks grammars before they reach the engine, one after another, in a process that can be ended; keeps verdicts."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from moeserve.frontend.constraints import Constraint, constrain
from moeserve.frontend.grammar_process import SIZE_BYTES, Job, Verdict
from moeserve.frontend.http import ApiError, invalid
from moeserve.plan import SamplingParams

log = structlog.get_logger(__name__)

_KEPT_VERDICTS = 256
# Of the clock, for a machine that has no time for the process; it limits its own processor time.
_LONGEST_WAIT_S = 30.0
_LONGEST_MESSAGE = 300


class GrammarChecker:
    """Owns the process, which starts with the first grammar. Used by the frontend's event loop alone."""

    def __init__(self, tokenizer_json: Path) -> None:
        self._tokenizer_json = tokenizer_json
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    async def constrain(
        self, constraint: Constraint, sampling: SamplingParams, eos_token_ids: Sequence[int]
    ) -> SamplingParams:
        """Return the sampling parameters with the constraint's grammar. Raises ApiError (400) if it is not valid."""
        verdict = await self._verdict(constraint, eos_token_ids)
        if verdict.error is not None:
            raise _refusal(constraint, verdict)
        return constrain(sampling, verdict.grammar or constraint.grammar, eos_token_ids)

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            await _end(self._process)

    async def _verdict(self, constraint: Constraint, eos_token_ids: Sequence[int]) -> Verdict:
        key = hashlib.blake2b(constraint.grammar.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._verdicts.get(key)
        if known is not None:
            self._verdicts.move_to_end(key)
            return known
        # A client that leaves must not leave a verdict unread behind.
        verdict = await asyncio.shield(asyncio.ensure_future(self._judge(constraint, eos_token_ids)))
        self._verdicts[key] = verdict
        if len(self._verdicts) > _KEPT_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _judge(self, constraint: Constraint, eos_token_ids: Sequence[int]) -> Verdict:
        """Have the process compile a grammar. Its end is a verdict too."""
        job = msgspec.msgpack.encode(Job(constraint.grammar, constraint.is_bnf, constraint.schema))
        async with self._turn:
            process = self._process
            if process is None or process.returncode is not None:
                process = self._process = await self._start(eos_token_ids)
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                async with asyncio.timeout(_LONGEST_WAIT_S):
                    process.stdin.write(len(job).to_bytes(SIZE_BYTES) + job)
                    await process.stdin.drain()
                    size = int.from_bytes(await process.stdout.readexactly(SIZE_BYTES))
                    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Verdict)
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                await _end(process)
                log.warning("grammar_refused", reason="compiling it took too long", status=process.returncode)
                return Verdict("it takes too long to compile")

    async def _start(self, eos_token_ids: Sequence[int]) -> Process:
        module = "moeserve.frontend.grammar_process"
        arguments = ["-m", module, str(self._tokenizer_json), *map(str, eos_token_ids)]
        # A session of its own: an interrupt from the keyboard is for the frontend, which ends the process itself.
        return await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=PIPE, stdout=PIPE, start_new_session=True
        )


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _refusal(constraint: Constraint, verdict: Verdict) -> ApiError:
    param = constraint.where + "".join(
        f"[{step}]" if isinstance(step, int) else f".{step[:60]}" for step in verdict.path
    )
    reason = " ".join((verdict.error or "").split())[:_LONGEST_MESSAGE]
    return invalid(f"Invalid value for `{param}`: {reason}", param)
