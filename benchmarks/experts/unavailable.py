"""What stands in the way of a measurement."""


class Unavailable(Exception):
    """Something that this machine lacks; the message is one sentence for the user."""
