"""Describe a model from its folder: its kind, its layers, its parameters, and what its numbers take.

Kinds and sizes come from the `DecoderSpec`, or from transformers' own classes without weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moeserve.model.checkpoint import has_weights, plan_weights, read_index
from moeserve.model.families import build_spec, is_native, load_config, read_config
from moeserve.model.kv_pool import kv_block_bytes, windowed
from moeserve.model.sizes import ParameterCount, count_parameters, expected_index, stored_dtype
from moeserve.model.spec import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    MambaSpec,
    MissingWeights,
    MlaSpec,
    ModelSpec,
    ShortConvSpec,
)
from moeserve.model.state_pool import state_row_bytes
from moeserve.model.stored import TensorInfo

if TYPE_CHECKING:
    from moeserve.model.hf.sizes import SizedModel
    from moeserve.model.hf.spec import TransformersSpec

# Bits of a number, by the forms that weights and KV can take.
WIDTHS = {"float32": 32, "bfloat16": 16, "8 bits": 8, "4 bits": 4}
_RECURRENT_KINDS: dict[type, str] = {
    DeltaNetSpec: "a gated delta net",
    MambaSpec: "a Mamba-2 layer",
    ShortConvSpec: "a short convolution",
}
_UNKNOWN_OF_BORROWED_CODE = (
    "That transformers' code gives every request the numbers that it would get alone: a check at load decides that.",
)
_UNKNOWN_ACTIVE = "How many parameters one token takes: experts are in a form of transformers' own."
_UNKNOWN_STATES = "All that a request keeps: transformers holds what some layers keep in a form of its own."


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model as its folder describes it.

    index: the tensors of the checkpoint; without weights, of the checkpoint that the configuration describes.
    assumptions: sentences about facts of the model that are not known.
    """

    spec: ModelSpec
    index: Mapping[str, TensorInfo]
    assumptions: tuple[str, ...]

    @property
    def stored(self) -> tuple[tuple[str, int], ...]:
        """The dtypes of the checkpoint by bytes, the most first."""
        stored: Counter[str] = Counter()
        for info in self.index.values():
            stored[info.dtype] += info.num_bytes
        return tuple(stored.most_common())


@dataclass(frozen=True, slots=True)
class NativeModel(KnownModel):
    """A model on our own code."""

    spec: DecoderSpec


