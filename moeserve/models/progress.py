"""How long-running model preparation tells its caller how far it is."""

from collections.abc import Callable

# (stage, done, total); total is 0 while the amount of work is not known. Calls never overlap, but downloads make them
# from threads of their own.
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Progress for callers that want none."""
