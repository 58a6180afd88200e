"""Guard an engine against requests that may end it: it names them before it works on them, and refuses culprits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from moeserve.engine.crashes.judgement import WORK, name_of_work
from moeserve.engine.crashes.record import WorkRecord
from moeserve.plan import StepPlan
from moeserve.run_context import RunContext
from moeserve.scheduling.steps import RanksObserver
from moeserve.wire import Generate, Left, Suspicion


class Suspects(RanksObserver):
    """Observes the steps before they are launched. Used by the engine's thread alone.

    A suspect passes with the first step behind which enough of its tokens are computed (`until`). The scheduler goes by
    the same rule.
    """

    def __init__(self, record: WorkRecord, suspicion: Suspicion) -> None:
        self._record = record
        self._culprits = dict(suspicion.culprits)
        self._places = dict(suspicion.places)
        self._works = {name for name in self._places if name.startswith(f"{WORK} ")}
        # By request that is suspected for its work: the name of that.
        self._work_of: dict[str, str] = {}
        # By suspect that came: its digest, and the number of computed tokens that clears it.
        self._digests: dict[str, str] = {}
        self._until: dict[str, int] = {}
        # By number of a step in flight: the request in it that is a suspect, and its computed tokens behind it.
        self._trials: dict[int, tuple[str, int]] = {}
        self._num_arrivals = 0
        if self._places:
            record.keep_suspects(self._places)

    def begin(self, plans: Sequence[StepPlan]) -> None:
        """Name the requests of a step, or of a part of it that is computed again."""
        chunks = plans[0].chunks if len(plans) == 1 else [chunk for plan in plans for chunk in plan.chunks]
        ids = [chunk.request_id for chunk in chunks]
        ends = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        trial = None
        if self._places:
            for request_id, end in zip(ids, ends, strict=True):
                if (name := self._name_of(request_id)) in self._places:
                    trial = name, self._digests[request_id]
                    self._trials[plans[0].step] = request_id, end
        self._record.begin_step(plans[0].step, ids, ends, trial)

    def settle(self, step: int) -> None:
        """Record that steps up to this one are over: they cannot end the engine any more."""
        self._record.end_steps(step)
        for number in [number for number in self._trials if number <= step]:
            request_id, end = self._trials.pop(number)
            name = self._name_of(request_id)
            if end >= self.until(request_id) and self._places.pop(name, None) is not None:
                self._works.discard(name)
                self._work_of = {other: work for other, work in self._work_of.items() if work != name}
                self._record.keep_suspects(self._places)

    def record_left(self, message: Left) -> None:
        """Suspect everybody who sends the work of a suspect that does not come any more."""
        self._leave(message.request_id, digest_of(message))

    def record_abort(self, request_id: str) -> None:
        """Suspect everybody who sends the work of a suspect whose client leaves."""
        if (digest := self._digests.get(request_id)) is not None:
            self._leave(request_id, digest)

    def _leave(self, request_id: str, digest: str) -> None:
        if (place := self._places.pop(request_id, None)) is not None:
            self._works.add(work := name_of_work(digest))
            self._places[work] = max(place, self._places.get(work, 0))
            self._record.keep_suspects(self._places)

    @contextmanager
    def taking(self, message: Generate) -> Iterator[None]:
        """Name a request while it is taken."""
        request_id = message.request_id
        trial, self._num_arrivals = None, self._num_arrivals + 1
        if self._works and (work := name_of_work(digest_of(message))) in self._works:
            self._work_of[request_id] = work
        if (name := self._name_of(request_id)) in self._places:
            trial = name, digest_of(message)
            self._digests[request_id] = trial[1]
            self._until[request_id] = _passes_with(message, self._places[name])
        self._record.begin_arrival(self._num_arrivals, request_id, 0, trial)
        yield
        # An exception ends the engine; the record then keeps the arrival.
        self._record.end_arrival(self._num_arrivals)

    def until(self, request_id: str) -> int:
        """Return the number of computed tokens with which a request that came is no suspect any more; 0 for most."""
        return self._until[request_id] if self._name_of(request_id) in self._places else 0

    def _name_of(self, request_id: str) -> str:
        """Return the name under which a request is suspected, if it is."""
        return self._work_of.get(request_id, request_id)

    def is_culprit(self, message: Generate, now: float) -> bool:
        """Return whether engines died of this request, or of one with the same work. now: on the monotonic clock."""
        return bool(self._culprits) and now < self._culprits.get(digest_of(message), now)


def open_suspects(context: RunContext) -> Suspects:
    """Return the suspects of an engine's life, and begin its record."""
    config = context.config
    # Elsewhere two at most: the one that is computed, and the one that is planned ahead.
    max_steps = max(2, config.pipeline_parallel_size)
    record = WorkRecord(context.work_record, context.incarnation, config.max_num_seqs, max_steps)
    return Suspects(record, context.suspicion)


def _passes_with(message: Generate, place: int) -> int:
    """Return the number of computed tokens with which a suspect is beyond its place.

    A request that had begun to decode computes all its tokens as a prompt when it resumes. As it may be fatal to decode
    steps alone, it passes with the first of these.
    """
    num_prompt_tokens, num_output_tokens = len(message.token_ids) // 4, len(message.output_token_ids) // 4
    return 1 + (place if place <= num_prompt_tokens else max(place, num_prompt_tokens + num_output_tokens))


def digest_of(message: Generate | Left) -> str:
    """Return a digest of a request's prompt and parameters but for the seed, which differs between repetitions."""
    sampling = replace(message.sampling, seed=0)
    return hashlib.blake2b(message.token_ids + repr(sampling).encode(), digest_size=16).hexdigest()
