"""Has a model read texts and writes down what its gates choose, and what those of later layers would have."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from experts.moe_layer import Dispatch
from experts.prediction.predictor import Tap
from experts.prefetch.gate_preview import GatePreview
from experts.routing.traces import GateGuesses, RoutingTrace
from kernels.activation import Activation
from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.moe_gemm import moe_experts
from kernels.packed_experts import PackedExperts
from moeserve.config import ServeConfig
from moeserve.kv_pool import KVPool
from moeserve.model_loading import read_spec
from moeserve.models.decoder import Decoder, ForwardBatch
from moeserve.models.weights import load_decoder

_BLOCK_SIZE = 16
_DISTANCES = 3


class GateListener:
    """Keeps what each gate saw and chose in the latest step."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def dispatch_of(self, layer: int) -> Dispatch:
        def dispatch(
            x: Tensor, expert_ids: Tensor, weights: Tensor, experts: PackedExperts, activation: Activation
        ) -> Tensor:
            self.seen[layer] = x, expert_ids
            return moe_experts(x, expert_ids, weights, experts, activation)

        return dispatch


@torch.inference_mode()
def record(folder: Path, texts: Sequence[str], max_tokens: int, min_tokens: int = 1) -> RoutingTrace:
    """The first `max_tokens` tokens of each text as a request of its own; texts below `min_tokens` are left out.

    Each is computed in one step, all rows in all layers. The gates of up to three layers further on are applied to the
    input of each gate (tap `EARLY`).
    """
    spec, dtype = read_spec(folder, ServeConfig())
    listener = GateListener()
    decoder = load_decoder(folder, spec, dtype=dtype, max_model_len=max_tokens, dispatch_of=listener.dispatch_of)
    layers, norms = zip(*decoder.gated_blocks(), strict=True)
    preview = GatePreview(layers, norms, _DISTANCES)
    pool = KVPool(spec.kv_layers, -(-max_tokens // _BLOCK_SIZE), _BLOCK_SIZE, dtype)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = [tokenizer.encode(text).ids[:max_tokens] for text in texts]
    encoded = [token_ids for token_ids in encoded if len(token_ids) >= min_tokens]
    chosen, guesses = [], []
    for token_ids in encoded:
        decoder.forward(_batch(token_ids), pool.layers)
        seen = [listener.seen[layer] for layer in spec.moe_layers]
        chosen.append(np.stack([ids.numpy().astype(np.uint16) for _, ids in seen]))
        guesses.append(
            [
                [
                    preview(layer, distance, x).numpy()
                    for distance in range(1, min(_DISTANCES, len(seen) - 1 - layer) + 1)
                ]
                for layer, (x, _) in enumerate(seen)
            ]
        )
    return _trace(decoder, encoded, chosen, guesses)


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


def _trace(
    decoder: Decoder,
    encoded: Sequence[Sequence[int]],
    chosen: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.uint16]]],
    guesses: Sequence[Sequence[Sequence[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]]],
) -> RoutingTrace:
    """guesses[text][layer][distance - 1]: [T, E]."""
    assert decoder.spec.moe is not None
    num_layers = len(decoder.spec.moe_layers)
    requests = np.repeat(np.arange(len(encoded), dtype=np.int32), [len(token_ids) for token_ids in encoded])
    return RoutingTrace(
        decoder.spec.moe.num_experts,
        np.concatenate(chosen, axis=1),
        requests,
        np.concatenate([np.asarray(token_ids, np.int32) for token_ids in encoded]),
        requests,
        tuple(
            GateGuesses(
                Tap.EARLY,
                distance,
                np.stack(
                    [
                        np.concatenate([of_text[layer][distance - 1] for of_text in guesses]).astype(np.float16)
                        for layer in range(num_layers - distance)
                    ]
                ),
            )
            for distance in range(1, min(_DISTANCES, num_layers - 1) + 1)
        ),
    )
