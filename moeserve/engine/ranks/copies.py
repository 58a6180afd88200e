"""KV of several ranks on one disk: each rank copies the blocks of its own memory, as rank 0 says.

Rank 0 alone knows which blocks are on disk. It hands the copies of its own memory to its own threads, and sends the
copies of another rank's memory there: `RankCopies` on rank 0, `MemberCopies` on every other rank. Files are named by
tokens alone, so any rank can read a file that another one has written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from moeserve.engine.kv_disk.copier import BlockCopier
from moeserve.engine.kv_disk.files import BlockFiles
from moeserve.engine.ranks.messages import CancelCopies, CopiesEnded, CopyBlocks, FromRank, OpenDisk, ToRank
from moeserve.scheduling.arrivals import Result
from moeserve.scheduling.lower_tier import CopyJob


class RankCopies:
    """Rank 0's end: carries out the copies of all ranks. It is used as a `BlockCopier` is, once it is open."""

    hosted = None

    def __init__(self, send: Callable[[int, ToRank], None], others: Sequence[int]) -> None:
        """send: sends a message to a rank. others: all ranks but 0."""
        self._send, self._others = send, others
        self._own: BlockCopier | None = None
        self._receive: Callable[[], None] = lambda: None
        self._numbers = count()
        self._open: dict[int, CopyJob] = {}
        self._cancelled: set[int] = set()
        self._ended: deque[Result[CopyJob]] = deque()

    def open(self, own: BlockCopier, files: BlockFiles, receive: Callable[[], None]) -> None:
        """Let every rank open the disk. own: of rank 0. receive: hands messages that have come to `on_message`."""
        self._own, self._receive = own, receive
        for rank in self._others:
            self._send(rank, OpenDisk(str(files.root), files.fingerprint))

    def on_message(self, message: object) -> None:
        if isinstance(message, CopiesEnded):
            self._cancelled.discard(message.number)
            job = self._open.pop(message.number)
            self._ended.append(Result(job, message.num_bytes, message.seconds, message.error))

    @property
    def is_busy(self) -> bool:
        """True until the result of every job has been taken."""
        return bool(self._open or self._ended) or (self._own is not None and self._own.is_busy)

    def start(self, job: CopyJob) -> None:
        """Begin a job; `take` returns its result. Raise RankError if a rank has died."""
        assert self._own is not None
        if not job.rank:
            self._own.start(job)
            return
        number = next(self._numbers)
        self._open[number] = job
        self._send(job.rank, CopyBlocks(number, list(job.copies), job.is_write, job.is_gentle))

    def take(self, seconds: float = 0.0) -> list[Result[CopyJob]]:
        """Return the results since the last call. Wait up to `seconds` for the first. Raise RankError."""
        assert self._own is not None
        for number, job in self._open.items():
            if job.is_cancelled and number not in self._cancelled:
                self._cancelled.add(number)
                self._send(job.rank, CancelCopies(number))
        if self._open:
            self._receive()
        results = self._own.take(0.0 if self._ended else seconds)
        results += self._ended
        self._ended.clear()
        return results

    def close(self) -> None:
        """End the threads of rank 0 after their present jobs, without a wait."""
        if self._own is not None:
            self._own.close()


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

    def close(self) -> None:
        """End the threads after their present jobs, without a wait."""
        if self._copier is not None:
            self._copier.close()
