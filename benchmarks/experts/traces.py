"""Routing of demo models on real text, recorded once and then read from the cache; halves of it, and controls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.experts.figures import Amount, Progress, Unavailable
from benchmarks.experts.lab_traces import LabTrace, load_lab_trace, save_lab_trace, shuffled_control, uniform_control
from moeserve.config import cache_root
from moeserve.engine.experts.fit import half_of_topics
from moeserve.model.demo import ensure_demo, ensure_split_demo
from moeserve.model.demo_build import calibration_text
from moeserve.model.spec import ModelError

# Raise when the recorded content changes.
_VERSION = 4
# Documents, and tokens of each.
_FULL, _QUICK = (64, 128), (16, 40)
_SHORTEST = 24
PLAIN, FITTED, BOUND, _PERPLEXITY = "", "fitted", "bound", "perplexity"


@dataclass(frozen=True, slots=True)
class Build:
    """A demo model; split: made of split neurons, not in tied groups."""

    name: str
    experts: int
    top_k: int
    split: bool = False


BUILDS = (Build("demo E=8 k=2", 8, 2), Build("demo E=16 k=2", 16, 2), Build("split demo E=16 k=2", 16, 2, split=True))


def folder_of(build: Build, amount: Amount, progress: Progress) -> Path:
    """Return the model's folder, built if need be. Raise Unavailable."""

    def report(stage: str, done: int, total: int) -> None:
        progress(f"building {build.name}: {stage} {done} of {total}")

    ensure = ensure_split_demo if build.split else ensure_demo
    try:
        return ensure(amount.cache, experts=build.experts, top_k=build.top_k, progress=report)
    except ModelError as error:
        raise Unavailable(str(error)) from error


def documents() -> list[str]:
    """Return text that is on every machine: the demo's calibration text, and half of Python's documentation by topic.

    A neuron-split demo has learnt from the calibration text and from the other half of the topics.
    """
    # Neither conversations nor documents hold empty lines: an empty line ends one.
    parts = [part.strip() for part in calibration_text().split("\n\n")]
    return [part for part in (*parts, *half_of_topics(1)) if part]


def recorded_trace(build: Build, amount: Amount, progress: Progress, fit: str = PLAIN) -> LabTrace:
    """Return documents one after the other, each a request, with the guesses of later layers' gates at both taps.

    fit: `PLAIN`, the gates themselves; `FITTED`, gates fitted to the other half of the topics; `BOUND`, gates fitted to
    these very documents, which no linear map can beat by much. Raise Unavailable where the model cannot be built.
    """
    return load_lab_trace(_recorded(build, amount, progress)[fit])


def perplexity(build: Build, amount: Amount, progress: Progress) -> float:
    """Return the model's perplexity on the same documents. Raise Unavailable."""
    return float(json.loads(_recorded(build, amount, progress)[_PERPLEXITY].read_bytes()))


def _recorded(build: Build, amount: Amount, progress: Progress) -> dict[str, Path]:
    """Return the traces' files by fit, and the perplexity's; record them if need be."""
    folder = folder_of(build, amount, progress)
    num_documents, num_tokens = _QUICK if amount.quick else _FULL
    texts = documents()
    chosen = texts[:: max(len(texts) // num_documents, 1)][:num_documents]
    made_of = hashlib.sha256("\0".join([str(_VERSION), str(num_tokens), *chosen]).encode())
    made_of.update((folder / "manifest.json").read_bytes())
    kind = "split" if build.split else "moe"
    start = f"{kind}-e{build.experts}-k{build.top_k}-{made_of.hexdigest()[:16]}"
    place = (amount.cache or cache_root()) / "bench" / "routing"
    found = {fit: place / f"{start}{f'-{fit}' * bool(fit)}.safetensors" for fit in (PLAIN, FITTED, BOUND)}
    found[_PERPLEXITY] = place / f"{start}-perplexity.json"
    if found[_PERPLEXITY].exists():
        return found
    progress(f"recording {build.name}")
    from benchmarks.experts.record_routing import record_with_fits

    place.mkdir(parents=True, exist_ok=True)
    recorded = record_with_fits(folder, chosen, num_tokens, _SHORTEST, {FITTED: half_of_topics(0), BOUND: chosen})
    for fit, trace in recorded.traces.items():
        save_lab_trace(found[fit], trace)
    # Written last: where it is, all are.
    found[_PERPLEXITY].write_text(json.dumps(recorded.perplexity))
    return found


def drawn_requests(trace: LabTrace, max_tokens: int, seed: int) -> LabTrace:
    """Return whole requests drawn at random, at least two, with at most `max_tokens` tokens together."""
    requests, counts = np.unique(trace.requests, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(requests))
    fits = np.cumsum(counts[order]) <= max_tokens
    fits[:2] = True
    return trace.select(np.isin(trace.requests, requests[order][fits]))


def halves(trace: LabTrace, seed: int) -> tuple[LabTrace, LabTrace]:
    """Deal whole requests by the seed into (to learn from, held out)."""
    requests, of_token = np.unique(trace.requests, return_inverse=True)
    is_learnt = np.random.default_rng(seed).permutation(len(requests)) % 2 == 0
    return trace.select(is_learnt[of_token]), trace.select(~is_learnt[of_token])


def with_controls(trace: LabTrace, seed: int) -> Iterator[tuple[str, LabTrace]]:
    """Yield the trace itself under an empty name, then the controls, in which there is nothing to be gained."""
    yield "", trace
    yield "uniform", uniform_control(trace, seed)
    yield "shuffled", shuffled_control(trace, seed)
