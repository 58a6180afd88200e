"""Fixtures of tests that compute with torch."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def inference() -> Iterator[None]:
    """Seed torch, and keep no graphs."""
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
