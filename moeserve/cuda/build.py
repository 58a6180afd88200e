"""Puts a decoder for the GPU together: the dispatch of its experts, and the weights."""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.gpu.moe_config import MoeShape, WeightFormat
from kernels.gpu.moe_experts import TritonMoe
from kernels.gpu.tuning import MoeConfigs
from moeserve.cuda.decoder import GpuDecoder
from moeserve.cuda.expert_kernels import moe_configs, triton_moe
from moeserve.cuda.weights import load_gpu_decoder
from moeserve.models.spec import DecoderSpec
from moeserve.models.tensor_reader import Progress

_FORMATS: dict[torch.dtype, WeightFormat] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def build_gpu_decoder(
    directory: Path,
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
    max_model_len: int | None = None,
    progress: Progress | None = None,
    configs: MoeConfigs | None = None,
) -> GpuDecoder:
    """The model in `directory` on `device`, with expert scratch for steps of up to `max_tokens` tokens.

    configs: of the experts' kernels, see `expert_configs`.
    """
    dispatch = None if spec.moe is None else moe_dispatch(spec, dtype, device, max_tokens, configs)
    return load_gpu_decoder(
        directory, spec, dtype=dtype, device=device, dispatch=dispatch, max_model_len=max_model_len, progress=progress
    )


def expert_configs(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> MoeConfigs | None:
    """How the model's experts are computed by number of tokens; None for a model without any."""
    return None if spec.moe is None else moe_configs(_moe_shape(spec, dtype), device)


def moe_dispatch(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device, max_tokens: int, configs: MoeConfigs | None = None
) -> TritonMoe:
    """The experts' product for all layers of a model whose experts are all on `device`."""
    return triton_moe(_moe_shape(spec, dtype), device, dtype, max_tokens, configs=configs)


def _moe_shape(spec: DecoderSpec, dtype: torch.dtype) -> MoeShape:
    moe = spec.moe
    assert moe is not None
    return MoeShape(moe.num_experts, moe.intermediate_size, spec.hidden_size, moe.gate.top_k, _FORMATS[dtype])
