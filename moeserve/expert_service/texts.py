"""Text that is on every machine."""

from __future__ import annotations


def half_of_topics(parity: int) -> list[str]:
    """Every other topic of Python's documentation, from the first (parity 0) or the second one on."""
    from pydoc_data.topics import topics

    return [text for name in sorted(topics)[parity::2] if (text := topics[name].strip())]
