"""Has a model read text, and keeps what its gates saw and what they chose; fits linear previews to that."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from experts.moe_layer import Dispatch
from experts.prediction.predictor import Tap
from experts.prefetch.fitted_gates import FittedGates
from experts.prefetch.gate_fit import GateFit
from experts.prefetch.gate_preview import plain_maps, unit_norm
from kernels.activation import Activation
from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.moe_gemm import moe_experts
from kernels.packed_experts import PackedExperts
from moeserve.config import ServeConfig
from moeserve.kv_pool import KVPool
from moeserve.model_loading import read_spec
from moeserve.models.decoder import ForwardBatch
from moeserve.models.weights import load_decoder

DISTANCES = 3
# Of a piece of text, which is read in one step.
PIECE_TOKENS = 256
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class TextRead:
    """Of one text of T tokens, by layer with experts. ids: [T, k]. states: [T, H] at each tap, those of `LATE` of unit
    norm and without the last layer."""

    token_ids: list[int]
    ids: list[Tensor]
    states: dict[Tap, list[Tensor]]
    log_likelihood: float


class TextReader:
    """A model with experts, all of them in memory, that reads texts one by one, each in one step."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError."""
        spec, dtype = read_spec(folder, ServeConfig())
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._after: dict[int, Tensor] = {}
        self.decoder = load_decoder(folder, spec, dtype=dtype, max_model_len=PIECE_TOKENS, dispatch_of=self._listen_to)
        self.decoder.after_layer = self._hear_after
        self._pool = KVPool(spec.kv_layers, PIECE_TOKENS // _BLOCK_SIZE, _BLOCK_SIZE, dtype)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @property
    def num_gates(self) -> int:
        return len(self.decoder.spec.moe_layers)

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text).ids
        return token_ids

    @torch.inference_mode()
    def read(self, token_ids: list[int]) -> TextRead:
        """All rows in all layers, of at most `PIECE_TOKENS` tokens and at least one."""
        logits = self.decoder.forward(_batch(token_ids), self._pool.layers)
        likelihood = (
            logits[:-1].float().log_softmax(-1).gather(1, torch.tensor(token_ids[1:], dtype=torch.int64)[:, None])
        )
        seen = [self._seen[layer] for layer in self.decoder.spec.moe_layers]
        after = [self._after[place] for place in range(len(seen) - 1)]
        states = {Tap.EARLY: [x for x, _ in seen], Tap.LATE: after}
        return TextRead(token_ids, [ids for _, ids in seen], states, likelihood.sum().item())

    def _listen_to(self, layer: int) -> Dispatch:
        def dispatch(
            x: Tensor, expert_ids: Tensor, weights: Tensor, experts: PackedExperts, activation: Activation
        ) -> Tensor:
            self._seen[layer] = x, expert_ids
            return moe_experts(x, expert_ids, weights, experts, activation)

        return dispatch

    def _hear_after(self, place: int, residual: Tensor) -> None:
        self._after[place] = unit_norm(residual)


def pieces(reader: TextReader, texts: Iterable[str], max_tokens: int) -> Iterator[list[int]]:
    """The texts' first tokens in pieces that can be read: of each text the same number, as far as it has them."""
    encoded = [reader.encode(text) for text in texts]
    share = max(max_tokens // max(len(encoded), 1), 1)
    for token_ids in encoded:
        for start in range(0, min(len(token_ids), share), PIECE_TOKENS):
            yield token_ids[start : min(start + PIECE_TOKENS, share)]


@torch.inference_mode()
def fit_gates(reader: TextReader, texts: Iterable[list[int]]) -> FittedGates:
    """Maps of both taps for one to three layers ahead, from all tokens of the texts, of which there is one."""
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
        slots=torch.arange(count),
        attention=AttentionPlan([ChunkSpan(count, 0, blocks)], _BLOCK_SIZE),
        logit_rows=None,
    )
