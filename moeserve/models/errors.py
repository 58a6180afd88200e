"""The exceptions that model resolution, configuration, weight loading and the manifest raise at the user."""


class ModelError(Exception):
    """A model cannot be served. The message is one sentence fit for a terminal: what is wrong and what to do."""


class UnsupportedModel(ModelError):
    """The model is of a kind that moeserve does not serve."""


class CheckpointError(ModelError):
    """The weight files are missing, damaged or do not fit the configuration."""
