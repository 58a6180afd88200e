"""`torchrun ... -m launcher.worker [MODEL] [options of moeserve serve]`: a rank that torchrun itself started.

Rank 0 serves HTTP like `moeserve serve`, with its engine as a child in its place in the group. The others compute.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from launcher.child import die_with_parent
from launcher.kv_disk import without_none
from launcher.logs import configure_logs
from launcher.preflight import check_all, check_machine
from launcher.processes import computing_environment
from launcher.run_directory import make_context
from launcher.serve import faults_in_words, resolve, run_first_node
from launcher.settings_options import ServeCommand, settings_options
from launcher.supervisor import WORKER_MODULE
from moeserve.config import ConfigError, ServeConfig, load_config

_EXIT_FAILED = 3
# Torchrun kills ranks that have not ended this many seconds after its SIGTERM.
_TORCHRUN_PATIENCE = 30.0


@click.command(cls=ServeCommand)
@settings_options
def serve_rank(config_file: Path | None, **flags: Any) -> None:
    """One rank of a service, started by torchrun, which says how many there are and which one this is."""
    errors = Console(stderr=True, soft_wrap=True)
    with faults_in_words(errors, _EXIT_FAILED):
        check_machine()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent(os.getppid())
        config = without_none(_config_of_group(load_config(flags, os.environ, config_file)))
        check_all(config)
        sys.exit(_run(config, errors))


def _config_of_group(config: ServeConfig) -> ServeConfig:
    """Return the settings with torchrun's sizes. Raise ConfigError if a setting contradicts them."""
    environment = os.environ
    try:
        num_ranks, num_here = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
        node_rank = int(environment.get("GROUP_RANK", int(environment["RANK"]) // num_here))
        endpoint = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    except (KeyError, ValueError):
        raise ConfigError(
            "launcher.worker is for torchrun (torchrun --nproc-per-node 2 -m launcher.worker MODEL): "
            "on its own, use moeserve serve."
        ) from None
    # Ranks that share each layer are a group; the groups that share the experts are a stage of the pipeline.
    num_groups, ungrouped = divmod(num_ranks, config.tensor_parallel_size)
    if ungrouped:
        raise ConfigError(f"--tensor-parallel-size {config.tensor_parallel_size}: torchrun started {num_ranks} ranks.")
    num_stages = config.pipeline_parallel_size
    width, over = divmod(num_groups, num_stages)
    for name, size, is_wrong in (
        ("pipeline", num_stages, over > 0),
        ("expert", config.expert_parallel_size, config.expert_parallel_size not in (1, width)),
    ):
        if is_wrong:
            raise ConfigError(f"--{name}-parallel-size {size}: torchrun started {num_ranks} ranks.")
    if num_ranks % num_here:
        raise ConfigError(f"{num_ranks} ranks, {num_here} of them on this node: all nodes need the same number.")
    nnodes = num_ranks // num_here
    return replace(
        config,
        expert_parallel_size=width,
        nnodes=nnodes,
        node_rank=node_rank if nnodes > 1 else 0,
        rdzv_endpoint=endpoint if nnodes > 1 else None,
    )


def _run(config: ServeConfig, errors: Console) -> int:
    rank = int(os.environ["RANK"])
    # Torchrun sets OMP_NUM_THREADS to 1 by default, so the variable does not tell the user's wish.
    os.environ |= computing_environment(os.environ, config) | {
        "DS_ACCELERATOR": "cuda" if config.device == "cuda" else "cpu"
    }
    if rank == 0:
        if config.shutdown_timeout >= _TORCHRUN_PATIENCE:
            config = replace(config, shutdown_timeout=_TORCHRUN_PATIENCE - 5)
        return run_first_node(config, errors, worker_module=WORKER_MODULE, meets_in_store=True)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logs(config.log_level, config.log_format)
    model_dir = resolve(config, lambda *_: None)
    context = replace(make_context(config, model_dir, Path(os.devnull), meets_in_store=True), incarnation=0)
    # Imports torch, which takes seconds.
    from moeserve.engine.ranked_service import load_member, serve_member

    member = load_member(context, rank, lambda _: None, to_copy=False)
    if member is not None:
        serve_member(context, member, lambda _: None)
    return 0
