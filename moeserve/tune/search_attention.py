"""Times candidates of decodes, short extends and prefills for one shape on the GPU and keeps the fastest of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels.gpu.attention_config import SHORT_QUERIES, ExtendConfig
from kernels.gpu.attention_tuning import (
    AnyConfig,
    AttentionShape,
    extend_candidates,
    prefill_candidates,
    split_candidates,
)
from moeserve.tune.attention_cases import AttentionCase, Kind
from moeserve.tune.prepared_attention import PreparedAttention, prepare, random_tensors
from moeserve.tune.search_experts import Report, TimeUs, is_right, median_us


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences with as many positions cached and as many new tokens each."""

    num_seqs: int
    num_cached: int
    num_new: int


@dataclass(frozen=True, slots=True)
class Batches:
    """What is timed of each kind."""

    decode: Batch = Batch(64, 4095, 1)
    extend: Batch = Batch(64, 4096, 8)
    prefill: Batch = Batch(2, 0, 4096)


def tune_attention(
    shape: AttentionShape,
    device: torch.device,
    num_sms: int,
    *,
    time_us: TimeUs = median_us,
    report: Report = lambda line: None,
    batches: Batches | None = None,
) -> Iterator[tuple[str, AnyConfig, float]]:
    """Kind by kind the fastest configuration that computes it, with its time: "decode", "prefill" and, where the table
    packs any extends, "extend". Takes memory for one batch. Raises RuntimeError where nothing runs.

    Which extends are packed is measured too: up to the most new tokens with which that is faster than a prefill.
    """
    batches = batches or Batches()
    tuner = _Tuner(shape, device, num_sms, time_us, report)
    yield "decode", *tuner.fastest("decode", batches.decode, split_candidates(shape))
    packings = extend_candidates(shape)
    if packings:
        config, time = tuner.fastest("extend", batches.extend, packings)
        assert isinstance(config, ExtendConfig)
        yield "extend", replace(config, max_query_len=tuner.longest_packed(config, batches.extend)), time
    yield "prefill", *tuner.fastest("prefill", batches.prefill, prefill_candidates(shape))


class _Tuner:
    """Times configurations of one shape on one device."""

    def __init__(
        self, shape: AttentionShape, device: torch.device, num_sms: int, time_us: TimeUs, report: Report
    ) -> None:
        self._shape, self._device, self._num_sms = shape, device, num_sms
        self._time_us, self._report = time_us, report

    def fastest(self, kind: Kind, batch: Batch, configs: Sequence[AnyConfig]) -> tuple[AnyConfig, float]:
        """Those that do not run are skipped, since what fits is only known to the compiler, as are wrong ones."""
        case = _case(self._shape, kind, batch)
        tensors = random_tensors(case, self._device)
        timed: list[tuple[float, AnyConfig, PreparedAttention]] = []
        for config in configs:
            try:
                prepared = prepare(case, self._device, self._num_sms, config=config, tensors=tensors)
                timed.append((self._time(prepared), config, prepared))
            except Exception as error:
                self._report(f"skipped {config}: {type(error).__name__}")
        for time, config, prepared in sorted(timed, key=lambda entry: entry[0]):
            if is_right(str(config), partial(prepared.relative_error, 0), self._report):
                self._report(
                    f"{kind} of {batch.num_new} tokens over {batch.num_cached} x {batch.num_seqs}: {time:.1f} us"
                )
                return config, time
        raise RuntimeError(f"no candidate of {kind} attention runs on this device")

    def longest_packed(self, config: ExtendConfig, batch: Batch) -> int:
        """The most new tokens, by powers of two, up to which packing them beats a prefill; 0 if it never does."""
        longest, num_new = 0, 2
        while num_new <= SHORT_QUERIES:
            of_length = replace(batch, num_new=num_new)
            packed = self._time_of("extend", of_length, config)
            prefilled = self._time_of("prefill", of_length, self._shape.prefill(num_new))
            self._report(f"{num_new} new tokens: packed {packed:.1f} us, as a prefill {prefilled:.1f} us")
            if packed >= prefilled:
                break
            longest, num_new = num_new, 2 * num_new
        return longest

    def _time_of(self, kind: Kind, batch: Batch, config: AnyConfig) -> float:
        return self._time(prepare(_case(self._shape, kind, batch), self._device, self._num_sms, config=config))

    def _time(self, prepared: PreparedAttention) -> float:
        """Every run takes other keys and values, or too many, so that the cache is cold."""
        return self._time_us([partial(prepared.run, index) for index in range(prepared.num_sets)])


def _case(shape: AttentionShape, kind: Kind, batch: Batch) -> AttentionCase:
    return AttentionCase(
        kind,
        kind,
        (batch.num_cached + batch.num_new,) * batch.num_seqs,
        (batch.num_new,) * batch.num_seqs,
        shape.num_heads,
        shape.kv_heads,
        shape.key_dim,
        shape.value_dim,
        shape.block_size,
        shape.kv_dtype,
        shape.dtype,
        latent=shape.kv_heads == 1 and shape.key_dim > shape.value_dim,
    )