@dataclass(frozen=True, slots=True)
class BorrowedModel(KnownModel):
    """A model on transformers' code."""

    sized: SizedModel


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of a model if all its numbers had one width.

    kv_bytes: per token. state_bytes: of the recurrent layers, per request and per snapshot; at least in part in
    float32. None: not known.

    window_kv_bytes: per token in the layers that keep KV of only the last `window` tokens; not among kv_bytes.
    """

    name: str
    weights_bytes: int
    kv_bytes: int | None
    state_bytes: int | None
    window_kv_bytes: int = 0
    window: int = 0

    def context_bytes(self, num_tokens: int) -> int:
        return (self.kv_bytes or 0) * num_tokens + self.window_kv_bytes * min(num_tokens, self.window)


def examine(folder: Path) -> KnownModel:
    """Read a folder that holds config.json and perhaps weights.

    Raise ModelError, also for a type that is not served and for damaged weights.
    """
    if not is_native(read_config(folder), "auto"):
        return _examine_borrowed(folder)
    config = load_config(folder)
    spec = build_spec(config)
    assumptions = []
    try:
        index = read_index(folder)
    except MissingWeights as error:
        reason = f"{error} Sizes" if has_weights(folder) else "There are no weights: sizes"
        assumptions.append(f"{reason} go by config.json.")
        dtype = stored_dtype(config.get("dtype") or config.get("torch_dtype"))
        if dtype is None:
            assumptions.append("config.json names no dtype: bfloat16 is assumed.")
        index = expected_index(spec, dtype or "BF16")
    plan_weights(spec, index)
    return NativeModel(spec, index, tuple(assumptions))


def _examine_borrowed(folder: Path) -> BorrowedModel:
    from moeserve.model.hf.sizes import size_model  # Imported late: it loads transformers' modelling code.

    sized = size_model(folder)
    unknown = list(_UNKNOWN_OF_BORROWED_CODE)
    if sized.spec.parameters.active is None:
        unknown.append(_UNKNOWN_ACTIVE)
    if not sized.spec.keeps_snapshots:
        unknown.append(_UNKNOWN_STATES)
    return BorrowedModel(sized.spec, sized.index, (*sized.assumptions, *unknown), sized)


def implementation_of(spec: ModelSpec) -> str:
    """Return whose code computes a model, as `--model-impl` names it."""
    return "native" if isinstance(spec, DecoderSpec) else "transformers"


def parameters_of(spec: ModelSpec) -> ParameterCount:
    return count_parameters(spec) if isinstance(spec, DecoderSpec) else _borrowed(spec).parameters


def widened_parameters_of(spec: ModelSpec) -> tuple[int, int]:
    """Return how many parameters of a GGUF file are widened to float32, and how many of these a token reads."""
    if isinstance(spec, DecoderSpec):
        return 0, 0
    borrowed = _borrowed(spec)
    return borrowed.widened, borrowed.widened - borrowed.idle_widened


def _borrowed(spec: ModelSpec) -> TransformersSpec:
    from moeserve.model.hf.spec import TransformersSpec  # Imported late: it loads transformers' modelling code.

    assert isinstance(spec, TransformersSpec)
    return spec


def kinds_of_layers(spec: ModelSpec) -> list[tuple[int, str]]:
    """Return (number of layers, kind) of mixers, then of feed-forward blocks, both with the most frequent first."""
    if not isinstance(spec, DecoderSpec):
        return list(_borrowed(spec).kinds)
    kinds: Counter[str] = Counter()
    for layer, window in enumerate(spec.windows):
        if not spec.has("mixer", layer):
            continue
        if spec.is_recurrent(layer):
            kinds[_RECURRENT_KINDS[type(spec.recurrent)]] += 1
        else:
            kinds[_attention_kind(spec.attention_of(layer), window)] += 1
    blocks: Counter[str] = Counter()
    for layer, sparse in enumerate(spec.sparse_layers):
        if not spec.has("block", layer):
            continue
        if not sparse or spec.moe is None:
            blocks["a dense block"] += 1
            continue
        # Gemma 4 has a dense block beside its experts, as other layers have it.
        beside = " and a shared one" if spec.moe.shared is not None and not spec.moe.own_norms else ""
        blocks[f"{spec.moe.num_experts} experts, {spec.moe.gate.top_k} per token{beside}"] += 1
    return [(number, kind) for kind, number in (*kinds.most_common(), *blocks.most_common())]


def _attention_kind(attention: AttentionSpec | MlaSpec, window: int | None) -> str:
    kind = "attention" if isinstance(attention, AttentionSpec) else "latent attention"
    if isinstance(attention, MlaSpec) and attention.indexer is not None:
        return f"{kind} by another layer's indexer" if attention.indexer.is_shared else f"{kind} with an indexer"
    return kind if window is None else f"{kind} over {window:,} tokens"


def summary(spec: ModelSpec) -> str:
    """Describe a model in one line, for the start of a service."""
    layers = "; ".join(f"{number} layers with {kind}" for number, kind in kinds_of_layers(spec))
    return f"{spec.model_type} ({implementation_of(spec)}), {said_parameters(parameters_of(spec))}; {layers}"


def said_parameters(count: ParameterCount) -> str:
    active = "" if count.active in (None, count.total) else f", {in_billions(count.active)} active per token"
    return f"{in_billions(count.total)} parameters{active}"


def in_billions(count: int) -> str:
    """Return a number of parameters as text, `1.23 billion`."""
    for unit, name in ((10**9, " billion"), (10**6, " million")):
        if count >= unit:
            return f"{count / unit:.2f}{name}"
    return f"{count:,}"


def sizes_of(model: KnownModel) -> list[Sizes]:
    """Return weights and KV by the usual formulas: numbers times their width. Scales of quantised weights add a little.

    Keys and values have 8 bits at least, states 16.
    """
    spec, total = model.spec, parameters_of(model.spec).total
    layers = windowed(spec.kv_layers)
    of_windows, window = kv_block_bytes(layers, 1, torch.uint8), max((layer.window or 0 for layer in layers), default=0)
    numbers = kv_block_bytes(spec.kv_layers, 1, torch.uint8) - of_windows
    sizes = []
    for name, bits in WIDTHS.items():
        weights = total * bits // 8
        if not spec.keeps_snapshots:  # It keeps memory of an unknown form.
            sizes.append(Sizes(name, weights, None, None))
            continue
        states = state_row_bytes(spec.state_layers, torch.float32 if bits == 32 else torch.bfloat16)
        width = max(bits, 8) // 8
        sizes.append(Sizes(name, weights, numbers * width, states, of_windows * width, window))
    return sizes
