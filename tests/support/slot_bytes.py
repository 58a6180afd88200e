"""Experts as a service holds them, for tests that know how much memory a number of them takes."""

from __future__ import annotations

from pathlib import Path


def slots_on_cpu(model: Path, num_slots: int) -> int:
    """The bytes of so many slots in each layer of a saved model."""
    # With torch, which a process of pytest loads where a test needs it.
    from experts.expert_file import round_to_page
    from moeserve.config import ServeConfig
    from moeserve.memory_plan import read_spec
    from moeserve.model.expert_store import layout_in_store

    spec, dtype = read_spec(model, ServeConfig())
    return num_slots * len(spec.moe_layers) * round_to_page(layout_in_store(model, spec, dtype).num_bytes)


def slots_on_gpu(model: Path, num_slots: int) -> int:
    """As `slots_on_cpu`, of slots in float32 on a device."""
    import torch

    from experts.expert_file import round_to_page
    from moeserve.experts.gpu_memory import slot_layout
    from tests.support.checkpoints import spec_of

    spec = spec_of(model)
    return num_slots * len(spec.moe_layers) * round_to_page(slot_layout(spec, torch.float32).num_bytes)
