"""Real text that is on every machine: the documents from which routing is recorded."""

from __future__ import annotations

from importlib.resources import files

from moeserve.expert_service.texts import half_of_topics


def documents() -> list[str]:
    """The demo's calibration text in its parts, and every other topic of Python's documentation.

    A neuron-split demo has learnt from the first of these and from the other half of the topics.
    """
    text = files("moeserve.models.demo").joinpath("calibration.txt").read_text(encoding="utf-8")
    # A conversation holds empty lines neither, so that an empty line ends whatever there is.
    parts = [part.strip() for part in text.split("\n\n")]
    return [part for part in (*parts, *half_of_topics(1)) if part]
