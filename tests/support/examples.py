"""How many examples hypothesis tries."""

from hypothesis import settings


def examples(times: float) -> settings:
    """Settings of a test that tries `times` as many examples as the profile (`tests/conftest.py`)."""
    return settings(max_examples=round(times * settings().max_examples))
