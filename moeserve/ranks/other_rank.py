"""The life of every rank but 0: it does what rank 0 sends."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from experts.errors import CollectiveError
from experts.placement import Placement
from moeserve.config import ServeConfig
from moeserve.device import KvBudget, choose_device, cuda_absence
from moeserve.experts.memory import residency_with
from moeserve.model_loading import ModelPlan, Report, read_spec
from moeserve.ranks.meeting import meet_first
from moeserve.ranks.members import RankMember, make_member, plan_gpu_rank
from moeserve.ranks.messages import (
    Dismissed,
    Loaded,
    RankError,
    Setup,
    Start,
)
from moeserve.ranks.steps import RankSteps
from moeserve.ranks.transport import BeatThread, RankLink, introduction
from moeserve.wire import RunContext


def run_other_rank(context: RunContext, sockets: zmq.Context[zmq.Socket[bytes]], rank: int, report: Report) -> None:
    meeting, own = meet_first(context), context.config.device
    link = RankLink(sockets, meeting, rank)
    member: RankMember | None = None
    beats = BeatThread(
        sockets,
        meeting,
        rank,
        lambda: member.collectives.num_entered if member else 0,
        lambda: member.memory_stats() if member else None,
    )
    beats.start()
    try:
        link.send(introduction(context, rank))
        setup = link.receive(beats.say_waiting)
        if isinstance(setup, Dismissed):
            raise RankError(setup.reason)
        if not isinstance(setup, Setup):
            return
        # From here on rank 0 says when to leave: it finishes its step first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        beats.busy.set()
        if context.config.nnodes == 1:
            link.watch(setup.pid)
        context = replace(context, config=_shared_config(context.config, setup.settings))
        _check_device(rank, own, context.config.device)
        member = make_member(context, meeting, rank, _plan_of(setup, context), lambda _: None)
        link.send(Loaded(rank))
        if isinstance(link.receive(), Start):
            member.warm_up()
            report({"event": "computing"})
            RankSteps(rank, link, member, beats).run()
        member.close()
    except CollectiveError as error:
        raise RankError(f"Rank {rank} cannot reach the others: {error}.") from error
    finally:
        beats.stop()
        link.close()


def _check_device(rank: int, own: str, of_first: str) -> None:
    """Raises RankError. What carries the collectives was prepared for the device that this rank was started with."""
    if (own == "cuda") != (of_first == "cuda"):
        raise RankError(f"Rank {rank} was started with --device {own} and rank 0 with --device {of_first}.")


def _plan_of(setup: Setup, context: RunContext) -> ModelPlan:
    """What rank 0 has planned, for this rank's own copy of the model."""
    directory = Path(context.model_dir)
    placement = Placement(context.config.expert_parallel_size, setup.placement)
    if choose_device(context.config, cuda_absence) == "cuda":
        return plan_gpu_rank(directory, context.config, placement)
    spec, dtype = read_spec(directory, context.config)
    residency = None
    if setup.expert_slots is not None:
        residency = residency_with(setup.expert_slots, directory, spec, dtype)
    return ModelPlan(spec, dtype, KvBudget(setup.num_blocks, setup.max_model_len), 0, placement, residency)


def _shared_config(own: ServeConfig, settings: bytes) -> ServeConfig:
    """The settings of rank 0, but what is a node's own matter."""
    return replace(
        msgspec.json.decode(settings, type=ServeConfig),
        threads=own.threads,
        node_rank=own.node_rank,
        curve_key_file=own.curve_key_file,
        log_level=own.log_level,
        log_format=own.log_format,
    )
