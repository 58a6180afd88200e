"""What a rank says of itself when it comes, and whom rank 0 sends away."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

import torch

from moeserve.ranks.hub import RankHub
from moeserve.ranks.messages import Dismissed, Joined, RankError
from moeserve.ranks.network import machine_id
from moeserve.run_context import RunContext
from moeserve.version import VERSION


def introduction(context: RunContext, rank: int) -> Joined:
    software = f"moeserve {VERSION} with torch {torch.__version__}"
    return Joined(rank, os.getpid(), platform.node(), machine_id(), software, context.model_hash)


def dismiss_strangers(hub: RankHub, joined: Mapping[int, Joined], first: Joined) -> None:
    """Raises RankError, and tells the rank why, if one has another model or other software than rank 0."""
    for rank, other in sorted(joined.items()):
        where = f"{hub.name(rank)} cannot take part"
        if other.software != first.software:
            reason = f"{where}: it runs {other.software}, rank 0 {first.software}."
        elif other.model_hash != first.model_hash:
            reason = f"{where}: its model differs from that of rank 0; give every node the same files."
        else:
            continue
        hub.send(rank, Dismissed(reason))
        raise RankError(reason)
