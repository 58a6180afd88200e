"""The observers of steps that only gather data: routing, rows sent between ranks.

`ExpertRecording` counts the experts that gates chose on all ranks. `SentCounter` puts a rank's counts of sent rows
into its results, and `LinkCounts` keeps the newest counts on the engine's side.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, SupportsBytes

import numpy as np
from numpy.typing import NDArray

from experts.observer import StepObserver
from experts.placement.placement import Placement
from experts.placement.rebalance import RemoteRanks
from experts.routing.choices import RoutingRecorder, RoutingShape, RoutingStatistics, StatisticsSpec, unpack
from experts.routing.files import UNKNOWN_TOKEN, TraceRecorder, save_statistics, save_trace
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.experts.settings import goes_by_statistics, read_statistics, statistics_key
from moeserve.model.spec import ModelSpec
from moeserve.plan import StepPlan, StepResult
from moeserve.scheduling.steps import RanksObserver

MAX_TRACE_BYTES = 64 * 2**20  # size of a trace file at most
_STEPS_AT_ONCE = 64  # steps are counted together, at most this number
_ROWS_AT_ONCE = 256  # or as soon as they have this number of rows
# Recorded choices of gates, one per row, layer and chosen expert: per step in the long run, and at once after smaller
# steps.
_CHOICES_PER_STEP = 2**13
_MOST_CHOICES = 2**17
# Rows of a digest that enter the transitions, whose counting costs most.
_PAIR_ROWS = 16


class RoutingListener(Protocol):
    """Receives the routing of every step of every rank, as `experts.routing.choices.RoutingRecorder` does."""

    def add(self, ids: NDArray[np.int16], token_ids: Sequence[int]) -> None:
        """ids: the experts chosen, [L, T, k], NOT_COMPUTED where a layer left a row out. token_ids: [T]."""


@dataclass(frozen=True, slots=True)
class RecordingPlan:
    """How a service records its routing.

    known: the statistics to begin with. key: `model_key` of the model. path: the file for the statistics. trace_path:
    the file for a trace that begins with the service. Either is None without such a file.
    """

    shape: RoutingShape
    known: RoutingStatistics
    key: str
    path: Path | None = None
    trace_path: Path | None = None


@dataclass(frozen=True, slots=True)
class _UncountedStep:
    """A computed step of one rank.

    num_kept: the rows of each chunk without its wrong drafts. before: the previous step, which sampled the tokens that
    `plan` leaves open.
    """

    rank: int
    plan: StepPlan
    num_kept: list[int]
    routing: SupportsBytes
    placement: Placement | None
    before: tuple[StepPlan, StepResult] | None


class ExpertRecording(RanksObserver):
    """Records the routing that the results of all ranks carry.

    It keeps the bytes of a few steps and then unpacks and counts them together: computing a step drives the code and
    tables for counting out of the processor's caches, so they are then fetched once for several steps.

    Where steps have many rows, only some steps are recorded, of several ranks in turn, so that the time per step stays
    below 1 ms; every row has the same chance. A trace gets all steps. trace: the recorder of a trace, None while no
    trace is recorded.
    """

    def __init__(
        self,
        plan: RecordingPlan,
        placement: Callable[[], Placement | None] = lambda: None,
        listeners: Sequence[RoutingListener] = (),
        num_shards: int = 1,
    ) -> None:
        """placement: called in every step, returns None on a single rank. listeners: receive every step after the
        recorder, some steps late. num_shards: the neighbouring ranks that compute a plan; the first has its rows."""
        self.shape, self.key, self.path, self.trace_path = plan.shape, plan.key, plan.path, plan.trace_path
        self.recorder = RoutingRecorder(plan.known)
        self.remote_ranks = RemoteRanks()
        self.trace: TraceRecorder | None = None
        self._placement = placement
        self._listeners: tuple[RoutingListener, ...] = (self.recorder, *listeners)
        self._num_shards = num_shards
        # By the number of a step in flight.
        self._placements: dict[int, Placement | None] = {}
        self._pending: list[_UncountedStep] = []
        self._before: dict[int, tuple[StepPlan, StepResult]] = {}
        self._num_rows = 0
        self._num_steps = 0
        self._choices_per_row = self.shape.num_layers * self.shape.top_k
        self._choices_left = _MOST_CHOICES
        self._first_rank = 0
        if plan.trace_path is not None:
            self.start_trace(with_token_ids=False)

    def begin(self, plans: Sequence[StepPlan]) -> None:
        self._placements[plans[0].step] = self._placement()

    def end(self, plans: Sequence[StepPlan], results: Sequence[StepResult]) -> None:
        placement = self._placements.pop(plans[0].step)
        self._choices_left = min(self._choices_left + _CHOICES_PER_STEP, _MOST_CHOICES)
        self._first_rank += 1
        for place in range(len(plans)):
            rank = (self._first_rank + place) % len(plans)
            plan, result = plans[rank], results[rank]
            if result.routing is not None and self._takes(plan):
                before, num_kept = self._before.get(rank), _num_kept(plan, result)
                self._pending.append(_UncountedStep(rank, plan, num_kept, result.routing, placement, before))
                self._num_rows += plan.num_tokens
            self._before[rank] = plan, result
        self._num_steps += 1
        if self._num_steps >= _STEPS_AT_ONCE or self._num_rows >= _ROWS_AT_ONCE:
            self.gather()

    def abandon(self, plans: Sequence[StepPlan]) -> None:
        self._placements.pop(plans[0].step, None)

    def add(
        self, rank: int, ids: NDArray[np.int16], token_ids: Sequence[int], placement: Placement | None = None
    ) -> None:
        """Count a rank's rows of one step: ids [L, T, k], token_ids [T]. placement: of the experts during the step."""
        for listener in self._listeners:
            listener.add(ids, token_ids)
        if placement is not None:
            self.remote_ranks.add(ids, rank, placement)

    def _takes(self, plan: StepPlan) -> bool:
        """Return True if a rank's step is recorded."""
        if not plan.chunks or self.trace is not None:
            return bool(plan.chunks)
        if self._choices_left <= 0:
            return False
        self._choices_left -= plan.num_tokens * self._choices_per_row
        return True

    def gather(self) -> None:
        """Count the steps that have ended and are not counted yet."""
        pending, self._pending = self._pending, []
        self._num_rows = self._num_steps = 0
        for step in pending:
            self._record(step)

    def statistics(self) -> RoutingStatistics:
        self.gather()
        return self.recorder.statistics()

    def start_trace(self, *, with_token_ids: bool, max_tokens: int | None = None) -> TraceRecorder:
        """Begin a trace of at most MAX_TRACE_BYTES with the next step. Drop the one that is being recorded, if any."""
        self.gather()
        room = MAX_TRACE_BYTES // (2 * self.shape.num_layers * self.shape.top_k + 12)
        self.trace = TraceRecorder(self.shape, min(max_tokens or room, room), with_token_ids=with_token_ids)
        return self.trace

    def end_trace(self, path: Path) -> int:
        """End the trace and write it, unless it is empty. Return its number of tokens. Raise OSError."""
        num_tokens, write = self.ending_trace(path)
        write()
        return num_tokens

    def ending_trace(self, path: Path) -> tuple[int, Callable[[], None]]:
        """End the trace. Return its number of tokens, and a function that writes it unless it is empty.

        The function shares nothing with this recording, so any thread may call it. It may raise OSError.
        """
        self.gather()
        recorder, self.trace = self.trace, None
        trace = None if recorder is None else recorder.trace()
        if trace is None:
            return 0, lambda: None
        return len(trace.requests), partial(save_trace, path, trace, self.key)

    def save(self) -> None:
        """Write the statistics to their file, if there is one. Raise OSError."""
        self.saving()()

    def saving(self) -> Callable[[], None]:
        """Return a function that writes the present statistics, if there is a file for them. See `ending_trace`."""
        if self.path is None:
            return lambda: None
        return partial(save_statistics, self.path, copy.deepcopy(self.statistics()), self.key)

    def close(self) -> dict[str, int]:
        """Write the files that the settings name. Return the number of tokens by path. Raise OSError."""
        written = {}
        if self.path is not None:
            self.save()
            written[str(self.path)] = self.recorder.num_tokens
        if self.trace_path is not None and self.trace is not None and (tokens := self.end_trace(self.trace_path)):
            written[str(self.trace_path)] = tokens
        return written

    def _record(self, step: _UncountedStep) -> None:
        rank, plan = step.rank, step.plan
        token_ids: array[int] = array("i")
        logit_rows: list[int] = []
        for chunk in plan.chunks:
            token_ids += chunk.token_ids if chunk.drawn_by is None else _sampled_token(chunk.drawn_by, step.before)
            num_rows = len(token_ids)
            logit_rows.extend(range(num_rows - chunk.num_logit_rows, num_rows))
        ids = unpack(bytes(step.routing), self.shape, len(token_ids), logit_rows)
        if sum(step.num_kept) < len(token_ids):
            ids, token_ids = _without_wrong_drafts(step, ids, token_ids)
        self.add(rank * self._num_shards, ids, token_ids, step.placement)
        if self.trace is not None:
            requests = [chunk.request_id for chunk in plan.chunks]
            self.trace.add(ids, token_ids, list(zip(requests, step.num_kept, strict=True)))


