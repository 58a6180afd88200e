"""What the gates of all layers within reach say of a state, for whoever wants to hear all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from experts.prefetch.gate_preview import GatePreview


class GatesAhead:
    """name: that of the preview's tap as a source of predictions."""

    def __init__(self, preview: GatePreview, num_layers: int) -> None:
        self._preview = preview
        self._num_layers = num_layers
        self.name = f"gate-{preview.tap.value}"

    def __call__(self, layer: int, state: Tensor) -> list[tuple[int, NDArray[np.float32]]]:
        """Distances and logits [T, E], of a state [T, H] at the layer, T > 0."""
        distances = range(1, min(self._preview.max_distance, self._num_layers - 1 - layer) + 1)
        if not distances:
            return []
        return list(zip(distances, self._preview(layer, distances, state), strict=True))
