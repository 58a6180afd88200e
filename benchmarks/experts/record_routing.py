"""Record a model's routing of texts: the choices of its gates, and the guesses of later layers' gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.experts.lab_traces import GateGuesses, LabTrace
from experts.routing.files import Tap
from experts.routing.gates import FittedGates, GatePreview
from moeserve.engine.experts.fit import DISTANCES, TextRead, TextReader, fit_gates, pieces

# By tap and distance, [L - distance, T, E].
_Guesses = dict[tuple[Tap, int], NDArray[np.float16]]
# Tokens of all texts that gates are fitted to.
_FITTED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Recorded:
    """traces: by the name of the fit of the gates, empty for the model's own gates. perplexity: of the texts."""

    traces: dict[str, LabTrace]
    perplexity: float


def record_with_fits(
    folder: Path, texts: Sequence[str], max_tokens: int, min_tokens: int, fitted_to: dict[str, Sequence[str]]
) -> Recorded:
    """Record the first `max_tokens` tokens of each text as a request of its own; skip texts below `min_tokens`.

    Each is computed in one step, all rows in all layers. The gates of up to three later layers are applied to the state
    at both taps of each layer. fitted_to: by the name of the fit, the texts whose first tokens gates are fitted to.
    """
    reader = TextReader(folder)
    layers, norms = zip(*reader.decoder.gated_blocks(), strict=True)
    fits: dict[str, FittedGates | None] = {"": None}
    for name, learnt in fitted_to.items():
        fits[name] = fit_gates(reader, pieces(reader, learnt, _FITTED_TOKENS))
    distances = min(DISTANCES, len(layers) - 1)
    previews = {
        name: [GatePreview(layers, norms, distances, tap, fitted) for tap in Tap] for name, fitted in fits.items()
    }
    read: list[TextRead] = []
    guesses: dict[str, list[_Guesses]] = {name: [] for name in fits}
    for text in texts:
        token_ids = reader.encode(text)[:max_tokens]
        if len(token_ids) < min_tokens:
            continue
        of_text = reader.read(token_ids)
        read.append(of_text)
        for name, of_name in previews.items():
            guesses[name].append(
                {key: value for preview in of_name for key, value in _guesses(preview, of_text).items()}
            )
    assert reader.decoder.spec.moe is not None
    num_experts = reader.decoder.spec.moe.num_experts
    traces = {name: _trace(num_experts, read, of_name) for name, of_name in guesses.items()}
    predicted = sum(len(of_text.token_ids) - 1 for of_text in read)
    return Recorded(traces, exp(-sum(of_text.log_likelihood for of_text in read) / predicted))


def _guesses(preview: GatePreview, read: TextRead) -> _Guesses:
    states, num_layers = read.states[preview.tap], len(read.ids)

    def at(distance: int) -> NDArray[np.float16]:
        of_layers = [
            preview(layer, range(distance, distance + 1), states[layer])[0] for layer in range(num_layers - distance)
        ]
        return np.stack(of_layers).astype(np.float16)

    return {(preview.tap, distance): at(distance) for distance in range(1, preview.max_distance + 1)}


def _trace(num_experts: int, read: Sequence[TextRead], guesses: Sequence[_Guesses]) -> LabTrace:
    requests = np.repeat(np.arange(len(read), dtype=np.int32), [len(of_text.token_ids) for of_text in read])
    return LabTrace(
        num_experts,
        np.concatenate([np.stack([ids.numpy().astype(np.uint16) for ids in of_text.ids]) for of_text in read], axis=1),
        requests,
        np.concatenate([np.asarray(of_text.token_ids, np.int32) for of_text in read]),
        tuple(
            GateGuesses(tap, distance, np.concatenate([of_text[tap, distance] for of_text in guesses], axis=1))
            for tap, distance in guesses[0]
        ),
    )
