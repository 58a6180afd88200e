"""What the engine tells of its experts, and what an operator may command about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experts.placement import Placement
from experts.placement_metrics import balancedness
from moeserve.expert_statistics import ExpertRecording
from moeserve.messages import ExpertStats


class ExpertCommandError(Exception):
    """A command that cannot be carried out; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """layers: the numbers of the model's layers that have experts."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    num_ranks: int


class ExpertMonitor:
    """Reads from those that own what is told. recording is None where nothing is recorded."""

    def __init__(
        self,
        facts: ExpertFacts,
        recording: ExpertRecording | None,
        placement: Callable[[], Placement | None],
        run_dir: Path,
    ) -> None:
        self._facts = facts
        self._recording = recording
        self._placement = placement
        self._trace_file = run_dir / "expert-trace.safetensors"

    def stats(self) -> ExpertStats:
        """The part of the engine's counters that is about experts."""
        recording = self._recording
        if recording is None:
            return ExpertStats()
        placement = self._placement()
        load = recording.recorder.statistics().load()
        remote = recording.remote_ranks
        return ExpertStats(
            tokens_recorded=recording.recorder.num_tokens,
            expert_balancedness=_balance_of_experts(load),
            rank_balancedness=None if placement is None else balancedness(load, placement).tolist(),
            remote_rows=None if placement is None else [remote.num_sent, remote.num_rows],
        )

    def command(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """What a command of `Control` gave. Raises ExpertCommandError."""
        try:
            match name:
                case "experts":
                    return self._describe()
                case "save_expert_statistics":
                    return self._save()
                case "start_expert_trace":
                    return self._start_trace(**arguments)
                case "stop_expert_trace":
                    return self._stop_trace()
        except OSError as error:
            raise ExpertCommandError(f"The file cannot be written ({error.strerror or error}).") from None
        raise ExpertCommandError(f"unknown command {name!r}")

    def _describe(self) -> dict[str, Any]:
        facts, recording, placement = self._facts, self._recording, self._placement()
        described: dict[str, Any] = {
            "layers": list(facts.layers),
            "num_experts": facts.num_experts,
            "top_k": facts.top_k,
            "num_ranks": facts.num_ranks,
        }
        if placement is not None:
            described["placement"] = {"ranks": [[list(ranks) for ranks in layer] for layer in placement.ranks]}
        if recording is not None:
            described |= self._describe_recording(recording, placement)
        return described

    def _describe_recording(self, recording: ExpertRecording, placement: Placement | None) -> dict[str, Any]:
        statistics = recording.recorder.statistics()
        load = statistics.load()
        balance: dict[str, Any] = {"experts": _balance_of_experts(load)}
        if placement is not None:
            balance["ranks"] = balancedness(load, placement).tolist()
        trace = recording.trace
        return {
            "load": np.round(load.astype(np.float64), 3).tolist(),
            "balancedness": balance,
            "recording": {
                "tokens": recording.recorder.num_tokens,
                "half_life": statistics.spec.half_life,
                "saved_to_file": recording.path is not None,
                "trace": None if trace is None else {"tokens": trace.num_tokens, "max_tokens": trace.max_tokens},
            },
        }

    def _save(self) -> dict[str, Any]:
        recording = self._recorded()
        if recording.path is None:
            raise ExpertCommandError("There is no file to save to: the service runs without --expert-statistics.")
        recording.save()
        return {"tokens": recording.recorder.num_tokens}

    def _start_trace(self, max_tokens: int | None = None, token_ids: bool = False) -> dict[str, Any]:
        recording = self._recorded()
        if recording.trace is not None:
            raise ExpertCommandError("A trace is being recorded already.")
        return {"max_tokens": recording.start_trace(with_token_ids=token_ids, max_tokens=max_tokens).max_tokens}

    def _stop_trace(self) -> dict[str, Any]:
        """Hands the trace over as a file in the run directory, which the frontend removes."""
        recording = self._recorded()
        if recording.trace is None:
            raise ExpertCommandError("No trace is being recorded.")
        tokens = recording.end_trace(self._trace_file)
        if not tokens:
            raise ExpertCommandError("The trace is empty: nothing was computed while it was recorded.")
        return {"tokens": tokens, "file": str(self._trace_file)}

    def _recorded(self) -> ExpertRecording:
        if self._recording is None:
            raise ExpertCommandError("Nothing is recorded: the service runs with --no-record-experts.")
        return self._recording


def _balance_of_experts(load: np.typing.NDArray[np.float32]) -> list[float]:
    """Per layer the mean load of an expert over that of the busiest; 1 where there is none."""
    most = load.max(axis=1)
    balance: list[float] = np.divide(load.mean(axis=1), most, out=np.ones_like(most), where=most > 0).tolist()
    return balance
