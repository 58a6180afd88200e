"""What a person does on the chat page, and the answers that a page is given."""

from __future__ import annotations

import json
from typing import Any

from moeserve.wire import Generate
from tests.support.browser import Page
from tests.support.frontend import Frontend

IDLE = "!document.querySelector('#send').hidden && document.querySelector('#stop').hidden"


def ask(page: Page, text: str) -> None:
    page.evaluate("document.querySelector('#question').focus()")
    page.type(text)
    page.press("Enter")


def answered(page: Page, num_answers: int = 1) -> None:
    page.wait(f"document.querySelectorAll('.assistant').length === {num_answers} && {IDLE}")


def texts(page: Page, selector: str) -> list[str]:
    found: list[str] = page.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    )
    return found


def prompts(server: Frontend) -> list[Generate]:
    found: list[Generate] = server.engine.of(Generate)
    return found


def sse(*events: dict[str, Any]) -> tuple[int, str, str]:
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return 200, "text/event-stream", body + "data: [DONE]\n\n"


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}
