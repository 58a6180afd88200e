"""The sizes of the weights of a model on transformers' code, by a checkpoint's headers or by config.json alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from transformers.utils import logging

from moeserve.model.checkpoint import StoredTensor, has_weights, read_index
from moeserve.model.hf.expert_weights import MappedModel, mapped_model
from moeserve.model.hf.modelling import ModellingCode, empty_model, read_hf_config
from moeserve.model.hf.source import Source, WeightMap
from moeserve.model.hf.spec import TransformersSpec, describe
from moeserve.model.hf.weights import map_weights, num_loaded_bytes
from moeserve.model.packed.config import quantization_in
from moeserve.model.rounding import Rounding
from moeserve.model.sizes import stored_dtype
from moeserve.model.spec import MissingWeights
from moeserve.model.stored import TensorInfo, item_bits

_NOWHERE = Path("config.json")


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A model and its weights.

    embedding: the name of the table of tokens. assumptions: sentences about facts of the weights that are not known.
    """

    spec: TransformersSpec
    model: MappedModel
    embedding: str
    assumptions: tuple[str, ...]

    @property
    def index(self) -> Mapping[str, TensorInfo]:
        return self.model.weights.index

    def loaded_bytes(self, dtype: torch.dtype, rounding: Rounding, *, narrow: bool) -> int:
        """Return the bytes of the weights in memory to compute in `dtype`; see `num_loaded_bytes`."""
        return self.model.num_bytes(dtype, None, rounding, narrow=narrow)

    def read_per_token(self, dtype: torch.dtype, rounding: Rounding, *, narrow: bool) -> int | None:
        """Return the bytes of the weights read for one token: chosen experts, and all others but the embedding.

        The embedding is left out because a token reads only one row of it. None if it is not known how much of the
        experts one token reads.
        """
        moe, weights = self.spec.moe, self.model.weights
        if moe is None and self.spec.parameters.active is None:
            return None
        chosen = range(0 if moe is None else moe.gate.top_k)
        read = self.model.num_bytes(dtype, lambda _: chosen, rounding, narrow=narrow)
        table = num_loaded_bytes(
            replace(weights, shapes={self.embedding: weights.shapes[self.embedding]}),
            dtype.itemsize,
            narrow=narrow,
            num_owned={},
            keys=self.model.keys,
            rounding=rounding,
        )
        return read - table - self.spec.idle_widened * dtype.itemsize


def size_model(folder: Path) -> SizedModel:
    """Describe the model of a folder that holds config.json and perhaps weights. Raise ModelError."""
    config = read_hf_config(folder)
    with _quiet():
        code = empty_model(config)
        spec = describe(code, config, quantization_in(folder))
    assumptions = []
    try:
        read_index(folder)
    except MissingWeights as error:
        reason = f"{error} Sizes" if has_weights(folder) else "There are no weights: sizes"
        assumptions.append(f"{reason} go by config.json.")
        dtype = stored_dtype(config.dtype)
        if dtype is None:
            assumptions.append("config.json names no dtype: bfloat16 is assumed.")
        if spec.quantization is not None:
            assumptions.append("The weights are quantised; sizes are those without.")
        model = mapped_model(code, lambda experts: _expected(code, experts, dtype or "BF16"))
    else:
        model = mapped_model(code, lambda experts: map_weights(code, folder, experts))
    table = code.body.get_input_embeddings()
    embedding = next(name for name, module in code.outer.named_modules() if module is table)
    if code.outer is not code.writer or code.body.config is not code.outer.config:
        assumptions.append("What its towers for images, sound and video take: they are not served and not counted.")
    return SizedModel(spec, model, f"{embedding}.weight", tuple(assumptions))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from giving advice about kernels, as nothing is computed here."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _expected(code: ModellingCode, experts: Iterable[str], dtype: str) -> WeightMap:
    """Return the map of a checkpoint that holds each parameter as it is. dtype: of all, as safetensors names it."""
    shapes = {name: tuple(tensor.shape) for name, tensor in code.outer.state_dict().items()}
    tied = dict(code.outer.all_tied_weights_keys)
    index: dict[str, TensorInfo] = {}
    tensors: dict[str, StoredTensor] = {}
    sources: dict[str, Source] = {}
    expert_sources: dict[str, Source] = {}
    of_experts = set(experts)
    for name, shape in shapes.items():
        if name not in tied:
            index[name] = TensorInfo(_NOWHERE, dtype, shape, prod(shape) * item_bits(dtype) // 8)
            tensors[name] = StoredTensor(name, shape, index[name].num_bytes, dtype)
            part = expert_sources if name.rpartition(".")[0] in of_experts else sources
            part[name] = Source(None, {name: [name]})
    return WeightMap(index, tensors, shapes, sources, expert_sources, tied)
