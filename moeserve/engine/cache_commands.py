"""The engine's side of the cache routes: list cached prefixes, pin and unpin prefixes, drop an account's prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from heapq import merge
from itertools import islice
from typing import Any

import msgspec

from moeserve.scheduling.lower_tier import Hosted, LowerTier, TierCounters
from moeserve.scheduling.overflow import Fate
from moeserve.wire import FeatureSamples, pack_token_ids, unpack_token_ids
from radix_cache import PUBLIC, BudgetError, CachedPrefix, PrefixCache, Tier, account_of, list_prefixes

MAX_LISTED = 1000  # prefixes that one answer lists at most
_BUDGET = ("blocks", "retained", "pinned", "free")  # as in `Retentions.budget`; free for pins
_ENTRIES_AT_ONCE = 250  # entries that one slice of a listing makes

Job = Generator[None, None, dict[str, Any]]


class CacheCommandError(Exception):
    """A command that cannot be carried out; the message gives the reason."""


class ListArguments(msgspec.Struct, forbid_unknown_fields=True):
    """namespace: None for all. share, pin_share: of the account's budgets, None for the service's settings."""

    namespace: str | None
    limit: int
    share: float | None = None
    pin_share: float | None = None


class PinArguments(msgspec.Struct, forbid_unknown_fields=True):
    """A prefix by its tokens (int32 bytes), or by the id that the listing shows. share, pin_share: as in
    `ListArguments`."""

    namespace: str
    token_ids: bytes = b""
    prefix_id: str | None = None
    share: float | None = None
    pin_share: float | None = None


class UnpinArguments(msgspec.Struct, forbid_unknown_fields=True):
    """A prefix by its tokens (int32 bytes), or by the id that the listing shows."""

    namespace: str
    token_ids: bytes = b""
    prefix_id: str | None = None


class DropArguments(msgspec.Struct, forbid_unknown_fields=True):
    """namespace: None for all."""

    namespace: str | None


class CacheCommands:
    """Commands about the caches of all ranks. Every account has its budget on each rank.

    A command is a generator: the engine does other work between its slices, and it returns the answer.
    """

    def __init__(
        self,
        caches: Sequence[PrefixCache],
        lower: LowerTier | None = None,
        block_bytes: int = 0,
        hosted: Hosted | None = None,
    ) -> None:
        """lower: None if blocks are in memory alone. block_bytes: of KV, in memory. hosted: blocks of a disk
        that are in the host's memory as well, None if none are."""
        self._hosted = hosted
        self._block_bytes = block_bytes
        self._caches = caches
        self._lower = lower
        self._commands = {
            "list_prefixes": (ListArguments, self._list),
            "pin_prefix": (PinArguments, self._pin),
            "unpin_prefix": (UnpinArguments, self._unpin),
            "drop_prefixes": (DropArguments, self._drop),
        }

    def __contains__(self, command: str) -> bool:
        return command in self._commands

    def start(self, command: str, arguments: dict[str, Any]) -> Job:
        """Begin a command, without any work yet. Raise CacheCommandError, here or in a slice."""
        kind, run = self._commands[command]
        try:
            # The commands' types differ only in their arguments.
            return self._run(run(msgspec.convert(arguments, kind)))  # type: ignore[operator]
        except ValueError as error:  # msgspec's ValidationError
            raise CacheCommandError(str(error)) from None

    def _run(self, job: Job) -> Job:
        try:
            return (yield from job)
        except ValueError as error:  # the wire's DecodeError among them
            raise CacheCommandError(str(error)) from None

    def samples(self) -> FeatureSamples:
        caches = self._caches
        retentions = [cache.retentions for cache in caches]
        samples: FeatureSamples = {
            "moeserve_kv_retained_blocks": [[sum(one.num_blocks for one in retentions)]],
            "moeserve_kv_pinned_prefixes": [[sum(one.num_pins for one in retentions)]],
            "moeserve_kv_retained_evictions": [[sum(one.num_lost for one in retentions)]],
        }
        windows = [cache.windows for cache in caches if cache.windows.num_blocks]
        if windows:
            samples["moeserve_kv_window_blocks"] = [
                ["free", sum(blocks.num_free for blocks in windows)],
                ["cached", sum(blocks.num_cached for blocks in windows)],
                ["leased", sum(blocks.num_held for blocks in windows)],
            ]
            samples["moeserve_kv_window_evictions"] = [[sum(blocks.num_evicted for blocks in windows)]]
        tables = [cache.states.table for cache in caches if cache.states.are_kept]
        if tables:
            samples |= {
                "moeserve_state_snapshots": [[sum(table.num_cached for table in tables)]],
                "moeserve_state_snapshots_max": [[sum(table.num_rows for table in tables)]],
                "moeserve_state_snapshots_saved": [[sum(table.num_placed for table in tables)]],
                "moeserve_state_snapshots_used": [[sum(table.num_used for table in tables)]],
                "moeserve_state_snapshots_evicted": [[sum(table.num_evicted for table in tables)]],
            }
        if self._lower is None:
            return samples
        of_tiers = self._tier_samples(self._lower)
        if self._hosted is not None:
            _add_host(of_tiers, self._hosted, self._lower.counters)
        return samples | of_tiers

    def _tier_samples(self, lower: LowerTier) -> FeatureSamples:
        counters, stored = lower.counters, lower.stored
        tier = stored.tier.value
        in_memory = sum(cache.num_blocks - cache.counts.num_free for cache in self._caches)
        return {
            "moeserve_kv_tier_blocks": [["device", in_memory], [tier, stored.num_own]],
            "moeserve_kv_tier_bytes": [["device", in_memory * self._block_bytes], [tier, stored.num_of(None)[1]]],
            "moeserve_kv_tier_age_seconds": [
                ["device", round(max(cache.tree.age for cache in self._caches), 1)],
                [tier, round(stored.oldest_age, 1)],
            ],
            "moeserve_kv_tier_hits": [["device", counters.device_hits], [tier, counters.lower_hits]],
            "moeserve_kv_tier_hit_tokens": [["device", counters.device_hit_tokens], [tier, counters.lower_hit_tokens]],
            f"moeserve_kv_{tier}_bytes": [[stored.num_bytes]],
            f"moeserve_kv_{tier}_copied_bytes": [["read", counters.read_bytes], ["written", counters.written_bytes]],
            f"moeserve_kv_{tier}_seconds": [
                ["read", round(counters.read_seconds, 6)],
                ["written", round(counters.write_seconds, 6)],
            ],
            f"moeserve_kv_{tier}_evictions": [[stored.num_evicted]],
            f"moeserve_kv_{tier}_failures": [
                ["gone", counters.num_gone],
                ["damaged", counters.num_damaged],
                ["not_written", counters.num_failed_writes],
                ["overdue", counters.num_overdue],
            ],
            f"moeserve_kv_{tier}_slower": [[counters.num_slower]],
            "moeserve_kv_overflow": [[fate.value, counters.fates[fate]] for fate in Fate],
        }

    def _list(self, arguments: ListArguments) -> Job:
        limit = min(max(1, arguments.limit), MAX_LISTED)
        namespaces = None if arguments.namespace is None else (arguments.namespace,)
        of_rank, num_runs, complete = [], 0, True
        for rank, cache in enumerate(self._caches):
            listing = yield from list_prefixes(cache.tree, namespaces, limit)
            of_rank.append([(rank, prefix) for prefix in listing.prefixes])
            num_runs, complete = num_runs + listing.num_visited, complete and listing.complete
            yield
        best = merge(*of_rank, key=lambda one: (-one[1].tokens_saved, one[1].unused_for))
        entries = []
        for rank, prefix in islice(best, limit):
            entries.append(_listed(rank, prefix))
            if len(entries) % _ENTRIES_AT_ONCE == 0:
                yield
        account = account_of(arguments.namespace or "")
        budgets = [cache.retentions.budget(account, arguments.share, arguments.pin_share) for cache in self._caches]
        return {
            "prefixes": entries,
            "num_prefixes": num_runs,
            "complete": complete,
            "block_size": self._caches[0].block_size,
            "num_blocks": sum(cache.num_blocks for cache in self._caches),
            "budget": dict(zip(_BUDGET, map(sum, zip(*budgets, strict=True)), strict=True)),
            "host": self._stored_in(Tier.HOST, namespaces),
            "disk": self._stored_in(Tier.DISK, namespaces),
        }

    def _stored_in(self, tier: Tier, namespaces: tuple[str, ...] | None) -> dict[str, int] | None:
        """Return the KV of namespaces, or of all, in a tier; None without the tier."""
        if self._lower is None:
            return None
        stored = self._lower.stored
        if tier is stored.tier:
            num_blocks, num_bytes = stored.num_of(namespaces)
        elif tier is Tier.HOST and self._hosted is not None:
            folders = None if namespaces is None else [stored.folder_of(namespace) for namespace in namespaces]
            num_blocks, num_bytes = self._hosted.resident(folders)
        else:
            return None
        return {"blocks": num_blocks, "tokens": num_blocks * self._caches[0].block_size, "bytes": num_bytes}

    def _pin(self, arguments: PinArguments) -> Job:
        """Pin a prefix where most of it is cached, a public one on every rank.

        `missing_tokens` is 0 if it is pinned now; with several ranks it is the largest number that a rank lacks.
        """
        tokens: array[int] | None = unpack_token_ids(arguments.token_ids)
        if (place := self._place_of(arguments.prefix_id)) is not None:
            rank, serial = place
            tokens = yield from self._caches[rank].retentions.find(serial, arguments.namespace)
        if tokens is None or (arguments.prefix_id is not None and place is None):
            return {"over_budget": False, "is_gone": True}
        size = self._caches[0].block_size
        wanted = len(tokens) // size * size
        longer = tokens + array("i", [0])
        caches = self._caches
        if arguments.namespace != PUBLIC:
            caches = [max(caches, key=lambda cache: cache.peek(longer, arguments.namespace))]
        try:
            shares = arguments.share, arguments.pin_share
            cached = min(cache.retentions.pin(tokens, arguments.namespace, *shares) for cache in caches)
        except BudgetError as error:
            return {"over_budget": True, "wanted_blocks": error.num_wanted, "free_blocks": error.num_free}
        return {"over_budget": False, "tokens": wanted, "missing_tokens": wanted - cached}

    def _unpin(self, arguments: UnpinArguments) -> Job:
        yield from ()
        if arguments.prefix_id is None:
            tokens = unpack_token_ids(arguments.token_ids)
            return {"unpinned": sum(cache.retentions.unpin(tokens, arguments.namespace) for cache in self._caches)}
        if (place := self._place_of(arguments.prefix_id)) is None:
            return {"unpinned": 0}
        rank, serial = place
        return {"unpinned": int(self._caches[rank].retentions.unpin_serial(serial, arguments.namespace))}

    def _place_of(self, prefix_id: str | None) -> tuple[int, int] | None:
        """Return the rank and the serial in an id of the listing, None for no id or another text."""
        rank, _, serial = (prefix_id or "").partition(".")
        if not (rank.isdecimal() and serial.isdecimal() and len(serial) < 20 and int(rank) < len(self._caches)):
            return None
        return int(rank), int(serial)

    def _drop(self, arguments: DropArguments) -> Job:
        namespaces = None if arguments.namespace is None else (arguments.namespace,)
        num_freed = 0
        for cache in self._caches:
            for count in cache.drop(namespaces):
                num_freed += count
                yield
        return {"blocks_freed": num_freed}


