"""From a run context to one rank of several."""

from __future__ import annotations

import os
import threading

import structlog
import torch
import zmq

from experts.errors import ExpertStoreError
from moeserve.config import ConfigError, ServeConfig
from moeserve.device import too_few_gpus
from moeserve.model_loading import Report
from moeserve.models.errors import ModelError
from moeserve.ranks.cores import bind_to_cores
from moeserve.ranks.first_rank import run_first_rank
from moeserve.ranks.other_rank import run_other_rank
from moeserve.run_context import RunContext

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
