"""The exception that ends a start with one sentence on the terminal."""


class LaunchError(Exception):
    """The service cannot start or go on. The message is one sentence: what is wrong and what to do."""
