"""Experts as a service holds them, for tests that know how much memory a number of them takes."""

from __future__ import annotations

import json
from pathlib import Path

_PAGE = 4096


def slots_on_cpu(model: Path, num_slots: int) -> int:
    """The bytes of `num_slots` slots in each layer of a saved model whose experts are three matrices in float32. Torch
    stays out of it."""
    config = json.loads((model / "config.json").read_text())
    of_expert = 3 * config["hidden_size"] * config.get("moe_intermediate_size", config["intermediate_size"]) * 4
    num_layers = config["num_hidden_layers"] - len(config.get("mlp_only_layers") or ())
    return int(num_slots * num_layers * -(-of_expert // _PAGE) * _PAGE)


def slots_on_gpu(model: Path, num_slots: int) -> int:
    """As `slots_on_cpu`, of slots in float32 on a device."""
    import torch

    from experts.memory.file import round_to_page
    from moeserve.engine.experts.gpu_memory import slot_layouts
    from tests.support.checkpoints import spec_of

    spec = spec_of(model)
    return num_slots * len(spec.moe_layers) * round_to_page(slot_layouts(spec, torch.float32).num_bytes)
