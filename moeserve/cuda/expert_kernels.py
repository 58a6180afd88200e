"""Puts the GPU kernels of a model's experts together: measured configurations where there are any, and scratch."""

from __future__ import annotations

from pathlib import Path

import torch
import triton

from kernels.gpu.moe_config import MoeShape
from kernels.gpu.moe_experts import MoeWorkspace, TritonMoe, device_of
from kernels.gpu.moe_weights import FORMAT_OF
from kernels.gpu.tuning import PACKAGED, MoeConfigs, Platform
from moeserve.models.cache_folder import cache_root
from moeserve.models.spec import DecoderSpec


def tuned_folder() -> Path:
    """Where `moeserve tune` writes for this user."""
    return cache_root() / "tuned"


def platform_of(device: torch.device) -> Platform:
    """What tuned files are keyed by; a name that no GPU has where there is none."""
    return Platform(torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter", triton.__version__)


def moe_configs(shape: MoeShape, device: torch.device) -> MoeConfigs:
    """The user's tuned files before those of the package."""
    return MoeConfigs(shape, device_of(device), platform_of(device), (tuned_folder(), PACKAGED))


def triton_moe(
    shape: MoeShape,
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int,
    num_slots: int | None = None,
    configs: MoeConfigs | None = None,
) -> TritonMoe:
    """The kernels of all layers of this shape on one stream, with scratch for steps of max_tokens rows.

    dtype: of the activations. num_slots: the most experts that a layer holds here, default all. configs: default
    `moe_configs` of the shape.
    """
    workspace = MoeWorkspace.allocate(
        max_tokens,
        shape.top_k,
        num_slots or shape.num_experts,
        shape.hidden_size,
        shape.intermediate_size,
        dtype,
        device,
    )
    return TritonMoe(configs or moe_configs(shape, device), workspace, device_of(device).num_multiprocessors)


def expert_configs(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> MoeConfigs | None:
    """How the model's experts are computed by number of tokens; None for a model without any."""
    return None if spec.moe is None else moe_configs(_moe_shape(spec, dtype), device)


def model_moe(
    spec: DecoderSpec,
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int,
    num_slots: int | None = None,
    configs: MoeConfigs | None = None,
) -> TritonMoe:
    """`triton_moe` for a model whose experts are kept and computed in `dtype`."""
    return triton_moe(_moe_shape(spec, dtype), device, dtype, max_tokens, num_slots, configs)


def _moe_shape(spec: DecoderSpec, dtype: torch.dtype) -> MoeShape:
    moe = spec.moe
    assert moe is not None
    return MoeShape(moe.num_experts, moe.intermediate_size, spec.hidden_size, moe.gate.top_k, FORMAT_OF[dtype])
