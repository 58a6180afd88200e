"""Fit gates to a model (`moeserve experts fit`): the model reads text, and linear maps learn its gates' choices."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from experts.observer import AnyObserver
from experts.routing.files import Tap
from experts.routing.gates import FittedGates, plain_maps, shared_state, unit_norm
from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.ops import CpuOps, PagedRows
from moeserve.model.decoder import ForwardBatch
from moeserve.model.families import build_spec, load_config
from moeserve.model.kv_pool import KVPool
from moeserve.model.rounding import NO_ROUNDING, Rounding
from moeserve.model.state_pool import StatePool, pools_by_layer, state_rows
from moeserve.model.weights import load_decoder
from moeserve.plan import Chunk, StateUse

_Key = TypeVar("_Key", bound=Hashable)

DISTANCES = 3  # maps are fitted for 1 to this number of layers ahead
# The tokens of a piece of text, which the model reads in one step.
PIECE_TOKENS = 256
_BLOCK_SIZE = 16
# Damping per token, in mean squares of a state's elements. Recall hardly depends on it between 0.01 and 1.
_RIDGE = 0.1


class GateFit:
    """Learns `FittedGates` by ridge regression on the difference from the plain gates.

    It sums the normal equations, so texts come one after the other and none is kept. This takes L (H + 1)² floats per
    tap, and as many products per token.
    """

    def __init__(self, max_distance: int) -> None:
        self._max_distance = max_distance
        self._num_tokens = 0
        self._squares: dict[tuple[Tap, int], Tensor] = {}
        self._products: dict[tuple[Tap, int, int], Tensor] = {}

    def add(self, states: Mapping[Tap, Sequence[Tensor]], scores: Sequence[Tensor]) -> None:
        """Add the tokens of a text.

        states: by tap and layer [T, H], of unit norm at `SHARED`. scores: by layer
        [T, E], of each gate for its own input.
        """
        self._num_tokens += len(scores[0])
        for tap, of_tap in states.items():
            for layer, state in enumerate(of_tap[: len(scores) - 1]):
                x = torch.cat([state.float(), torch.ones(len(state), 1)], 1)
                _add(self._squares, (tap, layer), x.T @ x)
                for distance in range(1, min(self._max_distance, len(scores) - 1 - layer) + 1):
                    _add(self._products, (tap, layer, distance), x.T @ scores[layer + distance].float())

    def solve(self, plain: Mapping[tuple[Tap, int, int], Tensor]) -> FittedGates:
        """Return the maps fitted to everything added, at least one token.

        plain: by tap, layer and distance, the later gate as it is, [E, H + 1]. In directions that the texts have not
        shown a map keeps to this gate, which recalls more on other texts than zeros there would.
        """
        found: dict[tuple[Tap, int], list[Tensor]] = {}
        for (tap, layer), squares in self._squares.items():
            damping = (_RIDGE * squares.diagonal()[:-1].mean()).repeat(len(squares))
            damping[-1] = 0  # The constant is free.
            factor = torch.linalg.cholesky((squares + damping.diag()).double())
            for distance in range(1, self._max_distance + 1):
                products = self._products.get((tap, layer, distance))
                if products is not None:
                    start = plain[tap, layer, distance].T
                    missing = products.double() - squares.double() @ start.double()
                    solution = start + torch.cholesky_solve(missing, factor)
                    found.setdefault((tap, distance), []).append(solution.T.float())
        return FittedGates({key: torch.stack(maps).numpy() for key, maps in found.items()}, self._num_tokens)


def _add(sums: dict[_Key, Tensor], key: _Key, value: Tensor) -> None:
    if key in sums:
        sums[key] += value
    else:
        sums[key] = value


@dataclass(frozen=True, slots=True)
class TextRead:
    """A text of T tokens as the model read it, by layer with experts.

    ids: [T, k]. states: [T, H] at each tap; at `SHARED` they have unit norm.
    """

    token_ids: list[int]
    ids: list[Tensor]
    states: dict[Tap, list[Tensor]]
    log_likelihood: float


class _Seen(AnyObserver):
    """Keeps the last step's tensors by layer: the input and the choice of each gate, and the state at `SHARED`."""

    def __init__(self) -> None:
        self.choices: dict[int, tuple[Tensor, Tensor]] = {}
        self.shared: dict[int, Tensor] = {}

    def gated(self, layer: int, x: Tensor, expert_ids: Tensor) -> None:
        self.choices[layer] = x, expert_ids

    def attended(self, layer: int, residual: Tensor, shared: Tensor | None) -> None:
        self.shared[layer] = unit_norm(shared_state(residual, shared))


