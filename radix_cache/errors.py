"""The errors of this package, and the check that raises `InvariantError`."""


class LeaseError(RuntimeError):
    """A lease was used after its release, or with a cache that did not make it."""


class BudgetError(ValueError):
    """An account may not pin that many blocks: a call wants `num_wanted` more, its budget has `num_free` left."""

    def __init__(self, num_wanted: int, num_free: int) -> None:
        super().__init__(f"{num_wanted} blocks are asked for, but {num_free} are left of the budget")
        self.num_wanted = num_wanted
        self.num_free = num_free


class InvariantError(AssertionError):
    """The bookkeeping contradicts itself. Unlike ``assert`` this check survives ``python -O``."""


def require(condition: bool, message: str) -> None:
    """Raise InvariantError with `message` unless `condition` holds."""
    if not condition:
        raise InvariantError(message)
