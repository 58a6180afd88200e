"""How much of their prompts models with sliding windows find cached, with window blocks and without.

    python -m benchmarks.windows [--agents 48 --turns 10 --memory 16000 32000]

The scheduler, the prefix cache and the memory plan are the service's; nothing is computed, so these are counts that any
machine gives. Both columns have the same memory: that of `--memory` tokens in all layers. The load is that of
`moeserve bench serve --workload agents`, one token per word. `--ratio` tries another number of KV blocks for a window
block than the memory plan chooses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.snapshots import NUM_SLOTS, STEP_TOKENS, Load, Service, agents_load
from moeserve.bench.workloads import Shape
from moeserve.device import WindowDemand
from radix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model: how many see all tokens, how many see the last `window`."""

    name: str
    num_full: int
    num_windowed: int
    window: int


MODELS = (
    Layers("gpt-oss-20b", 12, 12, 128),
    Layers("Gemma 3 27B", 10, 52, 1024),
    Layers("Mistral 7B v0.1", 0, 32, 4096),
)


def caches(layers: Layers, memory: int, block_size: int, ratio: float | None = None) -> tuple[PrefixCache, PrefixCache]:
    """Return the caches of one pool for all layers, and of two pools.

    memory: in tokens of all layers. ratio: KV blocks for a window block, None as the memory plan chooses.
    """
    # A layer takes a byte per token: only ratios count.
    block_bytes = (layers.num_full + layers.num_windowed) * block_size
    demand = WindowDemand(layers.num_windowed * block_size, layers.window, NUM_SLOTS, STEP_TOKENS)
    total = memory // block_size * block_bytes
    num_blocks, num_window_blocks = demand.share(total, block_bytes, block_size, None)
    if ratio is not None and layers.num_full:
        window_bytes, full_bytes = layers.num_windowed * block_size, layers.num_full * block_size
        num_window_blocks = int(total / (ratio * full_bytes + window_bytes))
        num_blocks = (total - num_window_blocks * window_bytes) // full_bytes
    apart = PrefixCache(num_blocks, block_size, num_window_blocks=num_window_blocks, window=layers.window)
    return PrefixCache(memory // block_size, block_size), apart


def reused(cache: PrefixCache, load: Load) -> float:
    """Return the share of the prompts' tokens that were cached."""
    service = Service(cache)
    service.serve(load)
    return service.num_cached / service.num_prompt


def report(load: Load, memories: Sequence[int], ratio: float | None) -> list[str]:
    """Return the lines of a table."""
    lines = [
        "| layers of | memory: tokens in all layers | tokens with window blocks | reused without | reused with them |",
        "|---|---|---|---|---|",
    ]
    for layers in MODELS:
        for memory in memories:
            together, apart = caches(layers, memory, load.block_size, ratio)
            shares = " | ".join(f"{100 * reused(cache, load):.1f} %" for cache in (together, apart))
            lines.append(f"| {layers.name} | {memory:,} | {apart.num_blocks * apart.block_size:,} | {shares} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.windows", description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", type=int, default=48)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--memory", type=int, nargs="+", default=[16_000, 32_000, 64_000], help="tokens in all layers")
    parser.add_argument("--ratio", type=float, help="KV blocks for a window block")
    options = parser.parse_args(arguments)
    load = agents_load(Shape(num_agents=options.agents, num_turns=options.turns))
    print("\n".join(report(load, options.memory, options.ratio)))


if __name__ == "__main__":
    main()
