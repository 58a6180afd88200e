"""What the service adds to the demo's own defaults."""

from __future__ import annotations

import pytest

from moeserve.config import ServeConfig
from moeserve.engine.service import _default_sampling
from moeserve.model.generation import GenerationDefaults

DEFAULTS = GenerationDefaults(sampling={"temperature": 0.2, "top_p": 0.9})


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        ({}, 0.0),
        ({"model": "demo-split"}, 0.0),
        ({"model": "/models/other"}, 0.2),
        ({"override_generation_config": '{"temperature": 0.2}'}, 0.2),
    ],
)
def test_the_demo_is_greedy_unless_the_user_says_otherwise(settings: dict[str, str], temperature: float) -> None:
    assert _default_sampling(ServeConfig(**settings), DEFAULTS) == {"temperature": temperature, "top_p": 0.9}
