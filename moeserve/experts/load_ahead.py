"""A service's prefetching as its settings and the gates fitted to its model say, told to the log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from experts.gates import FittedGates, FittedGatesError, load_fitted_gates, save_fitted_gates
from experts.observer import StepObserver
from experts.predictors import RankShare
from experts.prefetcher import PrefixListener
from moeserve.config import cache_root
from moeserve.experts.observe import PrefixSigner, routing_shape
from moeserve.experts.prefetch import GatedDecoder, PrefetchSteps, ResidentLayers, start_prefetching
from moeserve.experts.settings import statistics_key
from moeserve.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from moeserve.model.gpu_expert_memory import GpuResidentModel
    from moeserve.model.gpu_model import GpuSettings


# Where the gates fitted to a model are kept: in the cache, by the checkpoint's folder and configuration.


def fitted_gates_path(directory: Path) -> Path:
    """Of the checkpoint in `directory`, whether there is a file or not."""
    return cache_root() / "gates" / f"{directory.resolve().name}-{statistics_key(directory)[:16]}.safetensors"


def find_fitted_gates(directory: Path) -> FittedGates | None:
    """Those of the checkpoint in `directory`; None, and a warning, for a file that cannot be used."""
    path = fitted_gates_path(directory)
    if not path.exists():
        return None
    try:
        return load_fitted_gates(path, statistics_key(directory))
    except FittedGatesError as error:
        log.warning("fitted_gates_unusable", reason=str(error), consequence="the plain gates predict")
        return None


def keep_fitted_gates(directory: Path, fitted: FittedGates) -> Path:
    """Has `find_fitted_gates` find them from now on; returns the file."""
    path = fitted_gates_path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_fitted_gates(path, fitted, statistics_key(directory))
    return path


log = structlog.get_logger(__name__)


def load_ahead(
    directory: Path,
    choice: str,
    experts: ResidentLayers,
    decoder: GatedDecoder,
    share: RankShare | None = None,
) -> PrefixListener | None:
    """`start_prefetching` for the checkpoint in `directory`. What was loaded before does not count.

    Raises ConfigError for a choice that needs fitted gates where there are none.
    """
    experts.memory.forget_counts()
    fitted = find_fitted_gates(directory)
    listener = start_prefetching(choice, experts, decoder, share, fitted)
    if listener is not None:
        log.info("expert_prefetch", by=choice, gates_fitted=fitted is not None and choice != "gate")
    elif choice != "off":
        log.info("no_expert_prefetch", reason="the model has one layer with experts: no gate comes after it")
    return listener


# Loading experts ahead on a GPU, and signing cached prefixes.


def prefetches_on_gpu(
    decoder: GatedDecoder,
    experts: GpuResidentModel,
    directory: Path,
    settings: GpuSettings,
    share: RankShare | None = None,
) -> tuple[PrefixListener | None, list[StepObserver[StepPlan, StepResult]]]:
    """Who loads ahead, if somebody does, and who observes steps for that. settings: with experts.

    share: of a rank of several, see `moeserve.experts.prefetch.start_prefetching`.
    """
    bounded = settings.experts
    assert bounded is not None
    log.info("expert_memory", slots=min(experts.slots.num_slots), others_in=experts.tier, policy=bounded.policy)
    listener = load_ahead(directory, bounded.prefetch, experts, decoder, share)
    if listener is None:
        return None, []
    shape = routing_shape(decoder.spec)
    if shape is None or not bounded.signs_prefixes:
        return listener, [PrefetchSteps(listener), listener]
    signer = PrefixSigner(shape, settings.block_size, keeps_routing=settings.hears_gates)
    return listener, [PrefetchSteps(listener), listener, signer]
