"""The one exception that model resolution, the demo build and the manifest raise at the user."""


class ModelError(Exception):
    """A model cannot be served. The message is one sentence fit for a terminal: what is wrong and what to do."""
