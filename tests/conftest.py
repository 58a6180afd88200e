"""Settings of all tests."""

import os

from hypothesis import settings

# Slow shared machines must not turn into failures, and a run in CI must be repeatable.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
