"""How the ranks of one service find each other.

Ranks that one supervisor started know everything from their run context. Otherwise rank 0 announces its sockets in the
store of torchrun. That store is open to whoever reaches its port, so what counts between nodes is the key: a rank
talks only to a rank 0 that has it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moeserve.ranks.keys import RankKeys, load_keys
from moeserve.ranks.messages import RankError
from moeserve.ranks.network import interface_of, own_address_towards, resolve
from moeserve.run_context import RunContext

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_KEY = "moeserve"


class Announcement(msgspec.Struct):
    """What rank 0 tells. `steps[r - 1]` is the address for rank r; without `collectives` they use torchrun's store."""

    incarnation: int
    results: str
    steps: list[str]
    collectives: str | None


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where ranks meet, as one of them sees it.

    For rank 0 the addresses are what to bind, where a `*` stands for a free port. collectives: the file in which ranks
    find each other for their collectives, None for torchrun's store. interface: the network they use for them.
    """

    incarnation: int
    results: str
    steps: tuple[str, ...]
    collectives: Path | None
    interface: str
    keys: RankKeys | None = None

    def announce(self, results: str, steps: list[str]) -> None:
        """Tells the other ranks what was bound."""
        collectives = None if self.collectives is None else str(self.collectives)
        announcement = Announcement(self.incarnation, results, steps, collectives)
        _store().set(_KEY, msgspec.json.encode(announcement).decode())


def meet_as_first(context: RunContext) -> Meeting:
    """What rank 0 is to bind. Raises ConfigError or RankError."""
    config = context.config
    if config.nnodes == 1:
        return _meet_in_directory(context)
    assert config.curve_key_file is not None
    host = os.environ["MASTER_ADDR"]
    address = resolve(host)
    return Meeting(
        incarnation=context.incarnation,
        results=f"tcp://{address}:*",
        steps=tuple(f"tcp://{address}:*" for _ in range(1, config.expert_parallel_size)),
        collectives=None,
        interface=interface_of(address),
        keys=load_keys(Path(config.curve_key_file)),
    )


def meet_first(context: RunContext) -> Meeting:
    """Where another rank finds rank 0; waits for its announcement. Raises ConfigError or RankError."""
    config = context.config
    if not context.meets_in_store:
        return _meet_in_directory(context)
    try:
        announced = msgspec.json.decode(_store().get(_KEY), type=Announcement)
    except (RuntimeError, msgspec.MsgspecError) as error:
        raise RankError(
            f"Rank 0 does not say in torchrun's store where it is: {str(error).partition('.')[0]}."
        ) from None
    several = config.nnodes > 1
    assert not several or config.curve_key_file is not None
    return Meeting(
        incarnation=announced.incarnation,
        results=announced.results,
        steps=tuple(announced.steps),
        collectives=None if announced.collectives is None else Path(announced.collectives),
        interface=interface_of(own_address_towards(os.environ["MASTER_ADDR"])) if several else "lo",
        keys=load_keys(Path(config.curve_key_file)) if several and config.curve_key_file else None,
    )


def _meet_in_directory(context: RunContext) -> Meeting:
    return Meeting(
        incarnation=context.incarnation,
        results=context.results_address,
        steps=tuple(context.steps_address(rank) for rank in range(1, context.config.expert_parallel_size)),
        collectives=context.rendezvous,
        interface="lo",
    )


def _store() -> Store:
    from torch.distributed.rendezvous import rendezvous

    store: Store = next(rendezvous("env://", timeout=timedelta(minutes=5)))[0]
    return store
