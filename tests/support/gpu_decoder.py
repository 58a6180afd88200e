"""A decoder on a GPU, of a checkpoint in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from experts.observer import AnyObserver
from kernels.gpu.moe_config import MoeConfigs, WeightStorage
from kernels.gpu.ops import GpuOps
from moeserve.engine.experts.gpu_memory import GpuResidentModel
from moeserve.model.decoder import Border, Decoder
from moeserve.model.expert_weights import shapes_of_experts
from moeserve.model.gpu.kernels import expert_configs, expert_storage, triton_moe
from moeserve.model.norms_over_ranks import Partners
from moeserve.model.rounding import NO_ROUNDING, Rounding
from moeserve.model.spec import DecoderSpec
from moeserve.model.tensor_reader import Progress
from moeserve.model.weights import load_decoder


def build_gpu_decoder(
    directory: Path,
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
    max_model_len: int | None = None,
    experts: GpuResidentModel | None = None,
    progress: Progress | None = None,
    configs: MoeConfigs | None = None,
    observers: Sequence[AnyObserver] = (),
    storage: WeightStorage | None = None,
    rounding: Rounding = NO_ROUNDING,
    border: Border | None = None,
    partners: Partners | None = None,
) -> Decoder:
    """The model in `directory` on `device`, with expert scratch for steps of up to `max_tokens` tokens.

    experts: only some of these are in the device's memory; None to load all. configs: of the experts' kernels,
    see `expert_configs`. observers: of steps. storage: of the experts' weights, default as
    `rounding` of the checkpoint's weights says. border, partners: of a stage or a shard of the model.
    """
    storage = storage or expert_storage(spec, dtype, shapes=shapes_of_experts(directory, spec, dtype, rounding))
    configs = configs or expert_configs(spec, storage, device)
    moe = None
    if configs is not None and experts is None:
        moe = triton_moe(configs, device, dtype, max_tokens)
    ops = GpuOps(device, storage, moe)
    return load_decoder(
        directory,
        spec,
        dtype=dtype,
        ops=ops,
        dispatch_of=None if experts is None else experts.dispatch_of,
        owned_experts=None if experts is None else _none,
        max_model_len=max_model_len,
        observers=observers,
        progress=progress,
        rounding=rounding,
        border=border,
        partners=partners,
    )


def _none(_: int) -> Sequence[int]:
    """Experts that are read when they are needed are not loaded with the model."""
    return ()
