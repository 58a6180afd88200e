"""The errors of this package, and the check that raises `InvariantError`."""


class LeaseError(RuntimeError):
    """A lease was used after its release, or with a cache that did not hand it out."""


class InvariantError(AssertionError):
    """The bookkeeping contradicts itself. Unlike ``assert`` this check survives ``python -O``."""


def require(condition: bool, message: str) -> None:
    """Raise InvariantError with `message` unless `condition` holds."""
    if not condition:
        raise InvariantError(message)
