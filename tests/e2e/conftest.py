"""Fixtures of the tests of the pages: each module has a `browser` and a `server` of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

# A GPU machine runs tests of this folder without what a browser's tests need.
if TYPE_CHECKING:
    from tests.support.browser import Browser, Page
    from tests.support.frontend import Frontend


@pytest.fixture
def chat(browser: Browser, server: Frontend) -> Iterator[Page]:
    """The chat page of a browser that has nothing kept. No test may leave an error in its console."""
    from tests.support.fake_engine import say

    server.engine.received.clear()
    server.engine.script = say("Hello")
    page = browser.page()
    page.open(server.url + "/")
    page.wait("document.querySelector('#model-name').textContent === 'tiny'")
    yield page
    page.serve_routes()
    assert page.problems == []
