"""How many KV blocks to have, and how long a context they allow."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config import ConfigError

_DEFAULT_SHARE = 0.5
_DEFAULT_MAX_BYTES = 4 * 2**30
_RESERVE_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Blocks of KV memory, and the longest context in tokens that model, setting and memory together allow."""

    num_blocks: int
    max_model_len: int


def plan_kv(
    *,
    block_bytes: int,
    block_size: int,
    available_bytes: int,
    kv_cache_memory: int | None,
    model_max_len: int,
    max_model_len: int | None,
) -> KvBudget:
    """Sizes the pool. `available_bytes` is what is left beside the weights.

    Without a setting the pool takes half of it, at most 4 GiB. A context asked for by name that does not fit is a
    ConfigError; the model's own is clamped to the pool instead.
    """
    if max_model_len is not None and max_model_len > model_max_len:
        raise ConfigError(f"--max-model-len {max_model_len} exceeds the model's {model_max_len} tokens.")
    spendable = max(0, available_bytes - _RESERVE_BYTES)
    if kv_cache_memory is None:
        memory = min(int(spendable * _DEFAULT_SHARE), _DEFAULT_MAX_BYTES)
    elif kv_cache_memory > spendable:
        raise ConfigError(
            f"--kv-cache-memory asks for {_mib(kv_cache_memory)}; beside the weights only {_mib(spendable)} are free."
        )
    else:
        memory = kv_cache_memory
    return share_kv(
        memory,
        block_bytes=block_bytes,
        block_size=block_size,
        model_max_len=model_max_len,
        max_model_len=max_model_len,
    )


def share_kv(
    memory: int, *, block_bytes: int, block_size: int, model_max_len: int, max_model_len: int | None
) -> KvBudget:
    """The blocks that `memory` bytes hold. Raises ConfigError as `plan_kv` does."""
    if max_model_len is not None and max_model_len > model_max_len:
        raise ConfigError(f"--max-model-len {max_model_len} exceeds the model's {model_max_len} tokens.")
    num_blocks = memory // block_bytes
    capacity = num_blocks * block_size
    wanted = max_model_len or model_max_len
    if num_blocks < 2 or (max_model_len is not None and capacity < max_model_len):
        needed = -(-(max_model_len or 2 * block_size) // block_size) * block_bytes
        raise ConfigError(
            f"{_mib(memory)} of KV memory hold {capacity} tokens; {max_model_len or 2 * block_size} tokens need "
            f"{_mib(needed)} (--kv-cache-memory)."
        )
    return KvBudget(num_blocks, min(wanted, capacity))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
