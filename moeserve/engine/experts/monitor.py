"""Operators' view of a service's experts (metrics, descriptions, the strategy in use), and their commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experts.memory.residency import ExpertMemoryStats
from experts.placement.placement import Placement, balancedness
from experts.placement.rebalance import RebalanceStats
from experts.routing.choices import RoutingStatistics
from moeserve.config import ServeConfig
from moeserve.engine.experts.observe import ExpertRecording
from moeserve.engine.file_writer import FileJob
from moeserve.wire import FeatureSamples

if TYPE_CHECKING:
    from experts.prediction.prefetcher import PrefetchObserver

# The number of recorded tokens from which on it is known whether experts come in groups.
_TELLING_TOKENS = 64

# Commands that may return a FileJob.
FILE_COMMANDS = ("save_expert_statistics", "stop_expert_trace")


class ExpertCommandError(Exception):
    """A command that cannot be carried out; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """The size of the model's experts. layers: the numbers of the layers that have experts."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int


@dataclass(frozen=True, slots=True)
class ExpertSources:
    """The functions that the monitor calls; None for a feature that this service does not have.

    links: [from, to, rows, bytes] for every pair of ranks. memory: the expert memory of each rank. prefetches: whether
    experts are loaded ahead of their use. strategy: see `expert_strategy`.
    """

    placement: Callable[[], Placement | None] = lambda: None
    placement_version: Callable[[], int] = lambda: 0
    links: Callable[[], list[list[int]]] | None = None
    rebalancing: Callable[[], RebalanceStats] | None = None
    memory: Callable[[], Sequence[ExpertMemoryStats]] | None = None
    prefetches: bool = False
    strategy: Callable[[], dict[str, Any]] | None = None


class ExpertMonitor:
    """Gathers metrics and descriptions from `sources`, and carries out commands. recording: None if it is off."""

    def __init__(
        self, facts: ExpertFacts, recording: ExpertRecording | None, sources: ExpertSources, run_dir: Path
    ) -> None:
        self._facts = facts
        self._recording = recording
        self._sources = sources
        self._trace_file = run_dir / "expert-trace.safetensors"

    def samples(self) -> FeatureSamples:
        """Return rows `[*labels, value]` by name of metric, for the table in `moeserve.frontend.metrics`.

        Leave out the metrics of features that this service does not have.
        """
        sources, recording = self._sources, self._recording
        samples: FeatureSamples = {}
        if recording is not None:
            samples |= _recording_samples(recording, sources.placement())
        if sources.links is not None:
            links = sources.links()
            samples["moeserve_expert_link_rows"] = [[source, target, rows] for source, target, rows, _ in links]
            samples["moeserve_expert_link_bytes"] = [
                [source, target, num_bytes] for source, target, _, num_bytes in links
            ]
        if sources.memory is not None:
            ranks = sources.memory()
            samples |= _memory_samples(ranks) | _host_samples(ranks)
            if sources.prefetches:
                samples |= _prefetch_samples(ranks)
        if sources.rebalancing is not None:
            samples |= _rebalancing_samples(sources.rebalancing(), sources.placement_version())
        return samples

    def command(self, name: str, arguments: dict[str, Any]) -> dict[str, Any] | FileJob:
        """Carry out a command of `Control` and return its answer. Raise ExpertCommandError.

        A job has yet to write its file, on a thread that may wait for a disk, and then gives the answer.
        """
        match name:
            case "experts":
                return self._describe()
            case "save_expert_statistics":
                return self._save()
            case "start_expert_trace":
                return self._start_trace(**arguments)
            case "stop_expert_trace":
                return self._stop_trace()
        raise ExpertCommandError(f"unknown command {name!r}")

    def _describe(self) -> dict[str, Any]:
        facts, sources, recording = self._facts, self._sources, self._recording
        placement = sources.placement()
        described: dict[str, Any] = {
            "layers": list(facts.layers),
            "num_experts": facts.num_experts,
            "top_k": facts.top_k,
            "num_ranks": 1 if placement is None else placement.num_ranks,
        }
        if placement is not None:
            described["placement"] = {
                "version": sources.placement_version(),
                "ranks": [[list(ranks) for ranks in layer] for layer in placement.ranks],
            }
        if sources.rebalancing is not None:
            described["rebalancing"] = asdict(sources.rebalancing())
        if sources.strategy is not None:
            described["strategy"] = sources.strategy()
        if sources.memory is not None:
            ranks = sources.memory()
            described["residency"] = {
                "resident": [of_rank.resident for of_rank in ranks],
                "stall_seconds": [round(of_rank.stall_seconds, 6) for of_rank in ranks],
                "hits": [of_rank.counters.num_hits for of_rank in ranks],
                "late": [of_rank.counters.num_late for of_rank in ranks],
                "misses": [of_rank.counters.num_misses for of_rank in ranks],
            }
            if any(of_rank.costs is not None for of_rank in ranks):
                described["compute"] = [_compute(of_rank) for of_rank in ranks]
            if sources.prefetches:
                described["recall"] = [_recall(of_rank) for of_rank in ranks]
        if recording is not None:
            described |= self._describe_recording(recording, placement)
        return described

    def _describe_recording(self, recording: ExpertRecording, placement: Placement | None) -> dict[str, Any]:
        statistics = recording.statistics()
        load = statistics.load()
        balance: dict[str, Any] = {"experts": _balance_of_experts(load)}
        if placement is not None:
            balance["ranks"] = balancedness(load, placement).tolist()
        trace = recording.trace
        return {
            "load": np.round(load.astype(np.float64), 3).tolist(),
            "balancedness": balance,
            "tied": _come_in_groups(statistics),
            "recording": {
                "tokens": recording.recorder.num_tokens,
                "half_life": statistics.spec.half_life,
                "saved_to_file": recording.path is not None,
                "trace": None if trace is None else {"tokens": trace.num_tokens, "max_tokens": trace.max_tokens},
            },
        }

    def _save(self) -> FileJob:
        recording = self._recorded()
        if recording.path is None:
            raise ExpertCommandError("There is no file to save to: the service runs without --expert-statistics.")
        return FileJob(recording.saving(), {"tokens": recording.recorder.num_tokens})

    def _start_trace(self, max_tokens: int | None = None, token_ids: bool = False) -> dict[str, Any]:
        recording = self._recorded()
        recording.gather()
        if recording.trace is not None:
            raise ExpertCommandError("A trace is being recorded already.")
        return {"max_tokens": recording.start_trace(with_token_ids=token_ids, max_tokens=max_tokens).max_tokens}

    def _stop_trace(self) -> FileJob:
        """End the trace. Its file in the run directory is removed by the frontend."""
        recording = self._recorded()
        if recording.trace is None:
            raise ExpertCommandError("No trace is being recorded.")
        tokens, write = recording.ending_trace(self._trace_file)
        if not tokens:
            raise ExpertCommandError("The trace is empty: nothing was computed while it was recorded.")
        return FileJob(write, {"tokens": tokens, "file": str(self._trace_file)})

    def _recorded(self) -> ExpertRecording:
        if self._recording is None:
            raise ExpertCommandError("Nothing is recorded: the service runs with --no-record-experts.")
        return self._recording


def file_failure(error: OSError) -> str:
    """Return the sentence for the operator whose file cannot be written."""
    return f"The file cannot be written ({error.strerror or error})."


def _recording_samples(recording: ExpertRecording, placement: Placement | None) -> FeatureSamples:
    load = recording.statistics().load()
    balance: list[list[str | int | float]] = [
        [layer, "experts", value] for layer, value in enumerate(_balance_of_experts(load))
    ]
    samples: FeatureSamples = {"moeserve_expert_recorded_tokens": [[recording.recorder.num_tokens]]}
    if placement is not None:
        remote = recording.remote_ranks
        balance += [[layer, "ranks", value] for layer, value in enumerate(balancedness(load, placement).tolist())]
        samples["moeserve_expert_remote_rows"] = [[remote.num_sent]]
        samples["moeserve_expert_rows"] = [[remote.num_rows]]
    samples["moeserve_expert_balancedness"] = balance
    return samples


def _memory_samples(ranks: Sequence[ExpertMemoryStats]) -> FeatureSamples:
    return {
        "moeserve_expert_stall_seconds": _by_rank(of_rank.stall_seconds for of_rank in ranks),
        "moeserve_expert_hits": _by_rank(of_rank.counters.num_hits for of_rank in ranks),
        "moeserve_expert_misses": _by_rank(of_rank.counters.num_misses for of_rank in ranks),
        "moeserve_expert_evictions": _by_rank(of_rank.counters.num_evictions for of_rank in ranks),
        "moeserve_expert_demand_bytes": _by_rank(of_rank.counters.demand_bytes for of_rank in ranks),
        "moeserve_expert_resident": _by_rank(sum(map(len, of_rank.resident)) for of_rank in ranks),
    }


def _host_samples(ranks: Sequence[ExpertMemoryStats]) -> FeatureSamples:
    """Return metrics of experts that the host computes in place of a device, none where it computes none."""
    if all(of_rank.costs is None for of_rank in ranks):
        return {}
    return {
        "moeserve_expert_computed_on_host": _by_rank(of_rank.counters.num_elsewhere for of_rank in ranks),
        "moeserve_expert_host_seconds": _by_rank(of_rank.host_seconds for of_rank in ranks),
    }


def _prefetch_samples(ranks: Sequence[ExpertMemoryStats]) -> FeatureSamples:
    """Return metrics of prefetching. The label `distance` counts layers from a prediction to the predicted one."""
    counters = [of_rank.counters for of_rank in ranks]
    sources = [(rank, count) for rank, of_rank in enumerate(ranks) for count in of_rank.recall]
    return {
        "moeserve_expert_predictor_seconds": _by_rank(of_rank.predictor_seconds for of_rank in ranks),
        "moeserve_expert_late": _by_rank(of_rank.num_late for of_rank in counters),
        "moeserve_expert_prefetched_bytes": _by_rank(of_rank.prefetch_bytes for of_rank in counters),
        "moeserve_expert_prefetch_bytes": [
            [rank, outcome, getattr(of_rank, f"{outcome}_bytes")]
            for rank, of_rank in enumerate(counters)
            for outcome in ("useful", "late", "wasted", "cancelled")
        ],
        "moeserve_expert_foreseeable": _by_distance(of_rank.num_foreseeable for of_rank in counters),
        "moeserve_expert_foreseen": _by_distance(of_rank.num_foreseen for of_rank in counters),
        "moeserve_expert_ranked_choices": [
            [rank, count.source, count.distance, count.num_chosen] for rank, count in sources
        ],
        "moeserve_expert_recalled_choices": [
            [rank, count.source, count.distance, count.num_recalled] for rank, count in sources
        ],
    }


def _rebalancing_samples(stats: RebalanceStats, placement_version: int) -> FeatureSamples:
    samples: FeatureSamples = {
        "moeserve_expert_placement_version": [[placement_version]],
        "moeserve_expert_migrations": [[stats.num_migrations]],
        "moeserve_expert_migration_failures": [[stats.num_failures]],
        "moeserve_expert_migrated": [[stats.num_experts_loaded]],
    }
    if stats.seconds_since_success is not None:
        samples["moeserve_expert_migration_age_seconds"] = [[stats.seconds_since_success]]
    return samples


def _by_rank(values: Iterable[float]) -> list[list[str | int | float]]:
    return [[rank, value] for rank, value in enumerate(values)]


def _by_distance(ranks: Iterable[Sequence[int]]) -> list[list[str | int | float]]:
    return [
        [rank, distance, count] for rank, of_rank in enumerate(ranks) for distance, count in enumerate(of_rank, start=1)
    ]


def _compute(stats: ExpertMemoryStats) -> dict[str, Any]:
    """Return what the host has computed in place of a device, and the times in ms by which this is decided."""
    costs = stats.costs
    described: dict[str, Any] = {
        "on_host": stats.counters.num_elsewhere,
        "host_seconds": round(stats.host_seconds, 6),
    }
    if costs is not None:
        described["ms"] = {
            "copy": _in_ms(costs.copy),
            "host_call": _in_ms(costs.call),
            "host_expert": {str(rows): _in_ms(seconds) for rows, seconds in costs.by_rows},
        }
    return described


def _in_ms(seconds: float) -> float:
    return round(1000 * seconds, 4)


def _recall(stats: ExpertMemoryStats) -> dict[str, Any]:
    """Return two shares of the needed experts, each by the distance in layers.

    asked_for: the share of experts requested 1, 2, 3 layers ahead; None where no request was possible. sources: the
    share that each source had ranked among its first k.
    """
    counters = stats.counters
    sources: dict[str, dict[str, float]] = {}
    for count in stats.recall:
        recall = round(count.num_recalled / max(count.num_chosen, 1), 4)
        sources.setdefault(count.source, {})[str(count.distance)] = recall
    return {
        "asked_for": [
            round(foreseen / foreseeable, 4) if foreseeable else None
            for foreseen, foreseeable in zip(counters.num_foreseen, counters.num_foreseeable, strict=True)
        ],
        "sources": sources,
    }


def _come_in_groups(statistics: RoutingStatistics) -> bool:
    """Return True if each expert of the first layer that was chosen lately came with the same other one every time.

    This is so in demos whose experts are tied. Few tokens prove nothing.
    """
    recent, spec = statistics.recent()[0], statistics.spec
    if len(recent) < _TELLING_TOKENS or spec.top_k == spec.num_experts:
        return False
    chosen = np.zeros((len(recent), spec.num_experts), np.float32)
    np.put_along_axis(chosen, recent.astype(np.int64), 1, axis=1)
    together = chosen.T @ chosen
    alone = together.diagonal().copy()
    np.fill_diagonal(together, 0)
    return bool((together.max(axis=1) == alone).all())


def _balance_of_experts(load: np.typing.NDArray[np.float32]) -> list[float]:
    """Return for each layer the mean load of its experts over the load of the busiest; 1 without any load."""
    most = load.max(axis=1)
    balance: list[float] = np.divide(load.mean(axis=1), most, out=np.ones_like(most), where=most > 0).tolist()
    return balance


def expert_strategy(
    config: ServeConfig, prefetcher: PrefetchObserver | None, dispatch: str | None = None, *, all_fit: bool = False
) -> dict[str, Any]:
    """Describe the present choices for evictions, prefetching, placement and dispatch, as JSON for operators.

    prefetcher: None where nothing is loaded ahead. dispatch: the shape of dispatch in use, None on a single rank.
    all_fit: whether `--expert-memory` holds all experts, so that nothing is evicted.
    """
    strategy: dict[str, Any] = {}
    if config.expert_memory is not None and not all_fit:
        strategy["eviction"] = config.expert_policy
        strategy["prefetch"] = {
            "source": "off" if prefetcher is None else config.expert_prefetch,
            "is_on": prefetcher is not None and prefetcher.is_on,
        }
        if prefetcher is not None and prefetcher.gains:
            strategy["prefetch"]["saved"] = [
                {"rows": rows, "free_core": free, "share": round(share, 4)} for rows, free, share in prefetcher.gains
            ]
    if dispatch is not None:
        strategy["placement"] = config.placement
        strategy["dispatch"] = dispatch
    return strategy
