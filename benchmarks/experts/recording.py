"""Routing of demo models on real text: recorded once, then read from the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.experts.measuring import Amount
from benchmarks.experts.texts import documents
from benchmarks.experts.unavailable import Unavailable
from experts.routing.trace_file import load_trace, save_trace
from experts.routing.traces import RoutingTrace
from moeserve.expert_service.texts import half_of_topics
from moeserve.models.cache_folder import cache_root
from moeserve.models.demo.cache import ensure_demo
from moeserve.models.errors import ModelError

# Raise when what is recorded of a text changes.
_VERSION = 2
# Documents, and tokens of each.
_FULL, _QUICK = (64, 128), (16, 40)
_SHORTEST = 24
PLAIN, FITTED, BOUND, _PERPLEXITY = "", "fitted", "bound", "perplexity"


@dataclass(frozen=True, slots=True)
class Build:
    """A demo model; split: out of split neurons, not in tied groups."""

    name: str
    experts: int
    top_k: int
    split: bool = False


BUILDS = (
    Build("demo E=8 k=2", 8, 2),
    Build("demo E=16 k=2", 16, 2),
    Build("split demo E=16 k=2", 16, 2, split=True),
)


def folder_of(build: Build, amount: Amount, progress: Callable[[str], None]) -> Path:
    """The model's folder, built if need be. Raises Unavailable."""

    def report(stage: str, done: int, total: int) -> None:
        progress(f"building {build.name}: {stage} {done} of {total}")

    try:
        return ensure_demo(amount.cache, experts=build.experts, top_k=build.top_k, split=build.split, progress=report)
    except ModelError as error:
        raise Unavailable(str(error)) from error


def recorded_trace(build: Build, amount: Amount, progress: Callable[[str], None], fit: str = PLAIN) -> RoutingTrace:
    """Documents one after the other, each a request, with what the gates of later layers guessed at both taps.

    fit: `PLAIN`, the gates themselves; `FITTED`, gates fitted to the other half of the topics; `BOUND`, gates fitted to
    these very documents, which no linear map can beat by much. Raises Unavailable where the model cannot be built.
    """
    files = _recorded(build, amount, progress)
    return load_trace(files[fit])


def perplexity(build: Build, amount: Amount, progress: Callable[[str], None]) -> float:
    """Of the same documents. Raises Unavailable."""
    return float(json.loads(_recorded(build, amount, progress)[_PERPLEXITY].read_bytes()))


def _recorded(build: Build, amount: Amount, progress: Callable[[str], None]) -> dict[str, Path]:
    """The files by what is in them, recorded if need be."""
    folder = folder_of(build, amount, progress)
    num_documents, num_tokens = _QUICK if amount.quick else _FULL
    texts = documents()
    chosen = texts[:: max(len(texts) // num_documents, 1)][:num_documents]
    made_of = hashlib.sha256("\0".join([str(_VERSION), str(num_tokens), *chosen]).encode())
    made_of.update((folder / "manifest.json").read_bytes())
    kind = "split" if build.split else "moe"
    start = f"{kind}-e{build.experts}-k{build.top_k}-{made_of.hexdigest()[:16]}"
    place = (amount.cache or cache_root()) / "bench" / "routing"
    files = {fit: place / f"{start}{f'-{fit}' * bool(fit)}.safetensors" for fit in (PLAIN, FITTED, BOUND)}
    files[_PERPLEXITY] = place / f"{start}-perplexity.json"
    if files[_PERPLEXITY].exists():
        return files
    progress(f"recording {build.name}")
    from benchmarks.experts.record_routing import record_with_fits

    place.mkdir(parents=True, exist_ok=True)
    recorded = record_with_fits(folder, chosen, num_tokens, _SHORTEST, {FITTED: half_of_topics(0), BOUND: chosen})
    for fit, trace in recorded.traces.items():
        save_trace(files[fit], trace)
    # The last file: where it is, all are.
    files[_PERPLEXITY].write_text(json.dumps(recorded.perplexity))
    return files
