"""Routing of demo models on real text: recorded once, then read from the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experts.routing.trace_file import TraceError, load_trace, save_trace
from experts.routing.traces import RoutingTrace
from moeserve.bench.experts.measuring import Amount
from moeserve.bench.experts.texts import documents
from moeserve.bench.experts.unavailable import Unavailable
from moeserve.models.cache_folder import cache_root
from moeserve.models.demo.cache import ensure_demo
from moeserve.models.errors import ModelError

# Raise when what is recorded of a text changes.
_VERSION = 1
_FULL, _QUICK = (64, 128), (16, 40)
_SHORTEST = 24


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


def recorded_trace(build: Build, amount: Amount, progress: Callable[[str], None]) -> RoutingTrace:
    """Documents one after the other, each a request, with what the gates of later layers guessed early.

    Raises Unavailable where the model cannot be built.
    """
    folder = folder_of(build, amount, progress)
    num_documents, num_tokens = _QUICK if amount.quick else _FULL
    texts = documents()
    chosen = texts[:: max(len(texts) // num_documents, 1)][:num_documents]
    made_of = hashlib.sha256("\0".join([str(_VERSION), str(num_tokens), *chosen]).encode())
    made_of.update((folder / "manifest.json").read_bytes())
    kind = "split" if build.split else "moe"
    name = f"{kind}-e{build.experts}-k{build.top_k}-{made_of.hexdigest()[:16]}.safetensors"
    file = (amount.cache or cache_root()) / "bench" / "routing" / name
    try:
        return load_trace(file)
    except TraceError:
        progress(f"recording {build.name}")
    from moeserve.bench.experts.record_routing import record

    trace = record(folder, chosen, num_tokens, _SHORTEST)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_trace(file, trace)
    return trace
