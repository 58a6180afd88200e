"""Exceptions of experts that callers without torch can name too."""


class CollectiveError(RuntimeError):
    """A collective failed: another rank is gone, or did not enter it in time."""


class ExpertStoreError(RuntimeError):
    """Weights of experts cannot be read from their store; the message is one sentence for the user."""
