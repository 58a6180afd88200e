"""Maps as `moeserve experts fit` makes them."""

from __future__ import annotations

import numpy as np

from experts.routing.files import Tap
from experts.routing.gates import FittedGates
from moeserve.model.spec import DecoderSpec


def some_gates(spec: DecoderSpec) -> FittedGates:
    """Return gates of both taps and two distances, fitted to nothing."""
    assert spec.moe is not None
    generator, num_layers = np.random.default_rng(4), len(spec.moe_layers)
    shape = (spec.moe.num_experts, spec.hidden_size + 1)
    maps = {
        (tap, distance): generator.standard_normal((num_layers - distance, *shape)).astype(np.float16)
        for tap in Tap
        for distance in (1, 2)
    }
    return FittedGates(maps, 1)
