"""Times the candidates of the experts' kernels for one shape on the GPU and keeps the fastest per number of tokens.

The two projections are tuned one after the other with the same row tile, since rows are sorted once for both; what
competes in the end is the whole operation. Nothing here depends on a clock but `time_us`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kernels.gpu.moe_align import SortedPairs, sort_pairs
from kernels.gpu.moe_config import (
    Device,
    MoeConfig,
    MoeShape,
    Projection,
    Tile,
    Variant,
    candidate_block_ms,
    candidate_tiles,
    candidate_variants,
)
from kernels.gpu.moe_experts import device_of
from kernels.gpu.moe_gemv import down_gemv, down_products_gemv, gate_up_gemv
from kernels.gpu.moe_persistent import down_persistent, gate_up_persistent
from kernels.gpu.moe_tiled import down_tiled, gate_up_tiled
from moeserve.tune.check import checked
from moeserve.tune.kernel_case import cold_sets
from moeserve.tune.moe_case import ACTIVATION, MoeCase, make_case, random_experts
from moeserve.tune.timing import time_calls

# Runs calls, each on other data, often enough and gives the median of their microseconds.
TimeUs = Callable[[Sequence[Callable[[], object]]], float]
Report = Callable[[str], None]

# How long a candidate is measured, in seconds.
_SECONDS = 0.03
# Layers there are at most, and how often other experts are chosen where tokens are so few.
_MAX_SETS, _FEW_TOKENS = 8, 16


@dataclass(frozen=True, slots=True)
class Tuned:
    config: MoeConfig
    microseconds: float


def median_us(calls: Sequence[Callable[[], object]]) -> float:
    """On a CUDA device, in graphs as steps are: a candidate of several launches does not pay for launching them."""
    return time_calls(calls, seconds=_SECONDS)[0].microseconds


def is_right(name: str, error: Callable[[], float], report: Report) -> bool:
    """Whether that candidate computes what the reference does; the report is told of one that does not."""
    check = checked(name, error)
    if not check.passed:
        report(f"WRONG: {check.name}, relative error {check.error:.1e}")
    return check.passed


def tune_shape(
    shape: MoeShape,
    all_num_tokens: Sequence[int],
    device: torch.device,
    *,
    time_us: TimeUs = median_us,
    report: Report = lambda line: None,
) -> Iterator[tuple[int, Tuned]]:
    """Number of tokens by number of tokens the fastest configuration that computes the layer, with its time.

    Weights take the memory of one layer, or of several small ones. Raises RuntimeError where nothing runs.
    """
    random = torch.Generator(device=device).manual_seed(0)
    layers = [random_experts(shape, random)]
    size = sum(matrix.values.nbytes for matrix in (layers[0].gate_up, layers[0].down))
    layers += [random_experts(shape, random) for _ in range(cold_sets(size, _MAX_SETS) - 1)]
    for num_tokens in all_num_tokens:
        count = _MAX_SETS if num_tokens <= _FEW_TOKENS else len(layers)
        sets = [
            make_case(shape, num_tokens, device, experts=layers[number % len(layers)], seed=number)
            for number in range(count)
        ]
        yield num_tokens, _Tuner(sets, device_of(device), time_us, report).best()


class _Tuner:
    """Of one number of tokens. sets: the same work on other data, each with scratch of its own."""

    def __init__(self, sets: Sequence[MoeCase], device: Device, time_us: TimeUs, report: Report) -> None:
        self._sets, self._device, self._time_us, self._report = sets, device, time_us, report
        self._shape, self._num_tokens = sets[0].shape, sets[0].num_tokens

    def best(self) -> Tuned:
        found = sorted(self._candidates(), key=lambda tuned: tuned.microseconds)
        for tuned in found:
            if is_right(str(tuned.config), partial(self._sets[0].relative_error, tuned.config), self._report):
                self._report(f"{self._num_tokens} tokens: {tuned.config.variant}, {tuned.microseconds:.1f} us")
                return tuned
        raise RuntimeError(f"no candidate for {self._shape.name()} runs on this device")

    def _candidates(self) -> Iterator[Tuned]:
        """The best tiles of each variant and number of rows."""
        for variant in candidate_variants(self._shape, self._num_tokens, self._device):
            rows = [1] if variant in ("gemv", "gemv_split") else candidate_block_ms(self._shape, self._num_tokens)
            for block_m in rows:
                pairs = [None if block_m == 1 else sorted_pairs(case, block_m) for case in self._sets]
                gate_up = self._best_tile(variant, pairs, block_m, "gate_up")
                down = self._best_tile(variant, pairs, block_m, "down")
                if gate_up is None or down is None:
                    continue
                config = MoeConfig(variant, block_m, gate_up, down)
                time = self._timed(str(config), [partial(case.run, config) for case in self._sets])
                if time is not None:
                    yield Tuned(config, time)
                    self._report(f"{self._num_tokens} tokens, {variant}, {block_m} rows: {time:.1f} us")

    def _best_tile(
        self, variant: Variant, pairs: Sequence[SortedPairs | None], block_m: int, projection: Projection
    ) -> Tile | None:
        """The fastest that runs, if any does."""
        timed: list[tuple[float, Tile]] = []
        for tile in candidate_tiles(self._shape, self._num_tokens, projection, variant, block_m, self._device):
            calls = [
                projection_call(case, variant, of_case, block_m, projection, tile, self._device)
                for case, of_case in zip(self._sets, pairs, strict=True)
            ]
            time = self._timed(f"{variant}, {projection}, {block_m} rows, {tile}", calls)
            if time is not None:
                timed.append((time, tile))
        return min(timed, key=lambda entry: entry[0])[1] if timed else None

    def _timed(self, name: str, calls: Sequence[Callable[[], object]]) -> float | None:
        """None for a candidate that does not run, since what fits is only known to the compiler."""
        try:
            return self._time_us(calls)
        except Exception as error:
            self._report(f"skipped {name}: {type(error).__name__}")
            return None


def sorted_pairs(case: MoeCase, block_m: int) -> SortedPairs:
    """The case's rows, sorted into its workspace."""
    num_slots = case.experts.gate_up.num_slots
    into = case.workspace.sorted_pairs(case.expert_ids.numel(), num_slots, block_m)
    return sort_pairs(case.expert_ids, num_slots, block_m, into, case.workspace.counts)


