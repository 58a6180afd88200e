"""Puts the GPU kernels of a model's experts together: measured configurations where there are any, and scratch."""

from __future__ import annotations

from pathlib import Path

import torch
import triton

from kernels.gpu.moe_config import MoeShape
from kernels.gpu.moe_experts import MoeWorkspace, TritonMoe, device_of
from kernels.gpu.tuning import PACKAGED, MoeConfigs, Platform
from moeserve.models.cache_folder import cache_root


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
