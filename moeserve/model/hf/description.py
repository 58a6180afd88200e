"""The composition of a model on transformers' code, counted on its empty modules: parameters and kinds of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from moeserve.model.hf.geometry import Geometry, LayerMemory
from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.sizes import ParameterCount

# The names that configurations give to layers that are only a feed-forward block; mixers then have none beside them.
_BLOCKS = frozenset(("mlp", "moe"))


def layers_of(code: ModellingCode) -> list[nn.Module]:
    return [module for module in code.body.modules() if isinstance(module, GradientCheckpointingLayer)]


def count_parameters(code: ModellingCode, top_k: int | None) -> ParameterCount:
    """Count the parameters that a checkpoint of an empty model holds. top_k: experts per token, None if unknown."""
    state, tied = code.outer.state_dict(), code.outer.all_tied_weights_keys
    total = sum(tensor.numel() for name, tensor in state.items() if name not in tied)
    experts = chosen = 0
    counted: set[str] = set()
    for prefix, module in code.outer.named_modules():
        count = num_experts(module)
        if not count:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            counted.add(f"{prefix}.{name}")
            experts += parameter.numel()
            chosen += parameter.numel() // count * (top_k or 0)
    missed = any(
        ".experts." in name and name not in counted and parameter.dim() > 1 and "router" not in name
        for name, parameter in code.outer.named_parameters()
    )
    if missed or (experts and top_k is None):
        return ParameterCount(total, None, experts)
    return ParameterCount(total, total - experts + chosen, experts)


def count_widened(code: ModellingCode, ours: Collection[nn.Module]) -> int:
    """Count the parameters of experts that are not ours: in memory they are as wide as activations, whatever the
    checkpoint has."""
    others = (module for module in code.outer.modules() if module not in ours and num_experts(module))
    return sum(parameter.numel() for module in others for parameter in module.parameters(recurse=False))


def num_experts(module: nn.Module) -> int:
    """Return the number of experts that a module holds in matrices [experts, rows, columns]; 0 for any other module."""
    if not type(module).__name__.endswith("Experts"):
        return 0
    return min((p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3), default=0)


def kinds_of_layers(code: ModellingCode, geometry: Geometry, top_k: int | None) -> tuple[tuple[int, str], ...]:
    """Return (number of layers, kind) of mixers, then of feed-forward blocks, both with the most frequent first."""
    kinds = Counter(_mixers(code, geometry))
    blocks = Counter(_blocks(code, top_k))
    return tuple((number, kind) for kind, number in (*kinds.most_common(), *blocks.most_common()))


def _mixers(code: ModellingCode, geometry: Geometry) -> Iterator[str]:
    layers, memories = layers_of(code), geometry.layers
    # There may be several mixers in a layer, and layers that keep nothing of their own.
    names = _names_of_layers(code.config, len(memories))
    for number, (name, memory) in enumerate(zip(names, memories, strict=True)):
        layer = layers[number * len(layers) // len(memories)]
        if name not in _BLOCKS:
            yield _mixer(name, memory, code.config, latent=any(hasattr(part, "expand_kv") for part in layer.modules()))
    for _ in range(len(layers) - len(memories)):
        yield "attention over the keys of another layer"


def _mixer(name: str | None, memory: LayerMemory, config: Any, *, latent: bool) -> str:
    attention = "latent attention" if latent else "attention"
    window = _value(config, "sliding_window")
    windowed = f"{attention} over {window:,} tokens" if isinstance(window, int) else f"sliding {attention}"
    if name is None and not (memory.pools or memory.opaque):
        kind = "recurrent states"
    elif name is None:  # Then all layers have the window, if there is one.
        kind = attention if window is None else windowed
    elif name in ("full_attention", "hybrid", "indexed_attention"):
        kind = attention
    elif name in ("sliding_attention", "hybrid_sliding"):
        kind = windowed
    else:
        kind = "a short convolution" if name == "conv" else name.replace("_", " ")
    if "indexer_keys" in memory.pools or "idx_keys" in memory.pools:
        kind += " with an indexer"
    elif name == "indexed_attention":
        kind += " by another layer's indexer"
    return f"{kind} and states" if memory.pools and memory.states else kind


def _blocks(code: ModellingCode, top_k: int | None) -> Iterator[str]:
    layers = layers_of(code)
    names = _names_of_layers(code.config, len(layers))
    alone = bool(_BLOCKS.intersection(names))
    for name, layer in zip(names, layers, strict=True):
        counts = [count for module in layer.modules() if (count := num_experts(module))]
        if counts:
            shared = any("shared" in part and part.rpartition(".")[2] != "gate" for part, _ in layer.named_modules())
            per_token = "" if top_k is None else f", {top_k} per token"
            yield f"{counts[0]} experts{per_token}{' and a shared one' if shared else ''}"
        elif not alone or name in _BLOCKS:
            experts = any(part.endswith("experts") for part, _ in layer.named_modules())
            yield "experts in a form of transformers' own" if experts else "a dense block"


def _names_of_layers(config: Any, count: int) -> Sequence[str | None]:
    """Return the configuration's names for `count` layers; all None if it does not name each of them."""
    names = list(_value(config, "layer_types") or ())
    return names if len(names) == count else [None] * count


def _value(config: Any, name: str) -> Any:
    """Return a value of a configuration; None if it has none, or if the value differs between layers."""
    try:
        return getattr(config, name)
    except Exception:  # Configurations of several kinds of layers have an exception of their own.
        return None
