"""Draw routing statistics as PNG: load, affinity between layers, balance. Only drawing needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from experts.placement.balanced import load_balanced
from experts.placement.placement import PlacementError, balancedness, contiguous
from experts.routing.choices import Affinity, RoutingStatistics, StatisticsSpec
from experts.routing.files import RoutingTrace, StatisticsError, TraceError, load_statistics, load_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 110
_LAYERS_SHOWN = 6
_RANKS = (2, 4, 8)
_COLOURS = ("#33658a", "#f26419", "#55864c")
_TOKENS_AT_ONCE = 64


class ReportError(Exception):
    """A file that cannot be drawn; the message is one sentence."""


def draw_report(statistics: RoutingStatistics, folder: Path) -> list[Path]:
    """Write the pictures into a folder and return their paths. Raise ReportError without matplotlib."""
    drawn = {
        "experts-load.png": _draw_load(statistics.load()),
        "experts-affinity.png": _draw_affinity(statistics),
        "experts-balance.png": _draw_balance(statistics.load()),
    }
    paths = []
    for name, figure in drawn.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=_DPI, metadata={"Software": None})
            paths.append(folder / name)
    return paths


def _draw_load(load: NDArray[np.float32]) -> Figure:
    """Draw a heat map of the load relative to an even share of the layer. load: [L, E]."""
    mean = load.mean(axis=1, keepdims=True)
    relative = np.divide(load, mean, out=np.zeros_like(load), where=mean > 0)
    num_layers, num_experts = load.shape
    figure = _new_figure(min(12, 2.5 + 0.3 * num_experts), min(10, 1.8 + 0.17 * num_layers))
    axes = figure.subplots()
    image = axes.imshow(relative, aspect="auto", cmap="viridis", vmin=0, vmax=max(2.0, float(relative.max())))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer with experts")
    axes.set_title("Load, 1 is an even share")
    figure.colorbar(image, ax=axes, label="times an even share")
    return figure


def _draw_affinity(statistics: RoutingStatistics) -> Figure | None:
    """Draw P(expert of the next layer | expert), for a few layers from the first to the last."""
    if 1 not in statistics.spec.distances():
        return None
    conditional = Affinity.of(statistics).conditional(1)
    shown = np.unique(np.linspace(0, len(conditional) - 1, _LAYERS_SHOWN).round().astype(int))
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = _new_figure(3.1 * columns + 0.9, 2.9 * rows + 0.3)
    grid = figure.subplots(rows, columns, squeeze=False)
    top = float(conditional[shown].max())
    image: Any = None
    for place, axes in enumerate(grid.flat):
        if place >= len(shown):
            axes.set_axis_off()
            continue
        layer = int(shown[place])
        image = axes.imshow(conditional[layer], cmap="magma", vmin=0, vmax=top, interpolation="nearest")
        axes.set_title(f"layer {layer} to {layer + 1}", fontsize="medium")
        axes.set_xlabel("expert of the next layer")
        axes.set_ylabel("expert")
    figure.colorbar(image, ax=grid, label="probability that it follows")
    return figure


def _draw_balance(load: NDArray[np.float32]) -> Figure:
    """Draw mean over maximum load by layer: of the experts, and of ranks that hold them in order or placed by load."""
    num_layers, num_experts = load.shape
    figure = _new_figure(8, 4)
    axes = figure.subplots()
    layers = np.arange(num_layers)
    most = load.max(axis=1)
    of_experts = np.divide(load.mean(axis=1), most, out=np.ones_like(most), where=most > 0)
    axes.plot(layers, of_experts, color="#777777", label="experts")
    for num_ranks, colour in zip(_RANKS, _COLOURS, strict=True):
        try:
            in_order = contiguous(num_layers, num_experts, num_ranks)
            by_load = load_balanced(load, num_ranks)
        except PlacementError:
            continue
        axes.plot(layers, balancedness(load, in_order), color=colour, label=f"{num_ranks} ranks, in order")
        axes.plot(layers, balancedness(load, by_load), color=colour, linestyle=":", label=f"{num_ranks} ranks, by load")
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("layer with experts")
    axes.set_ylabel("mean over maximum of the load")
    axes.set_title("Balance, 1 is even")
    axes.legend(fontsize="small", ncols=2)
    return figure


def _new_figure(width: float, height: float) -> Figure:
    """Return an empty figure. Sizes are in inches."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ReportError("Pictures need matplotlib, which is not installed: pip install 'moeserve[report]'.") from None
    return Figure(figsize=(width, height), layout="constrained")


def read_report_source(path: Path) -> RoutingStatistics:
    """Return the statistics in a statistics file, or count the choices in a routing trace. Raise ReportError."""
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
    """Count every token of the trace, each with the same weight."""
    num_layers, num_tokens, top_k = trace.ids.shape
    spec = StatisticsSpec(num_layers, trace.num_experts, top_k, half_life=10**12)
    statistics = RoutingStatistics(spec)
    for first in range(0, num_tokens, _TOKENS_AT_ONCE):
        statistics.update(trace.ids[:, first : first + _TOKENS_AT_ONCE])
    return statistics
