"""From a run context to one rank of several."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import structlog
import torch
import zmq

from experts.errors import ExpertStoreError
from moeserve.config import ConfigError, ServeConfig
from moeserve.device import too_few_gpus
from moeserve.model.spec import ModelError
from moeserve.model_loading import Report
from moeserve.ranks.first_rank import run_first_rank
from moeserve.ranks.other_rank import run_other_rank
from moeserve.wire import RunContext

# Which cores a rank keeps to: its own, where the ranks of a machine take all of them.


def own_cores(place: int, num_ranks: int, threads: int, usable: Sequence[int]) -> list[int]:
    """The cores of the rank in `place` among the `num_ranks` of a machine, each with so many threads.

    All `usable` ones, unless the ranks fill them exactly. With fewer threads there is room to go elsewhere, and under a
    container's quota these cores are not this service's alone: others would keep to the same ones.
    """
    if num_ranks * threads != len(usable):
        return list(usable)
    return sorted(usable)[place * threads : (place + 1) * threads]


def bind_to_cores(place: int, num_ranks: int, threads: int) -> list[int]:
    """Has this thread, and all that it starts from now on, keep to `own_cores`; returns them.

    Ranks meet in every layer, so that two of them on one core for a moment cost a step twice its time. The system moves
    them there now and then: while one waits, its core looks idle.
    """
    cores = own_cores(place, num_ranks, threads, sorted(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, cores)
    return cores


log = structlog.get_logger(__name__)


def run_rank(context: RunContext, rank: int, report: Report, stop: threading.Event) -> None:
    """Serves as rank 0, with the engine, until `stop` is set; as another rank until rank 0 says so or is gone.

    Raises ModelError, ConfigError or RankError, one sentence each, for what cannot be served, or no longer.
    """
    _keep_to_cores(context.config, rank)
    if context.config.device == "cuda":
        _take_gpu(context.config)
    try:
        with zmq.Context() as sockets:
            if rank == 0:
                run_first_rank(context, sockets, report, stop)
            else:
                run_other_rank(context, sockets, rank, report)
    except ExpertStoreError as error:
        raise ModelError(str(error)) from error


def _take_gpu(config: ServeConfig) -> None:
    """Makes the GPU of this rank the current one, before anything is done on another. Raises ConfigError."""
    if not torch.cuda.is_available():
        return
    obstacle = too_few_gpus(config, torch.cuda.device_count())
    if obstacle is not None:
        raise ConfigError(obstacle)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def _keep_to_cores(config: ServeConfig, rank: int) -> None:
    if config.bind_cores:
        num_here = config.expert_parallel_size // config.nnodes
        cores = bind_to_cores(rank % num_here, num_here, config.threads or torch.get_num_threads())
        log.info("rank_keeps_to_cores", rank=rank, cores=cores)
