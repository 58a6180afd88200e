"""When KV blocks go to the tier below memory and when they come back. Threads copy them, beside the engine.

To a disk a block is written soon after it has entered the tree, to the host's memory when it leaves that of a GPU
(`radix_cache.stored_tree`). A waiting request whose prefix goes on in the lower tier, beyond the part in memory, waits
outside the queue while its blocks are read into leased blocks; then it takes its place again, by its arrival, and finds
them as a prefix hit. Blocks are read only if that is expected to take less time than computing them. Both times are
measured elsewhere and reported here: plans depend on when copies end, as they do on when masks are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moeserve.plan import Request
from moeserve.scheduling.arrivals import LEAST_WAIT_SECONDS, Arrival, Job, Result, Source, longest_wait_s
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.overflow import Fate, Overflow, OverflowCosts, Victim, fate_of
from moeserve.scheduling.pacing import Pace
from moeserve.scheduling.request_memory import RankLoads
from radix_cache import (
    BlockCopy,
    Chores,
    Fill,
    PrefixCache,
    StoredBlock,
    StoredBlocks,
    Tier,
)

STORED_AT_ONCE = 16  # blocks that one job writes where they stay in memory, and that are in copy at most
# Of a GPU's blocks, at least this share is kept free for steps: what leaves is then copied before its memory is needed.
_FREE_SHARE, _MOST_FREE_SHARE = 1 / 16, 1 / 4
_RETRY_SECONDS = 30.0  # a write that fails stops all writes for this number of seconds
_MOST_RESTORES = 3  # times that one request waits for blocks of its prefix
_SMOOTHING = 0.3  # weight of a new time in the means of seconds per block
# The expected time of a read falls by this share when it has kept a prefix from being read: one slow read must
# not decide for good.
_FORGIVENESS = 0.02
# The error of a block that is not in the lower tier any more, as where another service has removed its file.
GONE = "it is gone"


def num_kept_free(num_blocks: int, step_tokens: int, block_size: int) -> int:
    """Return how many of a GPU's blocks are kept free where others move to the host: as many as a step takes."""
    of_step = -(-step_tokens // block_size)
    return max(1, min(int(_MOST_FREE_SHARE * num_blocks), max(of_step, int(_FREE_SHARE * num_blocks))))


@dataclass(eq=False, slots=True)
class CopyJob(Job):
    """Blocks of one rank's memory to be written, or to be read into it, in their order.

    chores: files to be removed or stamped, before that. sought: blocks whose files are looked for, each with files that
    it may have beside its own, up to the first block that is not there. is_gentle: the copying gives way to steps.
    """

    copies: Sequence[BlockCopy]
    is_write: bool = False
    chores: Chores | None = None
    sought: Iterable[Sequence[StoredBlock]] | None = None
    is_gentle: bool = False
    rank: int = 0

    @property
    def is_quick(self) -> bool:
        """True for a search: files are found at once unless the disk hangs."""
        return self.sought is not None


class Hosted(Protocol):
    """Blocks of the disk that are in the host's memory as well, by the paths of their files. Any thread may call it."""

    def keep(self, path: str, content: memoryview) -> None:
        """Keep a block, in place of the blocks that were used longest ago."""

    def find(self, path: str, content: memoryview) -> bool:
        """Fill `content` with a block; return False if it is not there."""

    def free(self, path: str) -> None:
        """Drop a block."""

    def resident(self, folders: Collection[str] | None = None) -> tuple[int, int]:
        """Return the numbers of KV blocks and of bytes that are there, of `StoredBlock.folder`s or of all."""

    @property
    def oldest_age(self) -> float:
        """The seconds since the block was used that was used longest ago; 0 without blocks."""


@dataclass(slots=True)
class TierCounters:
    """Totals since the start. Bytes that were read, or written, with the seconds that this took.

    device_hit_tokens, lower_hit_tokens: tokens that requests found in memory, and in the lower tier. device_hits,
    lower_hits: the requests that found some there. hosted_hit_tokens, hosted_hits: of these, in the host's memory above
    a disk. num_slower: prefixes that were computed because reading them was expected to take longer. num_overdue:
    readings that took too long and were ended. fates: of preempted requests.
    """

    device_hits: int = 0
    lower_hits: int = 0
    device_hit_tokens: int = 0
    lower_hit_tokens: int = 0
    hosted_hits: int = 0
    hosted_hit_tokens: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    write_seconds: float = 0.0
    num_gone: int = 0
    num_damaged: int = 0
    num_failed_writes: int = 0
    num_slower: int = 0
    num_overdue: int = 0
    fates: Counter[Fate] = field(default_factory=Counter)


@dataclass(slots=True)
class _Lookup:
    """The tier's state of a request that has not ended."""

    is_sought: bool = False  # files that other services have written were looked for
    is_over: bool = False  # it waits for no block from here
    num_waits: int = 0  # for blocks, since it was preempted last
    # The rank, first token and end of the blocks that it waited for, and how many of these tokens were in the host's
    # memory above a disk.
    restored: tuple[int, int, int, int] = (0, 0, 0, 0)


class LowerTier(Source[CopyJob]):
    """Moves blocks between the caches of all ranks and the tier below: any rank can read what another one has
    written."""

    def __init__(
        self,
        caches: Sequence[PrefixCache],
        pace: Pace,
        overflow: Overflow,
        read_s: Mapping[bool, float] | None = None,
    ) -> None:
        """caches: by rank, with the same `stored`. pace: knows the seconds of steps. overflow: the fate of preempted
        requests. read_s: a first guess of the seconds per block that is read, by `CopyJob.is_gentle`."""
        super().__init__()
        self._caches, self._trees = caches, [cache.lower for cache in caches if cache.lower is not None]
        self._stored = self._trees[0].stored
        self._block_size = caches[0].block_size
        self._num_kept_free = num_kept_free(caches[0].num_blocks, pace.max_num_batched_tokens, self._block_size)
        self._pace = pace
        self._overflow = overflow
        # By the rank and the name of each block that is being read.
        self._coming: dict[tuple[int, bytes], Arrival[CopyJob]] = {}
        # The ranks whose blocks are being written.
        self._writing: set[int] = set()
        self._lookups: dict[str, _Lookup] = {}  # by request id
        self._write_after = 0.0
        # Seconds per block that is read, by `CopyJob.is_gentle`, and written, where they are known.
        self._read_s: dict[bool, float] = dict(read_s or {})
        self._write_s: float | None = None
        self.counters = TierCounters()

    @property
    def stored(self) -> StoredBlocks:
        return self._stored

    @property
    def writes_last(self) -> bool:
        return self._stored.tier is Tier.DISK

    def enter(self, request: Request) -> bool:
        request.found_below, self._lookups[request.request_id] = (0, 0), _Lookup()
        return False

    def left(self, output: RequestOutput) -> None:
        super().left(output)
        del self._lookups[output.request.request_id]

    def num_found(self, request: Request) -> int:
        """Count the request's leading tokens that are in a rank's memory or in the lower tier."""
        tokens, namespace, names, size = request.token_ids, request.namespace, request.prefix_names, self._block_size
        return size * max(
            tree.num_stored(tokens, namespace, names, cache.peek(tokens, namespace) // size)
            for cache, tree in zip(self._caches, self._trees, strict=True)
        )

    def is_looked_for(self, request: Request) -> bool:
        """Return whether a request waits until files of its prefix have been looked for."""
        arrival = self.arrivals.find(request)
        return arrival is not None and arrival.fill is None

    def seek(self, request: Request, now: float) -> bool:
        """Return whether a request of the queue waits, from now on, until files of its prefix have been looked for.

        Services that share a disk write such files at any time. For the rest see `look_up`.
        """
        lookup = self._lookups[request.request_id]
        if lookup.is_sought or self._stored.tier is Tier.HOST:
            return False
        lookup.is_sought = True
        tokens, namespace = request.token_ids, request.namespace
        num_cached = max(cache.peek(tokens, namespace) for cache in self._caches)
        sought = self._trees[0].unknown(tokens, namespace, request.prefix_names, num_cached // self._block_size)
        if sought is None:
            return False
        self.arrivals.wait(request, self.arrivals.begin(CopyJob((), sought=sought), now + LEAST_WAIT_SECONDS))
        return True

    def preempted(self, request: Request, num_running: int) -> None:
        """Decide what becomes of the KV of a request that is about to lose its lease."""
        cache, size = self._caches[request.rank], self._block_size
        num_blocks = request.held.num_published_tokens // size
        names = request.prefix_names
        self._stored.name(names, request.namespace, request.token_ids, num_blocks, size)
        unwritten = [name for name in names[:num_blocks] if name not in self._stored]
        victim = Victim(num_blocks, len(unwritten), cache.counts.num_available)
        compute_s = self._compute_s(0, num_blocks * size, num_blocks * size, num_running)
        fate = fate_of(victim, self._costs(compute_s, num_running, num_running), self._overflow)
        self.counters.fates[fate] += 1
        if fate is Fate.SWAP:
            self._trees[request.rank].hurry(unwritten)
        lookup = self._lookups[request.request_id]
        lookup.is_over, lookup.num_waits = self._overflow is Overflow.RECOMPUTE, 0

    def count_found(self, request: Request, num_beyond: int) -> None:
        request.found_below = self._by_tier(num_beyond, 0)

    def look_up(self, request: Request, now: float, loads: RankLoads, num_running: int) -> bool:
        """Return whether a request of the queue waits, from now on, until its prefix has been read.

        It is read for the rank that would be the request's now. See `Source` for the arguments.
        """
        request.rank, lookup = loads.preferred_ranks(request)[0], self._lookups[request.request_id]
        if lookup.is_over or request.wants_prompt_logprobs:
            return False
        cache, size, num_spoken_for = self._caches[request.rank], self._block_size, loads.num_spoken_for(request)
        if self.lacks_room(request, cache, num_spoken_for):
            return False
        first = cache.peek(request.token_ids, request.namespace) // size
        stop = self._trees[request.rank].num_stored(request.token_ids, request.namespace, request.prefix_names, first)
        if stop == first:
            # A part that is in memory now may have to leave it before the request begins.
            lookup.is_over = not first
            return False
        reading = self._coming.get((request.rank, request.prefix_names[first]))
        if reading is None or reading.job.is_cancelled:
            is_forced = request.num_preemptions > 0 and self._overflow is Overflow.SWAP
            if not is_forced and not self._is_sooner(request, first * size, stop * size, num_running):
                lookup.is_over = True
                return False
            fill = self.begin_fill(request, cache, stop, num_spoken_for, request.prefix_names)
            if fill is None:
                return False
            reading = self._begin(fill, request.rank, now, is_gentle=num_running > 0)
        self.arrivals.wait(request, reading)
        return True

    def take_overdue(self, now: float) -> list[Request]:
        """Return the requests that have waited too long, as for a disk that hangs; they are to be computed."""
        num_late, overdue = self.arrivals.take_overdue(now)
        self.counters.num_overdue += num_late
        for request in overdue:
            self._lookups[request.request_id].is_over = True
        return overdue

    def take_jobs(self, now: float, num_running: int) -> list[CopyJob]:
        """Return the jobs that are to begin. now: in seconds since the epoch. num_running: requests."""
        jobs = self.arrivals.take_jobs()
        self._stored.set_time(now, self._pace.now)
        for rank, tree in enumerate(self._trees):
            if rank in self._writing:
                continue
            copies: Sequence[BlockCopy] = ()
            if self._pace.now >= self._write_after:
                copies = tree.demote(self._num_kept_free) if tree.moves else tree.take(STORED_AT_ONCE)
            # All ranks see the same files, so the first one does the chores.
            chores = self._stored.take_chores() if rank == 0 else None
            if copies or chores is not None:
                self._writing.add(rank)
                jobs.append(CopyJob(copies, is_write=True, chores=chores, rank=rank, is_gentle=num_running > 0))
        return jobs

    def end(self, result: Result[CopyJob], now: float) -> list[Request]:
        """Receive the end of a job. Return the requests that go back to the queue."""
        job, counters, tree = result.job, self.counters, self._trees[result.job.rank]
        num_bytes = sum(result.num_bytes)
        self._stored.set_time(now, self._pace.now)
        if job.chores is not None:
            self._stored.end_removals(job.chores.removals)
        if job.is_write:
            self._writing.discard(job.rank)
            for index, copy in enumerate(job.copies):
                size = result.num_bytes[index] if index < len(result.num_bytes) else 0
                tree.end_write(copy, size, now)
            if result.num_bytes:
                self._write_s = _smoothed(self._write_s, result.seconds / len(result.num_bytes))
            counters.written_bytes += num_bytes
            counters.write_seconds += result.seconds
            if result.error is not None:
                counters.num_failed_writes += 1
                # Not by `now`, of a clock that may be set back.
                self._write_after = self._pace.now + _RETRY_SECONDS
            return []
        reading, requests = self.arrivals.end(job)
        if (fill := reading.fill) is None:
            self._put_found(result.found)
            return requests
        counters.read_bytes += num_bytes
        counters.read_seconds += result.seconds
        num_filled = len(result.num_bytes)
        # A block that this engine removed while it was read is no failure.
        if result.error is not None and (name := fill.copies[num_filled].name) in self._stored:
            counters.num_gone += result.error == GONE
            counters.num_damaged += result.error != GONE
            self._stored.discard(name)
        if num_filled:
            known = self._read_s.get(job.is_gentle)
            self._read_s[job.is_gentle] = _smoothed(known, result.seconds / num_filled)
        fill.end(num_filled)
        for copy in fill.copies:
            if self._coming.get((job.rank, copy.name)) is reading:
                del self._coming[job.rank, copy.name]
        for request in requests:
            self._record_found(request, fill, job.rank, num_filled, sum(result.hosted[fill.num_beside :]))
        return requests

    def hit(self, request: Request, num_tokens: int) -> None:
        """Count a hit of `num_tokens`, the last ones that a request has computed, by where they were found."""
        rank, start, stop, hosted = self._lookups[request.request_id].restored
        last = request.num_computed_tokens
        found = max(0, min(stop, last) - max(start, last - num_tokens)) if rank == request.rank else 0
        hosted = min(found, hosted)
        if not request.num_preemptions:
            in_host, on_disk = self._by_tier(found, hosted)
            before_in_host, before_on_disk = request.found_below or (0, 0)
            request.found_below = before_in_host + in_host, before_on_disk + on_disk
        counters = self.counters
        counters.hosted_hit_tokens += hosted
        counters.hosted_hits += hosted > 0
        counters.lower_hit_tokens += found
        counters.device_hit_tokens += num_tokens - found
        counters.lower_hits += found > 0
        counters.device_hits += num_tokens > found

    def _by_tier(self, num_tokens: int, num_hosted: int) -> tuple[int, int]:
        """Return how many of tokens that were found were in the host's memory, and on disk.

        num_hosted: were in the host's memory above a disk.
        """
        in_host = num_tokens if self._stored.tier is Tier.HOST else num_hosted
        return in_host, num_tokens - in_host

    def _put_found(self, found: Sequence[StoredBlock]) -> None:
        for block in found:
            if block.name not in self._stored and not self._stored.is_going(block):
                self._stored.put(block)

    def _begin(self, fill: Fill, rank: int, now: float, *, is_gentle: bool) -> Arrival[CopyJob]:
        first = fill.first * self._block_size
        compute_s = self._pace.compute_s(first, first + fill.num_blocks() * self._block_size)
        job = CopyJob(fill.copies, rank=rank, is_gentle=is_gentle)
        reading = self.arrivals.begin(job, now + longest_wait_s(compute_s), fill)
        for copy in fill.copies:
            self._coming[rank, copy.name] = reading
        return reading

    def _record_found(self, request: Request, fill: Fill, rank: int, num_filled: int, num_hosted: int) -> None:
        """num_hosted: how many of the KV blocks were in the host's memory above a disk."""
        first = fill.first * self._block_size
        last = first + fill.num_blocks(num_filled) * self._block_size
        lookup = self._lookups[request.request_id]
        before, start, stop, hosted = lookup.restored
        if (before, stop) != (rank, first):
            start, hosted = first, 0
        lookup.restored = (rank, start, last, hosted + num_hosted * self._block_size)
        # It is looked up again: another request may have had a part of it read, or it may be gone again.
        lookup.num_waits += 1
        is_cut = num_filled < len(fill.copies) and not fill.num_beside
        lookup.is_over = is_cut or lookup.num_waits == _MOST_RESTORES

    def _is_sooner(self, request: Request, start: int, stop: int, num_running: int) -> bool:
        """Return whether a request is expected to have its tokens from position `start` to `stop` sooner if they are
        read; True if either time is not known.

        Tokens that are computed beside the `num_running` others, or in one step with the rest of the prompt, take less
        time than steps of their own.
        """
        is_gentle = num_running > 0
        read_s = self._read_s.get(is_gentle)
        if read_s is None and request.num_preemptions:
            read_s = self._write_s
        if read_s is None:
            return True
        num_blocks = (stop - start) // self._block_size
        more_s = read_s * sum(len(job.copies) for job in self.arrivals.jobs)
        num_delayed = 0
        if request.num_preemptions:
            num_delayed = num_running  # they feel the computing, too
        elif num_running:
            more_s = max(more_s, self._pace.step_s - num_blocks * read_s)  # it misses the next step at least
        compute_s = self._compute_s(start, stop, len(request.token_ids), num_running)
        if self._costs(compute_s, num_delayed, num_running).is_read_sooner(num_blocks, more_s):
            return True
        self._read_s[is_gentle] = read_s * (1 - _FORGIVENESS)
        self.counters.num_slower += 1
        return False

    def _compute_s(self, start: int, stop: int, end: int, num_running: int) -> float:
        """Return the seconds by which the tokens up to `stop` lengthen the steps that compute a prompt up to `end`.

        0 if that is not known.
        """
        if not self._pace.compute_s(0, 1):
            return 0.0
        rest_s = self._pace.compute_s(stop, end, num_running)
        return max(self._pace.compute_s(start, end, num_running) - rest_s, 1e-9)

    def _costs(self, compute_s: float, num_delayed: int, num_running: int) -> OverflowCosts:
        # Blocks are written before the first one is read: all victims until then would be read to measure that.
        read_s = self._read_s.get(num_running > 0, self._write_s)
        return OverflowCosts(compute_s, read_s, self._write_s, num_delayed, self._caches[0].num_blocks)


def _smoothed(known: float | None, seconds: float) -> float:
    return seconds if known is None else known + _SMOOTHING * (seconds - known)
