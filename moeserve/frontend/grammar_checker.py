"""Checks grammars before they reach the engine, one after another, in a process that can be ended; keeps verdicts."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.constraints import Constraint, constrain
from moeserve.frontend.grammar_process import Job, Verdict
from moeserve.frontend.http import ApiError, invalid
from moeserve.frontend.job_process import JobProcesses
from moeserve.plan import SamplingParams

_MODULE = "moeserve.frontend.grammar_process"
_KEPT_VERDICTS = 256
# A grammar in Lark of a client's GBNF is longer than that by its quotes and escapes.
_MAX_VERDICT_BYTES = 16 * limits.MAX_GRAMMAR_BYTES
_LONGEST_MESSAGE = 300


class GrammarChecker:
    """Owns the process, which starts with the first grammar. Used by the frontend's event loop alone."""

    def __init__(self, tokenizer_json: Path) -> None:
        self._tokenizer_json = tokenizer_json
        self._processes: JobProcesses | None = None
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
        if self._processes is not None:
            await self._processes.stop()

    async def _verdict(self, constraint: Constraint, eos_token_ids: Sequence[int]) -> Verdict:
        key = hashlib.blake2b(constraint.grammar.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._verdicts.get(key)
        if known is not None:
            self._verdicts.move_to_end(key)
            return known
        verdict = await self._judge(constraint, eos_token_ids)
        self._verdicts[key] = verdict
        if len(self._verdicts) > _KEPT_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _judge(self, constraint: Constraint, eos_token_ids: Sequence[int]) -> Verdict:
        """Have the process compile a grammar. Its end is a verdict too."""
        if self._processes is None:
            arguments = [str(self._tokenizer_json), *map(str, eos_token_ids)]
            self._processes = JobProcesses(_MODULE, arguments, 1, _MAX_VERDICT_BYTES)
        job = Job(constraint.grammar, constraint.is_bnf, constraint.schema)
        answer = await self._processes.ask(msgspec.msgpack.encode(job))
        if answer is None:
            return Verdict("it takes too long to compile")
        return msgspec.msgpack.decode(answer, type=Verdict)


def _refusal(constraint: Constraint, verdict: Verdict) -> ApiError:
    param = constraint.where + "".join(
        f"[{step}]" if isinstance(step, int) else f".{step[:60]}" for step in verdict.path
    )
    reason = " ".join((verdict.error or "").split())[:_LONGEST_MESSAGE]
    return invalid(f"Invalid value for `{param}`: {reason}", param)
