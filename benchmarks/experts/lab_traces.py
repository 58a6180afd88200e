"""Traces to measure on: parts of them, homes of their tokens, gates' guesses, and controls without any structure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement import Placement
from experts.routing.files import RoutingTrace, Tap, TensorFileKind, Tensors, TraceError, load_trace, save_trace


@dataclass(frozen=True, slots=True)
class GateGuesses:
    """Logits of the gates of later layers for earlier states.

    logits: [L - distance, T, E] float; logits[l] come from the gate of layer l + distance and the state at layer l.
    """

    tap: Tap
    distance: int
    logits: NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class LabTrace(RoutingTrace):
    """A trace, and guesses of any taps and distances, or none."""

    guesses: tuple[GateGuesses, ...] = ()

    def __post_init__(self) -> None:
        RoutingTrace.__post_init__(self)
        num_tokens = self.ids.shape[1]
        for guesses in self.guesses:
            expected = (len(self.ids) - guesses.distance, num_tokens, self.num_experts)
            if guesses.logits.shape != expected:
                raise ValueError(f"gate logits are {list(guesses.logits.shape)}, expected {list(expected)}")

    def select(self, tokens: NDArray[np.bool_]) -> LabTrace:
        """Return the part of the trace with the tokens of a mask [T]."""
        return replace(
            self,
            ids=self.ids[:, tokens],
            requests=self.requests[tokens],
            token_ids=self.token_ids[tokens],
            guesses=tuple(replace(guesses, logits=guesses.logits[:, tokens]) for guesses in self.guesses),
        )

    def split(self) -> tuple[LabTrace, LabTrace]:
        """Return two halves: every other request to learn from, and the others, held out."""
        learnt = np.unique(self.requests, return_inverse=True)[1] % 2 == 0
        return self.select(learnt), self.select(~learnt)

    def homes(self, num_ranks: int) -> NDArray[np.int64]:
        """[T]: the home rank of each token, with requests dealt to ranks in turn."""
        return np.unique(self.requests, return_inverse=True)[1] % num_ranks

    def load(self) -> NDArray[np.float64]:
        """[L, E]: tokens that chose the expert."""
        return np.stack([np.bincount(ids.reshape(-1), minlength=self.num_experts) for ids in self.ids]).astype(
            np.float64
        )


def uniform_control(trace: LabTrace, seed: int) -> LabTrace:
    """Return the trace with k experts drawn at random for each token. The gates' guesses stay, and mean nothing."""
    num_layers, num_tokens, top_k = trace.ids.shape
    random = np.random.default_rng(seed)
    ids = np.empty_like(trace.ids)
    for layer in range(num_layers):
        ids[layer] = random.random((num_tokens, trace.num_experts)).argsort(axis=1)[:, :top_k]
    return replace(trace, ids=ids)


def shuffled_control(trace: LabTrace, seed: int) -> LabTrace:
    """Return the trace with each choice of each layer shuffled over all tokens: loads stay, all other structure goes.

    The gates' guesses stay with their tokens, and mean nothing.
    """
    random = np.random.default_rng(seed)
    ids = trace.ids.copy()
    for layer in ids:
        for choice in range(layer.shape[1]):
            layer[:, choice] = random.permutation(layer[:, choice])
            _part_duplicates(layer, choice, random)
    return replace(trace, ids=ids)


def _part_duplicates(layer: NDArray[np.uint16], choice: int, random: np.random.Generator) -> None:
    """Swap choices that repeat an earlier one of their token with other tokens' choices, without new repetitions."""
    for _ in range(10_000):
        clashing = np.flatnonzero((layer[:, :choice] == layer[:, choice, None]).any(axis=1))
        if not len(clashing):
            return
        for token, other in zip(clashing, random.integers(len(layer), size=len(clashing)), strict=True):
            suits_token = layer[other, choice] not in layer[token, :choice]
            if suits_token and layer[token, choice] not in layer[other, :choice]:
                layer[[token, other], choice] = layer[[other, token], choice]
    raise ValueError("the choices of a layer are too skewed to be shuffled")


def remote_ranks(routing: NDArray[np.integer], homes: NDArray[np.integer], placement: Placement) -> NDArray[np.float64]:
    """[L]: the mean number of ranks other than its home to which a token is sent, each rank once.

    This is the number of rows per token that dispatch moves, one way. routing: [L, T, k]; homes: [T].
    """
    num_tokens = routing.shape[1]
    found = np.empty(len(routing))
    for layer, ids in enumerate(routing):
        touched = np.zeros((num_tokens, placement.num_ranks), np.bool_)
        np.put_along_axis(touched, placement.serving(layer).ranks(homes, ids), True, axis=1)
        touched[np.arange(num_tokens), homes] = False
        found[layer] = touched.sum() / num_tokens
    return found


_GUESSES_FILE = TensorFileKind("file of guesses", {"kind": "gate guesses", "format": "1"}, TraceError)


def save_lab_trace(path: Path, trace: LabTrace) -> None:
    """Write the trace, and its guesses into a file beside it."""
    save_trace(path, trace)
    tensors = {
        f"{guesses.tap.value}.{guesses.distance}": np.ascontiguousarray(guesses.logits, np.float16)
        for guesses in trace.guesses
    }
    _GUESSES_FILE.save(_beside(path), tensors, {})


def load_lab_trace(path: Path) -> LabTrace:
    """Return a trace and its guesses. Raise TraceError for a file that is missing or damaged."""
    trace = load_trace(path)
    guesses = _GUESSES_FILE.load(_beside(path), lambda tensors, _: _restored(tensors))
    return LabTrace(**{column.name: getattr(trace, column.name) for column in fields(trace)}, guesses=guesses)


def _restored(tensors: Tensors) -> tuple[GateGuesses, ...]:
    names = [(name, *name.split(".")) for name in sorted(tensors)]
    return tuple(GateGuesses(Tap(tap), int(distance), tensors[name]) for name, tap, distance in names)  # type: ignore[arg-type]


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.guesses")
