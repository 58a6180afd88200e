"""Commands to the engine: they wait fair by key, and are carried out one slice a turn, so that no step waits long."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from moeserve.engine.cache_commands import CacheCommandError, CacheCommands, Job
from moeserve.engine.experts.monitor import FILE_COMMANDS, ExpertCommandError, ExpertMonitor, file_failure
from moeserve.engine.file_writer import FileJob, FileWriter
from moeserve.wire import Control, ControlResult, FeatureSamples

MAX_WAITING_OF_KEY = 16  # commands of one key, from all HTTP processes together
MAX_WAITING = 256  # commands of all keys; beyond it a key may have one

T = TypeVar("T")


class CommandQueue(Generic[T]):
    """Commands by key. Keys take turns, and a key's commands follow each other."""

    def __init__(self) -> None:
        # The key whose turn is next comes first. No key is here without a command.
        self._of_key: OrderedDict[str, deque[T]] = OrderedDict()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def put(self, key: str, command: T) -> bool:
        """Queue a command. Return False if the key has too many, or all together and this key has one."""
        own = self._of_key.get(key)
        if own is not None and (len(own) >= MAX_WAITING_OF_KEY or self._num_waiting >= MAX_WAITING):
            return False
        self._of_key.setdefault(key, deque()).append(command)
        self._num_waiting += 1
        return True

    def first(self) -> T:
        """Return the oldest command of the key whose turn it is."""
        return next(iter(self._of_key.values()))[0]

    def end_turn(self, *, done: bool) -> None:
        """Let the next key have its turn. done: the first command is carried out and leaves the queue."""
        key, own = next(iter(self._of_key.items()))
        if done:
            own.popleft()
            self._num_waiting -= 1
        if own:
            self._of_key.move_to_end(key)
        else:
            del self._of_key[key]


_LAST_WRITE_SECONDS = 1.0  # that an ending engine waits for a file that is being written


@dataclass(slots=True)
class _Command:
    """sender: gets the answer. job: set while the command is carried out in slices."""

    sender: bytes
    control: Control
    job: Job | None = None


class Commands:
    """The commands that wait or are carried out, and the file that is written for one."""

    def __init__(
        self,
        cache_commands: CacheCommands,
        experts: ExpertMonitor | None = None,
    ) -> None:
        """experts: None for a model without experts."""
        self._cache_commands = cache_commands
        self._experts = experts
        self._answers: list[tuple[bytes, ControlResult]] = []
        self._queue: CommandQueue[_Command] = CommandQueue()
        self._writer = FileWriter()

    @property
    def is_waiting(self) -> bool:
        """True while there is something to do in the next turn."""
        return len(self._queue) > 0

    @property
    def is_writing(self) -> bool:
        return self._writer.is_busy

    def add(self, sender: bytes, control: Control) -> None:
        """Queue a command, or refuse it at once if its key has too many."""
        if not self._queue.put(control.tenant, _Command(sender, control)):
            self._answers.append(
                (sender, ControlResult(control.control_id, {}, "too many commands wait", is_refused=True))
            )

    def take_answers(self) -> list[tuple[bytes, ControlResult]]:
        """Return the answers since the last call, one for each command, with its sender."""
        answers, self._answers = self._answers, []
        return answers

    def advance(self) -> None:
        """Do one slice of one command, and answer for a file that has been written."""
        if finished := self._writer.take_finished():
            finished()
        if not self._queue:
            return
        command = self._queue.first()
        answer = None
        try:
            done, answer = self._do_slice(command)
        except (CacheCommandError, ExpertCommandError) as error:
            done, answer = True, ControlResult(command.control.control_id, {}, str(error))
        self._queue.end_turn(done=done)
        if answer is not None:
            self._answers.append((command.sender, answer))

    def close(self) -> None:
        """Wait a moment for the end of a write, and answer its command."""
        self._writer.wait(_LAST_WRITE_SECONDS)
        if finished := self._writer.take_finished():
            finished()

    def samples(self) -> FeatureSamples:
        """Return the figures of the caches and the experts for the metrics."""
        samples = self._cache_commands.samples()
        return samples if self._experts is None else samples | self._experts.samples()

    def _do_slice(self, command: _Command) -> tuple[bool, ControlResult | None]:
        """Return whether the command has been carried out, and its answer; none yet while a file is written for it."""
        control = command.control
        if control.command not in self._cache_commands:
            return True, self._ask_experts(command)
        if command.job is None:
            command.job = self._cache_commands.start(control.command, control.arguments)
        try:
            next(command.job)
        except StopIteration as end:
            return True, ControlResult(control.control_id, end.value)
        return False, None

    def _ask_experts(self, command: _Command) -> ControlResult | None:
        control = command.control
        if self._experts is None:
            return ControlResult(control.control_id, {}, f"unknown command {control.command!r}")
        if self._writer.is_busy and control.command in FILE_COMMANDS:
            raise ExpertCommandError("A file is still being written for an earlier command.")
        result = self._experts.command(control.command, control.arguments)
        if isinstance(result, FileJob):
            self._writer.start(result, partial(self._answer_write, command))
            return None
        return ControlResult(control.control_id, result)

    def _answer_write(self, command: _Command, job: FileJob, error: OSError | None) -> None:
        control_id = command.control.control_id
        if error is None:
            self._answers.append((command.sender, ControlResult(control_id, job.result)))
        else:
            self._answers.append((command.sender, ControlResult(control_id, {}, file_failure(error))))
