"""The fingerprint of a rank: a digest of everything that the bits of its KV and its tokens depend on, but tokens.

KV of another fingerprint is never read, from disk or from another service. So a change of weights, settings or code
makes a cache cold, not wrong; and the same model elsewhere has the same fingerprint.
"""

from __future__ import annotations

import hashlib
import platform
from functools import partial
from importlib.metadata import version
from pathlib import Path

import experts
import kernels
import moeserve.model
from kernels.cpu.library import find_library, native_kernels
from moeserve.config import VERSION, ServeConfig
from moeserve.device import gpu_name
from moeserve.engine.rank import Rank
from moeserve.model.contents import model_digest
from moeserve.model.file_hashes import WEIGHTS_MEMORY, whole_hashes
from moeserve.model.spec import DecoderSpec
from moeserve.run_context import RunContext

_SOURCES = (experts, kernels, moeserve.model)
_SOURCE_SUFFIXES = {".py", ".cpp", ".h"}


def fingerprint_of_kv(context: RunContext, rank: Rank, root: Path) -> str:
    """Return the fingerprint of KV that outlives the service or leaves it. All weights are read, unless `root`, a
    folder, remembers their hashes. Raise ModelError."""
    hash_weights = partial(whole_hashes, memory=root / WEIGHTS_MEMORY)
    return fingerprint_of(context.config, rank, model_digest(Path(context.model_dir), hash_weights).hex())


def fingerprint_of(config: ServeConfig, rank: Rank, model: str) -> str:
    """Return the fingerprint, 32 hex digits, of a rank whose `model_digest` is `model`."""
    served = rank.model
    assert rank.kv_pool is not None
    facts = (
        VERSION,
        model,
        config.block_size,
        served.arithmetic,
        str(served.dtype),
        [str(pool.dtype) for layer in rank.kv_pool.layers for pool in layer if pool is not None],
        [(kind.name, one.shape[0], one.shape[2]) for kind, memory in rank.block_tensors().items() for one in memory],
        isinstance(served.spec, DecoderSpec),  # Or transformers' code computes.
        served.is_stretched,
        config.weight_forms,
        # Where there are several ranks, each sums the outputs of its own experts, and sends the sums home rounded.
        None if rank.group is None else (rank.group.experts.placement.ranks, config.combine_dtype),
        # Where ranks share each layer, each sums its own heads, channels and experts.
        config.tensor_parallel_size,
        served.layers,  # Where ranks share them, each has its part of a block.
        f"any {platform.machine()}" if config.reproducible else _compiled(served.device),
        version("torch"),
        version("transformers"),
        _hash_sources(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _compiled(device: str) -> str:
    """Name the compiled code that computes, and the GPU that it runs on."""
    if device != "cpu":
        return f"triton {version('triton')} on {gpu_name()}"
    if native_kernels() is None:
        return "torch"
    return hashlib.sha256(find_library().path.read_bytes()).hexdigest()


def _hash_sources() -> str:
    """Return a digest of the code that computes."""
    digest = hashlib.sha256()
    for package in _SOURCES:
        folder = Path(next(iter(package.__path__)))
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCE_SUFFIXES):
            digest.update(f"{path.relative_to(folder)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
