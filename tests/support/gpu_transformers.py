"""Tiny models on transformers' code on a GPU, and their logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from moeserve.config import ServeConfig
from moeserve.engine.gpu_transformers_body import TransformersGpuBody
from moeserve.engine.memory_plan import rounding_on_gpu, state_demand
from moeserve.model.checkpoint import read_index
from moeserve.model.gpu.model import GpuSettings
from moeserve.model.gpu.shaped_batches import ShapedBatches
from moeserve.model.hf.decoder import TransformersDecoder
from moeserve.model.hf.loading import load_transformers_decoder
from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.hf.spec import read_transformers_spec
from moeserve.model.spec import ModelError, silent
from tests.support.gpu_logits import BLOCK_SIZE, MAX_LEN, MAX_TOKENS, difference, logits_in_steps, two_requests
from tests.support.quantised_files import deepseek, gptq, quantise_checkpoint
from tests.support.tiny_transformers import moe_types, save_tiny, tiny_model
from tests.support.transformers_parity import own_logits

_SETTINGS = GpuSettings(BLOCK_SIZE, 4, MAX_TOKENS, MAX_LEN, 2**20, 0.9, enforce_eager=True)


def load(
    folder: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[TransformersGpuBody, TransformersDecoder]:
    spec = read_transformers_spec(folder)
    rounding = rounding_on_gpu(spec, read_index(folder))
    settings = replace(_SETTINGS, states=state_demand(spec, dtype, ServeConfig(max_num_seqs=4)))
    body = TransformersGpuBody(folder, spec, dtype, rounding, settings, device, silent)
    return body, load_transformers_decoder(
        folder, spec, dtype=dtype, ops=body.ops, rounding=rounding, max_model_len=MAX_LEN
    )


def logits_of(decoder: TransformersDecoder) -> list[Tensor]:
    """[len(tokens), vocab_size] of `two_requests`, over pools full of NaN."""
    batches = ShapedBatches(decoder.spec, BLOCK_SIZE, MAX_LEN, 4, decoder.dtype, decoder.device)
    return logits_in_steps(decoder, batches, two_requests())


def expected_logits(own: ModellingCode) -> list[Tensor]:
    return [own_logits(own, tokens, 1) for tokens in two_requests()]


def difference_of(model_type: str, folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """The difference from the logits of the model's own forward, as a share of the largest."""
    own = save_tiny(model_type, folder)
    _, decoder = load(folder, device, dtype)
    return difference(logits_of(decoder), expected_logits(own))


def quantised(model_type: str, layout: str, folder: Path) -> Path:
    """Save a tiny model in `folder` in this layout, and return the folder of the same values in numbers."""
    tiny_model(model_type, moe_intermediate_size=64, intermediate_size=128).outer.save_pretrained(folder)
    config, quantise = gptq(4, 32) if layout == "gptq" else deepseek(16, 32)
    return quantise_checkpoint(folder, config, quantise, lambda name: "router" in name or ".wg." in name)


def types_that_differ(folder: Path, device: torch.device, tolerance: float) -> list[str]:
    """The mixtures of the installed transformers that a GPU is said to compute and that it computes otherwise."""
    found = []
    for model_type in moe_types():
        try:
            own = save_tiny(model_type, folder / model_type)
            if read_transformers_spec(folder / model_type).gpu_obstacle is not None:
                continue
            body, decoder = load(folder / model_type, device)
            body.settle(decoder)
        except (ValueError, ModelError):
            continue
        if not difference(logits_of(decoder), expected_logits(own)) <= tolerance:
            found.append(model_type)
    return found
