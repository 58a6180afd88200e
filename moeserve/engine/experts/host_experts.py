"""Experts of a GPU's service that its host computes where they lie: in main memory, by the kernels of a CPU."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.memory.host_share import HostCosts
from kernels.activation import Activation
from kernels.packed_experts import SplitExperts

# Rows of one expert whose computation is timed at start.
TIMED_ROWS = (1, 4, 16, 64, 256)
_TIMED_CALLS = 5
# Experts of a call that tells the seconds of an expert from those of the call.
_SEVERAL = 5
# A difference of two measured times may vanish.
_LEAST_SECONDS = 1e-7
# (row, choice) pairs that are computed at once: scratch does not grow with a prompt.
_PAIRS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class HostWork:
    """Products that the host computes meanwhile.

    found: products of pairs in the rows' dtype, piece by piece [., H], and the seconds that they took. places: their
    places among [T * k], piece by piece. num_rows: by expert.
    """

    found: Future[tuple[list[Tensor], float]]
    places: Sequence[Tensor]
    num_rows: Mapping[int, int]

    def put_into(self, products: Tensor) -> float:
        """Write the products to their places in products [T, k, H] fp32, on the device; wait until they are there.

        Return the seconds that the host took. Raise what has failed there.
        """
        pieces, seconds = self.found.result()
        out = products.view(-1, products.shape[-1])
        for places, found in zip(self.places, pieces, strict=True):
            _put(out, places, found)
        return seconds


class HostExperts:
    """One layer's experts in the host's memory, for rows of a device."""

    def __init__(self, experts: SplitExperts, thread: Executor) -> None:
        """thread: computes, one call at a time."""
        self._experts, self._thread = experts, thread

    def begin(self, x: Tensor, chosen: Tensor, num_rows: Mapping[int, int], activation: Activation) -> HostWork:
        """Begin to compute rows, beside the calling thread. They are rounded as the device's products are.

        x: [T, H] on the device. chosen: [T, k] on the host. num_rows: of each expert that the host computes.
        """
        started = time.perf_counter()
        ids = chosen.flatten()
        places = torch.isin(ids, torch.tensor(list(num_rows))).nonzero().flatten()
        # Expert by expert, so that hardly any weight is read twice.
        experts, order = torch.sort(ids[places], stable=True)
        pieces = places[order].split(_PAIRS_AT_ONCE)
        tokens = [of_piece // chosen.shape[1] for of_piece in pieces]
        here, ids = x.cpu(), experts.split(_PAIRS_AT_ONCE)
        seconds = time.perf_counter() - started
        found = self._thread.submit(self._compute, here, tokens, ids, activation, seconds)
        return HostWork(found, pieces, num_rows)

    @torch.inference_mode()
    def _compute(
        self, x: Tensor, tokens: Sequence[Tensor], experts: Sequence[Tensor], activation: Activation, seconds: float
    ) -> tuple[list[Tensor], float]:
        """tokens, experts: of pairs, piece by piece. seconds: that it took to bring the rows here."""
        started, rows, found = time.perf_counter(), x.float(), []
        for of_piece, ids in zip(tokens, experts, strict=True):
            products = torch.empty((len(ids), 1, x.shape[1]))
            self._experts.multiply(rows[of_piece], ids[:, None], activation, products)
            found.append(products[:, 0].to(x.dtype))
        return found, seconds + time.perf_counter() - started


def host_thread() -> Executor:
    """Return a thread that computes on as many cores as the calling one."""
    return ThreadPoolExecutor(1, "host-experts", torch.set_num_threads, (torch.get_num_threads(),))


def _put(out: Tensor, places: Tensor, found: Tensor) -> None:
    """Queue out[places] = found. Page-locked memory is reused once its copies are done, so the host does not wait."""
    if out.is_cuda:
        places, found = places.pin_memory(), found.pin_memory()
    there = found.to(out.device, non_blocking=True)
    out.index_copy_(0, places.to(out.device, non_blocking=True), there.to(out.dtype))


@torch.inference_mode()
def measure_costs(layers: Sequence[tuple[HostExperts, Sequence[int]]], x: Tensor, activation: Activation) -> HostCosts:
    """Time the host's computing of up to as many rows as x [T, H] has, on the device. layers: with their experts."""
    turns = itertools.cycle(layers)

    def seconds(num_experts: int, num_rows: int) -> float:
        """Return the median of calls, each with another layer's experts, which lie in no cache yet."""
        found = []
        for _ in range(_TIMED_CALLS):
            layer, experts = next(turns)
            chosen = torch.tensor(experts[:num_experts]).expand(num_rows, -1).contiguous()
            products = x.new_empty((*chosen.shape, x.shape[1]), dtype=torch.float32)
            of_experts = dict.fromkeys(experts[:num_experts], num_rows)
            found.append(layer.begin(x[:num_rows], chosen, of_experts, activation).put_into(products))
        return statistics.median(found)

    several = min(_SEVERAL, min(len(experts) for _, experts in layers))
    one = seconds(1, 1)
    of_expert = (seconds(several, 1) - one) / (several - 1) if several > 1 else one
    of_expert = min(max(of_expert, _LEAST_SECONDS), one)
    call = max(one - of_expert, _LEAST_SECONDS)
    points = [(1, of_expert)]
    for num_rows in TIMED_ROWS[1:]:
        if num_rows <= len(x):
            points.append((num_rows, max(seconds(1, num_rows) - call, points[-1][1])))
    return HostCosts(call, points)
