"""The figures by which routing traces are compared with published ones. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.experts.lab_traces import LabTrace


def adjacent_overlap(trace: LabTrace) -> float:
    """The share of a token's experts that the next token of the request chooses too, over all layers."""
    return float(_shared_with_next(trace).mean() / trace.ids.shape[2])


def adjacent_jaccard(trace: LabTrace) -> float:
    """Shared over distinct experts in the sets of neighbouring tokens of a request, mean over tokens and layers."""
    shared = _shared_with_next(trace)
    return float((shared / (2 * trace.ids.shape[2] - shared)).mean())


def first_choice_repeats(trace: LabTrace) -> NDArray[np.float64]:
    """[L]: how often the next token of a request has the same first choice."""
    first = trace.ids[:, :, 0]
    return (first[:, :-1] == first[:, 1:])[:, _continues(trace)].mean(axis=1)


def transition_lookup(trace: LabTrace, guesses: int) -> float:
    """How often the next layer's first choice is among the `guesses` most frequent after this layer's, in sample."""
    first, size = trace.ids[:, :, 0].astype(np.int64), trace.num_experts
    pairs = first[:-1] * size + first[1:]
    counts = np.sort([np.bincount(pair, minlength=size * size).reshape(size, size) for pair in pairs], axis=2)
    return float(counts[..., -guesses:].sum() / counts.sum())


def union_size(trace: LabTrace, num_streams: int) -> float:
    """Distinct experts per layer in a step of `num_streams` requests, one token each, mean over steps and layers."""
    starts = np.flatnonzero(np.r_[True, ~_continues(trace)])
    length = int(np.diff(np.r_[starts, len(trace.requests)]).min())
    sizes = []
    for group in starts[: len(starts) // num_streams * num_streams].reshape(-1, num_streams):
        ids = trace.ids[:, group[:, None] + np.arange(length)]
        present = np.zeros((len(ids), length, trace.num_experts), np.bool_)
        for stream in range(num_streams):
            np.put_along_axis(present, ids[:, stream].astype(np.int64), True, axis=2)
        sizes.append(present.sum(axis=2).mean())
    return float(np.mean(sizes))


def load_exponent(trace: LabTrace) -> float:
    """The exponent of Zipf's law fitted to the sorted load of each layer, mean over layers."""
    load = -np.sort(-trace.load(), axis=1)
    places = np.log(np.arange(1, trace.num_experts + 1))
    centred = places - places.mean()
    return float(-(np.log(np.maximum(load, 1)) @ centred).mean() / (centred @ centred))


def hit_rate(trace: LabTrace, slots: int, *, clairvoyant: bool = False) -> float:
    """Hits of a cache of `slots` experts per layer, emptied before each request, one token at a time.

    A token's experts arrive at once and none of them leaves while it is served. lru, or clairvoyant: the expert needed
    last in the future leaves (Belady).
    """
    hits = 0
    for layer in trace.ids:
        next_use = _next_uses(layer, trace.requests) if clairvoyant else None
        cached: dict[int, int] = {}
        for token, chosen in enumerate(layer.tolist()):
            if token and trace.requests[token] != trace.requests[token - 1]:
                cached.clear()
            for choice, expert in enumerate(chosen):
                hits += expert in cached
                cached[expert] = -token if next_use is None else int(next_use[token, choice])
            while len(cached) > slots:
                leaving = max((other for other in cached if other not in chosen), key=cached.__getitem__, default=None)
                if leaving is None:
                    raise ValueError(f"{slots} slots hold no token's {len(chosen)} experts")
                del cached[leaving]
    return hits / trace.ids.size


def _next_uses(layer: NDArray[np.uint16], requests: NDArray[np.int32]) -> NDArray[np.int64]:
    found = np.full(layer.shape, np.iinfo(np.int64).max)
    upcoming: dict[int, int] = {}
    for token in range(len(layer) - 1, -1, -1):
        if token + 1 < len(layer) and requests[token] != requests[token + 1]:
            upcoming.clear()
        for choice, expert in enumerate(layer[token].tolist()):
            found[token, choice] = upcoming.get(expert, found[token, choice])
            upcoming[expert] = token
    return found


def _continues(trace: LabTrace) -> NDArray[np.bool_]:
    """[T - 1]: the next token belongs to the same request."""
    return trace.requests[:-1] == trace.requests[1:]


def _shared_with_next(trace: LabTrace) -> NDArray[np.int64]:
    """[L, T']: experts that a token and the next of its request have in common."""
    here, after = trace.ids[:, :-1, :, None], trace.ids[:, 1:, None, :]
    return np.concatenate(
        [(here[layer] == after[layer]).any(axis=2).sum(axis=1)[None] for layer in range(len(trace.ids))]
    )[:, _continues(trace)]
