"""Simulate tokens per second by the way in which ranks share a model: `python -m benchmarks.ways`.

Nothing is measured: it prints what `moeserve.engine.ways` says of models by their config.json, and its assumptions, as
the tables of docs/benchmarks/ways.md.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from moeserve.engine.model_ways import num_kv_heads, shard_counts
from moeserve.engine.ways import ETHERNET, NVLINK, PCIE, Link, ModelCosts, RankMachine, advised, estimates_of
from moeserve.model.families import build_spec, load_config
from moeserve.model.kv_pool import kv_block_bytes
from moeserve.model.sizes import count_parameters
from moeserve.model.spec import DecoderSpec
from moeserve.settings.quantities import show_size

_CONTEXT = 8192  # tokens of each request
_GIB = 2**30

MODELS: Mapping[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "Llama-3.3-70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
}


@dataclass(frozen=True, slots=True)
class Site:
    """Several machines or cards. many: the requests of its second figure."""

    name: str
    num_ranks: int
    machine: RankMachine
    link: Link
    many: int


# A layer took 44 to 72 us beside the reading on an H200, whose copies reach 0.89 of its data sheet
# (docs/benchmarks/decode-nvidia-h200.md). The other figures are of data sheets.
SITES = (
    Site("8 H100 of 80 GB with NVLink", 8, RankMachine(70 * _GIB, 0.89 * 3350e9, 50e-6), NVLINK, 64),
    Site("4 RTX 3090 of 24 GB over PCIe", 4, RankMachine(21 * _GIB, 0.89 * 936e9, 50e-6), PCIE, 16),
    Site("2 workstations over 10 GbE", 2, RankMachine(112 * _GIB, 80e9, 50e-6), ETHERNET, 16),
)
BITS = {"bfloat16": 16.0, "4 bits": 4.5}


def costs_of(config: Mapping[str, Any], bits: float) -> ModelCosts:
    """Return the costs of a model whose weights have this many bits, and whose keys and values have 16."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        spec = build_spec(load_config(Path(folder)))
    return _costs_of(spec, bits / 8)


def _costs_of(spec: DecoderSpec, width: float) -> ModelCosts:
    import torch

    total = count_parameters(spec).total
    embedding = spec.vocab_size * spec.hidden_size
    moe, num_moe_layers = spec.moe, len(spec.moe_layers)
    expert = 0 if moe is None else 3 * spec.hidden_size * moe.intermediate_size
    num_experts = 0 if moe is None else moe.num_experts
    others = total - embedding - num_moe_layers * num_experts * expert
    return ModelCosts(
        spec.num_layers,
        spec.hidden_size,
        shard_counts(spec),
        num_kv_heads(spec),
        int(embedding * width),
        int(others * width),
        kv_block_bytes(spec.kv_layers, 1, torch.bfloat16),
        num_moe_layers,
        num_experts,
        0 if moe is None else moe.gate.top_k,
        int(expert * width),
    )


def lines() -> Iterator[str]:
    for site in SITES:
        machine, link = site.machine, site.link
        yield f"## {site.name}"
        yield ""
        yield from wrap(
            f"Each rank has {show_size(machine.num_bytes)} for weights and KV, reads "
            f"{machine.bytes_per_second / 1e9:,.0f} GB/s and takes {1e6 * machine.layer_s:.0f} us more for a layer. "
            f"{link.name}: {link.bytes_per_second / 1e9:,.1f} GB/s, {1e6 * link.seconds:.0f} us. Contexts have "
            f"{_CONTEXT:,} tokens.",
            120,
        )
        yield ""
        yield f"| model | way | weights of a rank | one request, tokens/s | {site.many} requests, tokens/s |"
        yield "|---|---|---|---|---|"
        for name, config in MODELS.items():
            for form, bits in BITS.items():
                yield from _rows(f"{name}, {form}", costs_of(config, bits), site)
        yield ""


def _rows(name: str, costs: ModelCosts, site: Site) -> Iterator[str]:
    machine, link = site.machine, site.link
    estimates = [
        one
        for num_ranks in (1, site.num_ranks)
        for one in estimates_of(costs, machine, link, num_ranks, site.many, _CONTEXT)
    ]
    taken = advised(estimates)
    if taken is None:
        yield f"| {name} | any | {show_size(min(one.rank_bytes for one in estimates))} or more | does not fit | |"
        return
    for one in estimates:
        speeds = "does not fit | "
        if one.fits:
            figures = zip((one.one, one.many), taken, strict=True)
            speeds = " | ".join(_shown(figure, is_best=one is best) for figure, best in figures)
        yield f"| {name} | {_said(one.way.flags)} | {show_size(one.rank_bytes)} | {speeds} |"


def _shown(figure: float, *, is_best: bool) -> str:
    text = f"{figure:,.0f}" if figure >= 10 else f"{figure:.1f}"
    return f"**{text}**" if is_best else text


def _said(flags: tuple[str, ...]) -> str:
    return f"`{' '.join(flags)}`" if flags else "one rank"


if __name__ == "__main__":
    print("\n".join(lines()))
