"""Settings of the experts that contradict each other are refused with one sentence."""

import pytest

from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.experts.settings import check_experts


@pytest.mark.parametrize("choice", ["off", "auto", "gate", "fitted", "affinity"])
def test_known_predictors_are_taken(choice):
    check_experts(ServeConfig(expert_prefetch=choice))


@pytest.mark.parametrize("choice", ["off", "auto", "gate", "affinity"])
def test_several_ranks_predict_as_one_does(choice):
    check_experts(ServeConfig(expert_memory=1, expert_parallel_size=2, expert_prefetch=choice))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"expert_prefetch": "off", "expert_policy": "affinity"}, "use --expert-prefetch affinity"),
        ({"expert_policy": "static"}, "static needs --expert-statistics"),
        ({"placement": "balanced"}, "--placement balanced needs --expert-statistics"),
        ({"placement": "coactivation"}, "--placement coactivation needs --expert-statistics"),
    ],
)
def test_what_contradicts_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        check_experts(ServeConfig(**settings))
