"""Statistics for a report: from a statistics file, or counted from a routing trace."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from experts.routing.statistics import RoutingStatistics, StatisticsSpec
from experts.routing.statistics_file import StatisticsError, load_statistics
from experts.routing.trace_file import TraceError, load_trace
from experts.routing.traces import RoutingTrace

_TOKENS_AT_ONCE = 64


class ReportError(Exception):
    """A file that cannot be drawn; the message is one sentence."""


def read_report_source(path: Path) -> RoutingStatistics:
    """The statistics in either kind of file. Raises ReportError."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise ReportError(f"There is no file {path}.") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise ReportError(f"The file {path} holds neither statistics nor a trace: {error}.") from None
    try:
        if metadata.get("kind") == "routing trace":
            return count_trace(load_trace(path))
        return load_statistics(path, metadata.get("model", ""))
    except (StatisticsError, TraceError) as error:
        raise ReportError(str(error)) from None


def count_trace(trace: RoutingTrace) -> RoutingStatistics:
    """Every token of the trace, each counting the same."""
    num_layers, num_tokens, top_k = trace.ids.shape
    spec = StatisticsSpec(num_layers, trace.num_experts, top_k, half_life=10**12)
    statistics = RoutingStatistics(spec)
    for first in range(0, num_tokens, _TOKENS_AT_ONCE):
        statistics.update(trace.ids[:, first : first + _TOKENS_AT_ONCE])
    return statistics
