"""Settings of all tests."""

import os
from importlib.util import find_spec

# A GPU machine may have pytest alone, for the tests of the kernels.
if find_spec("hypothesis") is not None:
    from hypothesis import settings

    # Slow shared machines must not turn into failures, and a run in CI must be repeatable.
    settings.register_profile("default", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True)
    settings.load_profile("ci" if os.environ.get("CI") else "default")
