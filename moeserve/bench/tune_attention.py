"""Times the candidates of decode and prefill attention for one shape on the GPU and keeps the fastest of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from kernels.gpu.attention_config import PrefillConfig, SplitConfig
from kernels.gpu.attention_tuning import AnyConfig, AttentionShape, prefill_candidates, split_candidates
from moeserve.bench.kernel_attention import PreparedAttention, prepare
from moeserve.bench.kernel_cases_attention import AttentionCase, Kind
from moeserve.bench.tune_moe import Report, TimeUs, median_us

# What is timed: sequences and their lengths.
DECODE, PREFILL = (64, 4096), (2, 4096)
Found = dict[str, tuple[AnyConfig, float]]


def tune_attention(
    shape: AttentionShape,
    device: torch.device,
    num_sms: int,
    *,
    time_us: TimeUs = median_us,
    report: Report = lambda line: None,
    decode: tuple[int, int] = DECODE,
    prefill: tuple[int, int] = PREFILL,
) -> Found:
    """The fastest configurations by name ("decode", "prefill"), each with its time. Takes memory for one case."""
    found: Found = {}
    of_decode, of_prefill = _case(shape, "decode", decode), _case(shape, "prefill", prefill)
    found["decode"] = _fastest(
        [(split, partial(prepare, of_decode, device, num_sms, config=split)) for split in split_candidates(shape)],
        time_us,
    )
    report(f"decode of {decode[0]} x {decode[1]}: {found['decode'][1]:.1f} us")
    found["prefill"] = _fastest(
        [(own, partial(prepare, of_prefill, device, num_sms, config=own)) for own in prefill_candidates(shape)],
        time_us,
    )
    report(f"prefill of {prefill[0]} x {prefill[1]}: {found['prefill'][1]:.1f} us")
    return found


def _case(shape: AttentionShape, kind: Kind, size: tuple[int, int]) -> AttentionCase:
    batch, length = size
    return AttentionCase(
        f"{kind} {batch} x {length}",
        kind,
        (length,) * batch,
        (1 if kind == "decode" else length,) * batch,
        shape.num_heads,
        shape.kv_heads,
        shape.key_dim,
        shape.value_dim,
        shape.block_size,
        shape.kv_dtype,
        shape.dtype,
        latent=shape.kv_heads == 1 and shape.key_dim > shape.value_dim,
    )


def _fastest(
    candidates: list[tuple[SplitConfig | PrefillConfig, Callable[[], PreparedAttention]]], time_us: TimeUs
) -> tuple[SplitConfig | PrefillConfig, float]:
    """Those that do not run are skipped, since what fits is only known to the compiler."""
    timed: list[tuple[float, SplitConfig | PrefillConfig]] = []
    for config, make in candidates:
        prepared, sets = make(), count()
        try:
            # Every run takes other keys and values, so that the cache is cold.
            timed.append((time_us(lambda prepared=prepared, sets=sets: prepared.run(next(sets))), config))  # type: ignore[misc]
        except (OutOfResources, PTXASError):
            continue
    if not timed:
        raise RuntimeError("no candidate of attention runs on this device")
    time, config = min(timed, key=lambda entry: entry[0])
    return config, time
