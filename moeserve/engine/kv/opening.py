"""The prefix caches of a service, and KV beside their memory: a tier below it, transfers from and to other services."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moeserve.engine.cache_commands import CacheCommands
from moeserve.engine.kv.disk.files import AUTO
from moeserve.engine.kv.disk.opening import KvDisk, open_kv_disk
from moeserve.engine.kv.host import HostCopier, HostedBlocks, KvHost, disk_copier, open_hosted, open_kv_host
from moeserve.engine.kv.moves import KvMoves, Mover
from moeserve.engine.kv.transfer.exchange import KvExchange, KvLinks
from moeserve.engine.planner import build_caches
from moeserve.engine.rank import Rank
from moeserve.engine.ranks.copies import RankCopies
from moeserve.run_context import RunContext
from moeserve.scheduling.lower_tier import CopyJob, LowerTier
from moeserve.scheduling.overflow import Overflow
from moeserve.scheduling.pacing import Pace
from moeserve.scheduling.parts import Part
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import Executor
from radix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class BelowMemory:
    """The tier below memory, and the mover of its blocks. hosted: the blocks of a disk that are in the host's memory as
    well, None if none are. block_bytes: of a KV block in memory."""

    tier: LowerTier
    copier: Mover[CopyJob]
    hosted: HostedBlocks | None
    block_bytes: int


@dataclass(frozen=True, slots=True)
class ServiceKv:
    """The prefix caches of a service, one per rank, and KV beside them.

    links: with other services, None without a transfer. below: None without a tier.
    """

    caches: list[PrefixCache]
    links: KvLinks | None
    below: BelowMemory | None

    def sources(self) -> list[Part]:
        """Return the scheduler's parts for KV beside memory, in their order."""
        parts: list[Part] = [] if self.links is None else [self.links.fetches, self.links.offers]
        return parts if self.below is None else [*parts, self.below.tier]

    def moves(self, scheduler: Scheduler) -> Iterator[Part]:
        """Yield the engine's parts that move KV, in their order."""
        if self.links is not None:
            yield KvExchange(self.links, scheduler)
            yield KvMoves(self.links.fetches, self.links.fetcher, scheduler.waiting)
        if self.below is not None:
            yield KvMoves(self.below.tier, self.below.copier, scheduler.waiting)

    def commands(self) -> CacheCommands:
        below = self.below
        if below is None:
            return CacheCommands(self.caches)
        return CacheCommands(self.caches, below.tier, below.block_bytes, below.hosted)

    def close(self) -> None:
        """End the links' threads and close their sockets; `KvMoves` ends the copier."""
        if self.links is not None:
            self.links.close()


def open_kv(context: RunContext, rank: Rank, pace: Pace, executor: Executor, copies: RankCopies | None) -> ServiceKv:
    """Open the KV of a service, as the settings have it. Raise ConfigError.

    rank: of this process. copies: of the blocks of several ranks, None for a single one.
    """
    config, model = context.config, rank.model
    lower = _open_lower(context, rank)
    caches = build_caches(config, model.kv, stored=None if lower is None else lower.stored)
    setting = config.kv_transfer_config
    links = None if setting is None else KvLinks(context, rank, setting, caches[0], pace.compute_s)
    if lower is None:
        return ServiceKv(caches, links, None)
    tier = LowerTier(caches, pace, Overflow(config.kv_overflow), lower.read_s)
    hosted = None
    if isinstance(lower, KvDisk) and config.kv_host_memory is not None:
        hosted = open_hosted(config, rank)
    copier = _start_copier(rank, lower, hosted, executor, copies)
    return ServiceKv(caches, links, BelowMemory(tier, copier, hosted, model.kv_bytes // model.kv.num_blocks))


def _open_lower(context: RunContext, rank: Rank) -> KvDisk | KvHost | None:
    """Open the tier below memory, if there is to be one. Raise ConfigError."""
    model, path = rank.model, context.config.kv_disk_path
    keeps_prefixes = not model.spec.state_layers or model.kv.num_snapshots > 0
    if path is not None and (keeps_prefixes or path != AUTO):
        return open_kv_disk(context, rank)
    return None if context.config.kv_host_memory is None else open_kv_host(context.config, rank)


def _start_copier(
    rank: Rank, lower: KvDisk | KvHost, hosted: HostedBlocks | None, executor: Executor, copies: RankCopies | None
) -> Mover[CopyJob]:
    """Start the threads that copy blocks between memory and the lower tier."""
    if isinstance(lower, KvHost):
        return HostCopier(lower.pages, lower.memories)
    copier = disk_copier(rank, lower.files, hosted)
    if copies is None:
        return copier
    copies.open(copier, lower.files, executor.check)
    return copies
