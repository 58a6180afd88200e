"""Loading experts ahead on a GPU: what computes its steps, told of them, and signing cached prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from experts.prefetch.home_rows import HomeRows
from experts.prefetch.prefix_listener import PrefixListener
from moeserve.executor import LaunchingRunner
from moeserve.expert_service.load_ahead import load_ahead
from moeserve.expert_service.prefetch import GatedDecoder, PrefetchingLauncher
from moeserve.expert_service.recording import routing_shape
from moeserve.expert_service.signatures import AnnotatingLauncher

if TYPE_CHECKING:
    from moeserve.cuda.expert_memory import GpuResidentModel
    from moeserve.cuda.gpu_model import GpuSettings

log = structlog.get_logger(__name__)


def with_prefetches(
    runner: LaunchingRunner,
    decoder: GatedDecoder,
    experts: GpuResidentModel,
    directory: Path,
    settings: GpuSettings,
    home_rows: HomeRows | None = None,
) -> tuple[LaunchingRunner, PrefixListener | None]:
    """The runner as it is to be used, and who loads ahead, if somebody does. settings: with experts.

    home_rows: of a rank of several, see `moeserve.expert_service.prefetch.start_prefetching`.
    """
    bounded = settings.experts
    assert bounded is not None
    log.info("expert_memory", slots=min(experts.slots.num_slots), others_in=experts.tier, policy=bounded.policy)
    listener = load_ahead(directory, bounded.prefetch, experts, decoder, home_rows)
    if listener is None:
        return runner, None
    launcher = PrefetchingLauncher(runner, listener)
    shape = routing_shape(decoder.spec)
    if shape is None or not bounded.signs_prefixes:
        return launcher, listener
    return AnnotatingLauncher(launcher, shape, settings.block_size, keeps_routing=settings.hears_gates), listener
