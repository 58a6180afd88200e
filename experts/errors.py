"""Exceptions of expert parallelism that callers without torch can name too."""


class CollectiveError(RuntimeError):
    """A collective failed: another rank is gone, or did not enter it in time."""