def _listed(rank: int, prefix: CachedPrefix) -> dict[str, Any]:
    """Return the fields of a prefix, with ids that are unique among all ranks, and the preview as int32 bytes."""
    parent = None if prefix.parent is None else f"{rank}.{prefix.parent}"
    own = {"id": f"{rank}.{prefix.serial}", "parent": parent, "preview": pack_token_ids(prefix.preview)}
    fields: dict[str, Any] = msgspec.to_builtins(prefix)
    return fields | own


def _add_host(samples: FeatureSamples, hosted: Hosted, counters: TierCounters) -> None:
    """Add the figures of the host's memory above a disk, and take them off the disk's."""
    num_blocks, num_bytes = hosted.resident()
    samples["moeserve_kv_tier_blocks"].append(["host", num_blocks])
    samples["moeserve_kv_tier_bytes"].append(["host", num_bytes])
    samples["moeserve_kv_tier_age_seconds"].append(["host", round(hosted.oldest_age, 1)])
    hits, tokens = counters.hosted_hits, counters.hosted_hit_tokens
    samples["moeserve_kv_tier_hits"][1:] = [["host", hits], ["disk", counters.lower_hits - hits]]
    samples["moeserve_kv_tier_hit_tokens"][1:] = [["host", tokens], ["disk", counters.lower_hit_tokens - tokens]]
