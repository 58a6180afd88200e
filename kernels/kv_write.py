"""Writing new keys and values into the paged pool."""

from __future__ import annotations

from torch import Tensor


def write_kv(keys_pool: Tensor, values_pool: Tensor | None, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
    """Stores keys [T, KV, Dk] and values [T, KV, Dv] in the slots [T] (int64) of pools [KV, num_slots, D].

    Mutates the pools. With `values_pool` None (values are a prefix of the keys) only keys are stored.
    """
    keys_pool.index_copy_(1, slots, keys.transpose(0, 1))
    if values_pool is not None and values is not None:
        values_pool.index_copy_(1, slots, values.transpose(0, 1))
