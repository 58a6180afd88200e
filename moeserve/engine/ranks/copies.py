"""KV of several ranks on one disk: each rank copies the blocks of its own memory, as rank 0 says.

Rank 0 alone knows which blocks are on disk. It hands the copies of its own memory to its own threads, and sends the
copies of another rank's memory there: `RankCopies` on rank 0, `MemberCopies` on every other rank. Files are named by
tokens alone, so any rank can read a file that another one has written. Where ranks share layers, or share each layer,
each has a part of every block, and copies are made on all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeserve.engine.kv.disk.copier import BlockCopier
from moeserve.engine.kv.disk.files import BlockFiles
from moeserve.engine.ranks.messages import CancelCopies, CopiesEnded, CopyBlocks, FromRank, OpenDisk, ToRank
from moeserve.scheduling.arrivals import Result
from moeserve.scheduling.lower_tier import CopyJob

if TYPE_CHECKING:
    from moeserve.engine.ranks.transport import BeatThread, RankLink  # It imports torch.

_COPY_SECONDS = 0.002  # between two looks at the socket while only copies of blocks are under way


@dataclass(slots=True)
class _Copying:
    """A job at work on `ranks`; results: of those that have ended."""

    job: CopyJob
    ranks: Sequence[int]
    is_cancelled: bool = False
    results: list[Result[CopyJob]] = field(default_factory=list)


class RankCopies:
    """Rank 0's end: carries out the copies of all ranks. Once it is open it is a `moeserve.engine.kv.moves.Mover`."""

    def __init__(self, send: Callable[[int, ToRank], None], ranks_of: Sequence[Sequence[int]]) -> None:
        """send: sends a message to a rank. ranks_of: by prefix cache, the ranks that hold its blocks, each a part."""
        self._send, self._ranks_of = send, ranks_of
        self._own: BlockCopier | None = None
        self._receive: Callable[[], None] = lambda: None
        self._numbers = count()
        self._open: dict[int, _Copying] = {}
        self._number_of: dict[CopyJob, int] = {}
        self._ended: deque[Result[CopyJob]] = deque()

    def open(self, own: BlockCopier, files: BlockFiles, receive: Callable[[], None]) -> None:
        """Let every rank open the disk. own: of rank 0. receive: hands messages that have come to `on_message`."""
        self._own, self._receive = own, receive
        for rank in filter(None, chain.from_iterable(self._ranks_of)):
            self._send(rank, OpenDisk(str(files.root), files.fingerprint))

    def on_message(self, message: object) -> None:
        if isinstance(message, CopiesEnded):
            job = self._open[message.number].job
            self._end(Result(job, message.num_bytes, message.seconds, message.error))

    @property
    def is_busy(self) -> bool:
        return bool(self._open or self._ended)

    def start(self, job: CopyJob) -> None:
        """Raise RankError if a rank has died."""
        assert self._own is not None
        number = self._number_of[job] = next(self._numbers)
        holders = self._ranks_of[job.rank]
        ranks = holders if job.copies else holders[:1]
        self._open[number] = _Copying(job, ranks)
        for rank in ranks:
            if rank:
                self._send(rank, CopyBlocks(number, list(job.copies), job.is_write, job.is_gentle))
            else:
                self._own.start(job)

    def take(self, seconds: float = 0.0) -> list[Result[CopyJob]]:
        """Raise RankError if a rank has died."""
        assert self._own is not None
        for number, copying in self._open.items():
            if copying.job.is_cancelled and not copying.is_cancelled:
                copying.is_cancelled = True
                for rank in filter(None, copying.ranks):
                    self._send(rank, CancelCopies(number))
        if any(copying.ranks[-1] for copying in self._open.values()):
            self._receive()
        for result in self._own.take(0.0 if self._ended else seconds):
            self._end(result)
        results = list(self._ended)
        self._ended.clear()
        return results

    def close(self) -> None:
        if self._own is not None:
            self._own.close()

    def _end(self, result: Result[CopyJob]) -> None:
        """Record the end of a job on a rank, and of the whole job with that of its last rank."""
        copying = self._open[self._number_of[result.job]]
        copying.results.append(result)
        if len(copying.results) == len(copying.ranks):
            del self._open[self._number_of.pop(result.job)]
            self._ended.append(result if len(copying.ranks) == 1 else _joined(result.job, copying.results))


def _joined(job: CopyJob, results: Sequence[Result[CopyJob]]) -> Result[CopyJob]:
    """Return the result of a job whose parts all ranks have done: a block is copied if all of its parts are."""
    sizes = [sum(of_parts) for of_parts in zip(*(result.num_bytes for result in results), strict=False)]
    errors = (result.error for result in results if len(result.num_bytes) == len(sizes) and result.error)
    return Result(job, sizes, max(result.seconds for result in results), next(errors, None), results[0].found)


class MemberCopies:
    """The end of any other rank: copies blocks of this rank's memory on threads beside its steps."""

    def __init__(self, rank: int, open_: Callable[[Path, str], BlockCopier], send: Callable[[FromRank], None]) -> None:
        """open_: returns what copies this rank's blocks to files in a folder, with a fingerprint, and back. send: sends
        a message to rank 0."""
        self._rank, self._open, self._send = rank, open_, send
        self._copier: BlockCopier | None = None
        self._numbers: dict[CopyJob, int] = {}

    @property
    def is_busy(self) -> bool:
        """True until rank 0 has the end of every job."""
        return bool(self._numbers)

    def follow(self, message: OpenDisk | CopyBlocks | CancelCopies) -> None:
        match message:
            case OpenDisk():
                self._copier = self._open(Path(message.root), message.fingerprint)
            case CopyBlocks():
                assert self._copier is not None
                job = CopyJob(message.copies, message.is_write, is_gentle=message.is_gentle)
                self._numbers[job] = message.number
                self._copier.start(job)
            case CancelCopies():
                for job, number in self._numbers.items():
                    job.is_cancelled = job.is_cancelled or number == message.number

    def tell_ends(self, seconds: float = 0.0) -> None:
        """Send rank 0 the ends of jobs. Wait up to `seconds` for the first."""
        if self._copier is None or not self._numbers:
            return
        for result in self._copier.take(seconds):
            number = self._numbers.pop(result.job)
            self._send(CopiesEnded(self._rank, number, list(result.num_bytes), result.seconds, result.error))

    def receive(self, link: RankLink, beats: BeatThread) -> Any:
        """Wait for the next message of rank 0 while no step is in flight, and send it the ends of jobs meanwhile."""
        beats.busy.clear()
        self.tell_ends()
        while self.is_busy:
            if (message := link.poll(_COPY_SECONDS)) is not None:
                return message
            beats.say_waiting()
            self.tell_ends()
        return link.receive(beats.say_waiting)

    def close(self) -> None:
        """End the threads after their present jobs, without a wait."""
        if self._copier is not None:
            self._copier.close()