def _num_kept(plan: StepPlan, result: StepResult) -> list[int]:
    """Return the number of rows of each chunk whose tokens are, or become, tokens of the request."""
    chunks = zip(plan.chunks, result.chunks, strict=True)
    return [len(chunk.token_ids) - chunk.num_drafts + len(found.further) for chunk, found in chunks]


def _without_wrong_drafts(
    step: _UncountedStep, ids: NDArray[np.int16], token_ids: array[int]
) -> tuple[NDArray[np.int16], array[int]]:
    """Return the experts [L, T, k] and the tokens [T] of the rows that count."""
    kept: list[int] = []
    first = 0
    for chunk, count in zip(step.plan.chunks, step.num_kept, strict=True):
        kept.extend(range(first, first + count))
        first += len(chunk.token_ids)
    return ids[:, kept], array("i", (token_ids[row] for row in kept))


def _sampled_token(place: int, before: tuple[StepPlan, StepResult] | None) -> array[int]:
    """Return the token at `place` among the sampled tokens of the step before; UNKNOWN_TOKEN where sampling failed."""
    assert before is not None
    plan, result = before
    row = 0
    for chunk, found in zip(plan.chunks, result.chunks, strict=True):
        if row == place and chunk.sampling is not None and found.token_id is not None:
            return array("i", [found.token_id])
        row += chunk.num_sampled_rows
    return array("i", [UNKNOWN_TOKEN])


