"""Real text that is on every machine: the documents from which routing is recorded."""

from __future__ import annotations

from importlib.resources import files


def documents() -> list[str]:
    """The demo's calibration text in its parts, and every other topic of Python's documentation.

    A neuron-split demo has learnt from the first of these and from the other half of the topics.
    """
    from pydoc_data.topics import topics

    text = files("moeserve.models.demo").joinpath("calibration.txt").read_text(encoding="utf-8")
    # A conversation holds empty lines neither, so that an empty line ends whatever there is.
    parts = [part.strip() for part in text.split("\n\n")]
    names = sorted(topics)[1::2]
    return [part for part in (*parts, *(topics[name].strip() for name in names)) if part]