def projection_call(
    case: MoeCase,
    variant: Variant,
    pairs: SortedPairs | None,
    block_m: int,
    projection: Projection,
    tile: Tile,
    device: Device,
) -> Callable[[], None]:
    """Runs one projection alone. pairs: the case's, in tiles of block_m; None without tiles."""
    experts, space = case.experts, case.workspace
    num_pairs = case.expert_ids.numel()
    hidden, results = space.hidden[:num_pairs], space.results[:num_pairs]
    ids, weights = case.expert_ids, case.expert_weights
    if pairs is None:
        out = torch.empty_like(case.x)
        if projection == "gate_up":
            return lambda: gate_up_gemv(case.x, experts.gate_up, ACTIVATION, ids, None, tile, hidden)
        if variant == "gemv_split":
            return lambda: down_products_gemv(hidden, experts.down, ids, None, tile, results)
        return lambda: down_gemv(hidden, experts.down, ids, weights, None, tile, out)
    top_k = case.shape.top_k
    if variant == "tiled":
        if projection == "gate_up":
            return lambda: gate_up_tiled(case.x, experts.gate_up, ACTIVATION, top_k, pairs, block_m, tile, hidden)
        return lambda: down_tiled(hidden, experts.down, pairs, block_m, tile, results)
    programs = device.num_multiprocessors
    if projection == "gate_up":
        return lambda: gate_up_persistent(
            case.x, experts.gate_up, ACTIVATION, top_k, pairs, block_m, tile, hidden, programs
        )
    return lambda: down_persistent(hidden, experts.down, pairs, block_m, tile, results, programs)
