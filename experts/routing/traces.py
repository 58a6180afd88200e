"""Recorded routing: what was chosen for each token, in order, and the controls that take the structure out. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experts.prediction.predictor import Tap


@dataclass(frozen=True, slots=True)
class GateGuesses:
    """What the gates of layers further on said of earlier states. logits: [L - distance, T, E] float, by layer of the
    state: those of layer l are the gate of l + distance."""

    tap: Tap
    distance: int
    logits: NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """Tokens in the order in which they were computed, the tokens of a request in their own order.

    ids: [L, T, k] uint16, distinct experts of a token, the gate's first choice first. requests: [T] int32.
    token_ids: [T] int32. families: [T] int32, requests that begin alike (an agent and its system prompt), which a
    scheduler that looks for cached prefixes sends to the same rank. guesses: of any taps and distances, or none.
    """

    num_experts: int
    ids: NDArray[np.uint16]
    requests: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    families: NDArray[np.int32]
    guesses: tuple[GateGuesses, ...] = ()

    def __post_init__(self) -> None:
        num_tokens = self.ids.shape[1] if self.ids.ndim == 3 else -1
        for name in ("requests", "token_ids", "families"):
            if getattr(self, name).shape != (num_tokens,):
                raise ValueError(f"ids are {list(self.ids.shape)}, {name} {list(getattr(self, name).shape)}")
        for guesses in self.guesses:
            expected = (len(self.ids) - guesses.distance, num_tokens, self.num_experts)
            if guesses.logits.shape != expected:
                raise ValueError(f"gate logits are {list(guesses.logits.shape)}, expected {list(expected)}")

    def select(self, tokens: NDArray[np.bool_]) -> RoutingTrace:
        """The tokens of a mask [T]."""
        return replace(
            self,
            ids=self.ids[:, tokens],
            requests=self.requests[tokens],
            token_ids=self.token_ids[tokens],
            families=self.families[tokens],
            guesses=tuple(replace(guesses, logits=guesses.logits[:, tokens]) for guesses in self.guesses),
        )

    def split(self) -> tuple[RoutingTrace, RoutingTrace]:
        """Every other request: to learn from, and held out."""
        learnt = np.unique(self.requests, return_inverse=True)[1] % 2 == 0
        return self.select(learnt), self.select(~learnt)

    def homes(self, num_ranks: int) -> NDArray[np.int64]:
        """[T]: requests dealt to ranks in turn."""
        return np.unique(self.requests, return_inverse=True)[1] % num_ranks

    def family_homes(self, num_ranks: int) -> NDArray[np.int64]:
        """[T]: families dealt to ranks in turn, by their number."""
        return self.families.astype(np.int64) % num_ranks

    def load(self) -> NDArray[np.float64]:
        """[L, E]: tokens that chose the expert."""
        return np.stack([np.bincount(ids.reshape(-1), minlength=self.num_experts) for ids in self.ids]).astype(
            np.float64
        )

    def transitions(self) -> NDArray[np.float64]:
        """[L - 1, E, E]: tokens whose first choice was i at layer l and j at l + 1."""
        first = self.ids[:, :, 0].astype(np.int64)
        pairs = first[:-1] * self.num_experts + first[1:]
        size = self.num_experts
        return np.stack([np.bincount(pair, minlength=size * size).reshape(size, size) for pair in pairs]).astype(
            np.float64
        )


def uniform_control(trace: RoutingTrace, seed: int) -> RoutingTrace:
    """The same tokens, each choosing any k experts. What gates guessed stays, and means nothing."""
    num_layers, num_tokens, top_k = trace.ids.shape
    random = np.random.default_rng(seed)
    ids = np.empty_like(trace.ids)
    for layer in range(num_layers):
        ids[layer] = random.random((num_tokens, trace.num_experts)).argsort(axis=1)[:, :top_k]
    return replace(trace, ids=ids)


def shuffled_control(trace: RoutingTrace, seed: int) -> RoutingTrace:
    """Each choice of each layer shuffled over all tokens by itself: loads stay, and nothing goes together any more.

    What gates guessed stays with its token, and means nothing.
    """
    random = np.random.default_rng(seed)
    ids = trace.ids.copy()
    for layer in ids:
        for choice in range(layer.shape[1]):
            layer[:, choice] = random.permutation(layer[:, choice])
            _part_duplicates(layer, choice, random)
    return replace(trace, ids=ids)


def _part_duplicates(layer: NDArray[np.uint16], choice: int, random: np.random.Generator) -> None:
    """Exchanges a choice that the token has already made with that of another token, where it suits both."""
    for _ in range(10_000):
        clashing = np.flatnonzero((layer[:, :choice] == layer[:, choice, None]).any(axis=1))
        if not len(clashing):
            return
        for token, other in zip(clashing, random.integers(len(layer), size=len(clashing)), strict=True):
            suits_token = layer[other, choice] not in layer[token, :choice]
            if suits_token and layer[token, choice] not in layer[other, :choice]:
                layer[[token, other], choice] = layer[[other, token], choice]
    raise ValueError("the choices of a layer are too skewed to be shuffled")
