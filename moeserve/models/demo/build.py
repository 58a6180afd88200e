"""Builds the demo checkpoint: SmolLM2-135M-Instruct as a Mixtral-format mixture of experts, or as the dense original.

Weights are written in bfloat16. The reference is the dense model in bfloat16 (what `build_dense` writes): splitting
it and scaling `down` by a power of two are exact in that dtype, so both compute the same function up to the order
of float additions at run time.
"""

from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moeserve.models.demo.dense_forward import DenseForward
from moeserve.models.demo.gguf_source import GgufSource
from moeserve.models.demo.package import locate_gguf
from moeserve.models.demo.partition import check_partition, gate_centroids, split_ffn
from moeserve.models.demo.text_files import (
    build_tokenizer,
    llama_config,
    mixtral_config,
    write_json,
    write_text_files,
)
from moeserve.models.progress import Progress, silent

# Weights of one layer by their name within it; called once per layer, in order.
_Layer = Callable[[int], dict[str, Tensor]]

_LAYERS_PER_SHARD = 8
_CALIBRATION_TOKENS = 2048
# The first tokens of any text draw attention from all others and have extreme activations: they would make a centroid.
_SKIPPED_TOKENS = 16
_FFN = ("gate_proj", "up_proj", "down_proj")


def build_demo(out_dir: Path, *, experts: int = 8, top_k: int = 2, progress: Progress | None = None) -> None:
    """Write the demo mixture with `experts` experts per layer, `top_k` active, into the empty or new `out_dir`.

    One pass over the layers: each is dequantised, run on the calibration text, split and written, so memory stays
    near one shard. Raises ModelError if the source package is missing, ValueError for a split that is not exact.
    """
    report = progress or silent
    report("read source", 0, 0)
    source = GgufSource(locate_gguf())
    check_partition(source.shape.intermediate_size, experts, top_k)
    config = mixtral_config(source.shape, experts=experts, top_k=top_k)
    write_checkpoint(out_dir, source, config, _MixtureLayers(source, experts, top_k), report)


def build_dense(out_dir: Path, *, progress: Progress | None = None) -> None:
    """Write the dense llama-type checkpoint that the demo mixture equals into the empty or new `out_dir`."""
    report = progress or silent
    report("read source", 0, 0)
    source = GgufSource(locate_gguf())
    write_checkpoint(out_dir, source, llama_config(source.shape), source.layer, report)


class _MixtureLayers:
    """Turns dense layers, taken in order, into mixture layers."""

    def __init__(self, source: GgufSource, experts: int, top_k: int) -> None:
        self._source, self._groups, self._top_k = source, experts // top_k, top_k
        text = files(__package__).joinpath("calibration.txt").read_text(encoding="utf-8")
        token_ids = build_tokenizer(source.vocabulary).encode(text).ids[:_CALIBRATION_TOKENS]
        self._forward = DenseForward(source.shape, source.embedding(), torch.tensor(token_ids))

    def __call__(self, index: int) -> dict[str, Tensor]:
        weights = self._source.layer(index)
        ffn_inputs = self._forward.step(weights)[_SKIPPED_TOKENS:]
        generator = torch.Generator().manual_seed(index)
        centroids = gate_centroids(ffn_inputs, self._groups, generator=generator)
        gate, up, down = (weights.pop(f"mlp.{name}.weight") for name in _FFN)
        tied = split_ffn(gate, up, down, centroids, top_k=self._top_k, generator=generator)
        weights["block_sparse_moe.gate.weight"] = tied.moe_gate
        for expert, (w1, w3, w2) in enumerate(zip(tied.gate, tied.up, tied.down, strict=True)):
            prefix = f"block_sparse_moe.experts.{expert}"
            weights |= {f"{prefix}.w1.weight": w1, f"{prefix}.w2.weight": w2, f"{prefix}.w3.weight": w3}
        return weights


def write_checkpoint(
    out_dir: Path,
    source: GgufSource,
    config: dict[str, Any],
    layer: _Layer,
    report: Progress,
) -> None:
    """Write all files of a checkpoint. layer(index): the weights of one layer by their name within it."""
    out_dir.mkdir(parents=True, exist_ok=True)
    write_text_files(out_dir, source.shape, source.vocabulary, config)
    shards = _shards(source, layer, report)
    count = -(-source.shape.num_layers // _LAYERS_PER_SHARD)
    weight_map: dict[str, str] = {}
    total_size = 0
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(tensors, out_dir / name, metadata={"format": "pt"})
        (out_dir / name).chmod(0o644)  # safetensors creates files for the owner alone; all others here are readable
        weight_map |= dict.fromkeys(tensors, name)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    write_json(out_dir / "model.safetensors.index.json", index)


def _shards(source: GgufSource, layer: _Layer, report: Progress) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of one file after the other, so that only one file's worth is in memory."""
    total = source.shape.num_layers
    shard = {"model.embed_tokens.weight": source.embedding()}
    for index in range(total):
        report("build layers", index, total)
        shard |= {f"model.layers.{index}.{name}": weight for name, weight in layer(index).items()}
        if index == total - 1:
            shard["model.norm.weight"] = source.final_norm()
            report("build layers", total, total)
            yield shard
        elif (index + 1) % _LAYERS_PER_SHARD == 0:
            yield shard
            shard = {}
