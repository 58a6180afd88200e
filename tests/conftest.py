"""Settings of all tests."""

import gc
import os
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

# Services of tests keep no KV in the user's own cache; the flag of a test goes before the variable.
os.environ["MOESERVE_KV_DISK_PATH"] = "none"

# A GPU machine may have pytest alone, for the tests of the kernels.
if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # Slow shared machines must not turn into failures, and a run in CI must be repeatable.
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)
    settings.register_profile("default", patient)
    settings.register_profile("ci", patient, derandomize=True)
    settings.register_profile("thorough", patient, max_examples=400)
    settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what collection makes: it stays to the end, and looking through it again and again
    takes half of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let the end of the process collect it, or libraries report leaks."""
    gc.unfreeze()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    from tests.support.tiny_checkpoint import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("m"))
