"""The routing of one step as arrays. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOT_COMPUTED = -1


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """num_layers: layers with experts. last_is_sparse: the model's last layer is one of them."""

    num_layers: int
    num_experts: int
    top_k: int
    last_is_sparse: bool = True


def unpack(data: bytes, shape: RoutingShape, num_rows: int, logit_rows: Sequence[int]) -> NDArray[np.int16]:
    """[L, T, k] expert ids out of the bytes of `RoutingTap.take`.

    The model's last layer computes only `logit_rows`; its other rows are NOT_COMPUTED. ValueError for bytes that do
    not fit.
    """
    flat = np.frombuffer(data, np.uint8 if shape.num_experts <= 256 else np.int16)
    num_whole = shape.num_layers - shape.last_is_sparse
    in_whole = num_whole * num_rows * shape.top_k
    in_last = len(logit_rows) * shape.top_k if shape.last_is_sparse else 0
    if len(flat) != in_whole + in_last:
        raise ValueError(f"{len(flat)} expert ids where {in_whole + in_last} belong")
    ids = np.full((shape.num_layers, num_rows, shape.top_k), NOT_COMPUTED, np.int16)
    ids[:num_whole] = flat[:in_whole].reshape(num_whole, num_rows, shape.top_k)
    if shape.last_is_sparse:
        ids[num_whole, np.asarray(logit_rows, np.int64)] = flat[in_whole:].reshape(len(logit_rows), shape.top_k)
    return ids
