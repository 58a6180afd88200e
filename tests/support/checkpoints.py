"""Loading tiny saved models and changing what their checkpoints hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeserve.model.decoder import Decoder
from moeserve.model.families import build_spec, load_config
from moeserve.model.spec import DecoderSpec
from moeserve.model.weights import load_decoder
from tests.support.paged_runner import PagedRunner

TOKENS = list(range(1, 14))


def spec_of(directory: Path) -> DecoderSpec:
    """The spec of the model saved in ``directory``."""
    return build_spec(load_config(directory))


def logits_of(decoder: Decoder) -> Tensor:
    """Logits of one short request, computed in one step."""
    return PagedRunner(decoder, [TOKENS]).step([(0, 0, len(TOKENS))])


def load(directory: Path, **options: Any) -> Decoder:
    """Load the saved model for short contexts."""
    return load_decoder(directory, spec_of(directory), max_model_len=32, **options)


def reference_logits(model: Any) -> Tensor:
    """The transformers model's logits of the same request."""
    with torch.no_grad():
        return model(torch.tensor([TOKENS]), use_cache=False).logits[0].float()


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite the tensors of a single-file checkpoint."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
