"""Settings of generation: values that go before generation_config.json, and budgets of thought by effort."""

from __future__ import annotations

from moeserve.settings.objects import json_object

# The sampling parameters of generation_config.json with the bounds of requests: (least, most). For the names in _ABOVE
# the least value itself is refused.
SAMPLING_BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, 2.0**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 10.0),
}
_ABOVE = frozenset({"top_p", "repetition_penalty"})
MAX_NEW_TOKENS = "max_new_tokens"
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def parse_generation(text: str) -> dict[str, float]:
    """Return the values of a JSON object by the names of generation_config.json. Raise ValueError, a clause."""
    found = json_object(text)
    for name, value in found.items():
        if name not in SAMPLING_BOUNDS and name != MAX_NEW_TOKENS:
            raise ValueError(f"{name!r} is not one of {', '.join((*SAMPLING_BOUNDS, MAX_NEW_TOKENS))}")
        if not (is_length(value) if name == MAX_NEW_TOKENS else is_sampling_value(name, value)):
            raise ValueError(f"{value!r} is no value for {name}")
    return found


def is_length(value: object) -> bool:
    """Return whether a value of generation_config.json is a number of tokens."""
    return type(value) is int and value >= 1


def is_sampling_value(name: str, value: object) -> bool:
    """Return whether a value is within the bounds that requests have for the sampling parameter of that name."""
    least, most = SAMPLING_BOUNDS[name]
    if type(value) not in (int, float):
        return False
    assert isinstance(value, (int, float))
    return least <= value <= most and not (name in _ABOVE and value == least)


def parse_effort_budgets(text: str) -> dict[str, int]:
    """Return the budgets of thought by effort that a JSON object holds. Raise ValueError, a clause."""
    given = json_object(text)
    for effort, budget in given.items():
        if effort not in REASONING_EFFORTS:
            raise ValueError(f"{effort[:80]!r} is not one of {', '.join(REASONING_EFFORTS)}")
        if type(budget) is not int or budget < -1:
            raise ValueError(f"the budget of {effort} is a whole number, -1 for no bound")
    return given
