"""Tests without torch: its import would take longer than most of their files."""

import sys
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail at the first file whose imports bring torch."""
    was_there = "torch" in sys.modules
    report = yield
    if not was_there and "torch" in sys.modules:
        raise pytest.UsageError(f"{collector.nodeid} imports torch: tests/cpu is the place for it")
    return report
