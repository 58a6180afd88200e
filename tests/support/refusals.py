"""Errors by their codes, which stay when a sentence gets better."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moeserve.frontend.errors import ApiError


@contextmanager
def refused(code: str, param: str | None = None, *values: str) -> Iterator[pytest.ExceptionInfo[ApiError]]:
    """Expect an ApiError with a code and a field, whose message names some values."""
    with pytest.raises(ApiError) as caught:
        yield caught
    error = caught.value
    assert (error.code, error.param) == (code, param), error.message
    for value in values:
        assert value in error.message
