"""Tests without torch: its import would take longer than most of their files."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.stores import MakeShelf


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


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[MakeShelf]:
    """Shelves of a response store that is large enough."""
    from tests.support.stores import shelves

    with shelves(tmp_path) as make:
        yield make