def plan_recording(config: ServeConfig, model_dir: Path, spec: ModelSpec) -> RecordingPlan | None:
    """Plan the recording, beginning with the statistics in the file of `--expert-statistics` if it exists.

    Return None for a model without experts or if recording is off. Raise ConfigError for contradicting settings and for
    a file that cannot be used.
    """
    shape = routing_shape(spec)
    path = None if config.expert_statistics is None else Path(config.expert_statistics)
    if shape is None:
        if path is not None or config.expert_trace is not None:
            flag = "--expert-trace" if path is None else "--expert-statistics"
            raise ConfigError(f"{flag}: this model has no experts that moeserve computes itself.")
        return None
    if not config.record_experts:
        if config.expert_trace is not None:
            raise ConfigError("--expert-trace needs --record-experts.")
        if path is not None and not goes_by_statistics(config):
            raise ConfigError("--expert-statistics needs --record-experts, or a setting that goes by the file.")
        return None
    trace_path = None if config.expert_trace is None else Path(config.expert_trace)
    for flag, file in (("--expert-statistics", path), ("--expert-trace", trace_path)):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{flag} {file}: there is no folder {file.parent}.")
    known = _read(config, model_dir, shape)
    return RecordingPlan(shape, known or first_statistics(shape), statistics_key(model_dir), path, trace_path)


def _read(config: ServeConfig, model_dir: Path, shape: RoutingShape) -> RoutingStatistics | None:
    statistics = read_statistics(model_dir, config)
    if statistics is None:
        return None
    spec = statistics.spec
    if (spec.num_layers, spec.num_experts, spec.top_k) != (shape.num_layers, shape.num_experts, shape.top_k):
        raise ConfigError(
            f"The statistics file {config.expert_statistics} is of another shape than the model; "
            "remove it or name another."
        )
    return statistics


def routing_shape(spec: ModelSpec) -> RoutingShape | None:
    """Return the shape of a step's routing; None for a model without experts."""
    if spec.moe is None or not spec.moe_layers:
        return None
    return RoutingShape(len(spec.moe_layers), spec.moe.num_experts, spec.moe.gate.top_k, spec.last_layer_is_partial)


def first_statistics(shape: RoutingShape) -> RoutingStatistics:
    """Return the empty statistics that a service begins with."""
    # Nobody asks which tokens chose which experts of the first layer.
    spec = StatisticsSpec(shape.num_layers, shape.num_experts, shape.top_k, max_rows_per_step=_PAIR_ROWS, num_tokens=0)
    return RoutingStatistics(spec)


class SentCounter(StepObserver[StepPlan, StepResult]):
    """Adds to each result the rows and bytes that the rank had sent when the step was launched."""

    def __init__(self, sent: Callable[[], list[int]]) -> None:
        self._sent = sent
        self._step = 0
        # By the number of a step in flight.
        self._at_launch: dict[int, list[int]] = {}

    def begin(self, plan: StepPlan) -> None:
        self._step = plan.step

    def launched(self) -> None:
        self._at_launch[self._step] = self._sent()

    def end(self, plan: StepPlan, result: StepResult) -> None:
        result.sent = self._at_launch.pop(plan.step)

    def abandon(self, plan: StepPlan) -> None:
        self._at_launch.pop(plan.step, None)


class LinkCounts(RanksObserver):
    """Keeps the newest counts of sent rows and bytes from every rank."""

    def __init__(self, num_ranks: int) -> None:
        self._sent = [[0] * (2 * num_ranks) for _ in range(num_ranks)]

    def end(self, plans: Sequence[StepPlan], results: Sequence[StepResult]) -> None:
        for rank, result in enumerate(results):
            if result.sent is not None:
                self._sent[rank] = result.sent

    def links(self) -> list[list[int]]:
        """Return [from, to, rows, bytes] for every pair of ranks."""
        num_ranks = len(self._sent)
        return [
            [source, target, sent[target], sent[num_ranks + target]]
            for source, sent in enumerate(self._sent)
            for target in range(num_ranks)
            if target != source
        ]