class TextReader:
    """A model with experts, all of them in memory, that reads texts one by one, each in one step."""

    def __init__(self, folder: Path, rounding: Rounding = NO_ROUNDING, kv_dtype: torch.dtype = torch.float32) -> None:
        """Raise ModelError."""
        spec, dtype = build_spec(load_config(folder)), torch.float32
        self._seen = _Seen()
        self.decoder = load_decoder(
            folder,
            spec,
            dtype=dtype,
            ops=CpuOps(rounding.arithmetic),
            max_model_len=PIECE_TOKENS,
            observers=[self._seen],
            rounding=rounding,
        )
        pool = KVPool(spec.kv_layers, PIECE_TOKENS // _BLOCK_SIZE, _BLOCK_SIZE, kv_dtype)
        self._states = StatePool(spec.state_layers, 1, dtype) if spec.state_layers else None
        self._pools = pools_by_layer(spec, pool.layers, self._states)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @property
    def num_gates(self) -> int:
        return len(self.decoder.spec.moe_layers)

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text).ids
        return token_ids

    @torch.inference_mode()
    def read(self, token_ids: list[int]) -> TextRead:
        """Compute all rows in all layers. token_ids: 1 to `PIECE_TOKENS`."""
        batch = _batch(token_ids)
        if self._states is not None:
            piece = [Chunk("", array("i", token_ids), 0, array("i"), None, state=StateUse(0))]
            self._states.begin(piece)
            batch.states = state_rows(piece)
        logits = self.decoder.forward(batch, self._pools)
        likelihood = (
            logits[:-1].float().log_softmax(-1).gather(1, torch.tensor(token_ids[1:], dtype=torch.int64)[:, None])
        )
        seen = [self._seen.choices[layer] for layer in range(self.num_gates)]
        shared = [self._seen.shared[layer] for layer in range(self.num_gates)]
        states = {Tap.EARLY: [x for x, _ in seen], Tap.SHARED: shared}
        return TextRead(token_ids, [ids for _, ids in seen], states, likelihood.sum().item())


def pieces(reader: TextReader, texts: Iterable[str], max_tokens: int) -> Iterator[list[int]]:
    """Yield the first tokens of each text in pieces that can be read; all texts have an equal share of `max_tokens`."""
    encoded = [reader.encode(text) for text in texts]
    share = max(max_tokens // max(len(encoded), 1), 1)
    for token_ids in encoded:
        for start in range(0, min(len(token_ids), share), PIECE_TOKENS):
            yield token_ids[start : min(start + PIECE_TOKENS, share)]


@torch.inference_mode()
def fit_gates(reader: TextReader, texts: Iterable[list[int]]) -> FittedGates:
    """Fit maps for both taps, one to three layers ahead, to all tokens of the texts, at least one."""
    layers, norms = zip(*reader.decoder.gated_blocks(), strict=True)
    fit = GateFit(DISTANCES)
    for token_ids in texts:
        states = reader.read(token_ids).states
        scores = [layer.preview(x) for layer, x in zip(layers, states[Tap.EARLY], strict=True)]
        fit.add(states, scores)
    return fit.solve(plain_maps(layers, norms, DISTANCES))


def _batch(token_ids: Sequence[int]) -> ForwardBatch:
    count = len(token_ids)
    blocks = array("i", range(-(-count // _BLOCK_SIZE)))
    return ForwardBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.arange(count),
        attention=PagedRows(torch.arange(count), AttentionPlan([ChunkSpan(count, 0, blocks)], _BLOCK_SIZE)),
    )


def half_of_topics(parity: int) -> list[str]:
    """Return every other topic of Python's documentation, from the first (parity 0) or the second (parity 1) on."""
    from pydoc_data.topics import topics

    return [text for name in sorted(topics)[parity::2] if (text := topics[name].strip())]
