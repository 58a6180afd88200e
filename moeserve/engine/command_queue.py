"""Commands that wait for their turn, fair by key and bounded."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

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
