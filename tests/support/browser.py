"""A headless Chromium, driven over its own protocol on a pipe: no driver and no library between."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_WAIT_S = 60.0  # of a machine that does many other things


def find_chromium() -> str | None:
    """The program that `MOESERVE_TEST_CHROMIUM` names, or one of the usual names."""
    named = os.environ.get("MOESERVE_TEST_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(AssertionError):
    """The page threw, or the browser refused a command."""


class Browser:
    """The connection: commands and their answers, events in the order in which they came."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int) -> None:
        self._process = process
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._rest = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: deque[dict[str, Any]] = deque()

    def command(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result. Raise BrowserError."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _WAIT_S
        while self._number not in self._answers:
            self.read(deadline - time.monotonic())
            assert time.monotonic() < deadline, f"{method} was not answered"
        answer = self._answers.pop(self._number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def read(self, seconds: float) -> None:
        """Takes in what has come; waits at most so long for something."""
        if not select.select([self._from], [], [], max(seconds, 0))[0]:
            return
        data = os.read(self._from, 1 << 20)
        assert data, f"the browser ended with {self._process.wait()}"
        *messages, self._rest = (self._rest + data).split(b"\0")
        for text in messages:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self.events.append(message)

    def page(self, width: int = 1200, height: int = 800, *, dark: bool = False, phone: bool = False) -> Page:
        """A new page with a storage of its own."""
        context = self.command("Target.createBrowserContext")["browserContextId"]
        target = self.command("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.command(f"{domain}.enable")
        # What is typed goes to this page, whichever of the open ones the browser takes for the one in front.
        page.command("Emulation.setFocusEmulationEnabled", enabled=True)
        page.resize(width, height, phone=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.command("Emulation.setEmulatedMedia", features=[scheme])
        return page


class Page:
    """A page. `problems` are what its console and its scripts complained of."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.problems: list[str] = []
        self.routes: dict[str, list[tuple[int, str, str]]] = {}

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.command(method, self._session, **parameters)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        result = self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = _WAIT_S) -> Any:
        """Polls until an expression is truthy, and returns its value; answers intercepted requests meanwhile."""
        deadline = time.monotonic() + seconds
        while True:
            self.serve_routes()
            try:
                if value := self.evaluate(condition):
                    return value
            except BrowserError as error:
                # The page is being replaced by another.
                if "Cannot find context" not in str(error) and "navigated" not in str(error):
                    raise
            if time.monotonic() > deadline:
                shown = self.evaluate("document.body.innerText")
                raise AssertionError(f"{condition} did not become true; problems: {self.problems}; shown: {shown}")
            self._browser.read(0.02)

    def wait_for_a_problem(self) -> None:
        """The browser may tell of a problem after what the page shows of it."""
        deadline = time.monotonic() + _WAIT_S
        while not self.problems:
            assert time.monotonic() < deadline, "The page has no problem."
            self._browser.read(0.02)

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """A real click in the middle of the element, which must be there and visible."""
        name = json.dumps(selector)
        self.wait(f"!!document.querySelector({name})?.getClientRects().length")
        place = self.evaluate(
            f"(() => {{ const e = document.querySelector({name}); e.scrollIntoView({{block: 'nearest'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.command("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowDown": 40, " ": 32}[key]
        text = {"Enter": "\r", " ": " "}.get(key, "")
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        down = {**common, "text": text} if text else common
        self.command("Input.dispatchKeyEvent", type="keyDown", modifiers=8 if shift else 0, **down)
        self.command("Input.dispatchKeyEvent", type="keyUp", modifiers=8 if shift else 0, **common)

    def answer(self, path: str, *answers: tuple[int, str, str]) -> None:
        """Answers the page's requests for a path with (status, media type, body), one by one, the last ever again."""
        self.routes[path] = list(answers)
        patterns = [{"urlPattern": f"*{route}*"} for route in self.routes]
        self.command("Fetch.enable", patterns=patterns)

    def serve_routes(self) -> None:
        """Handles the events that have come."""
        self._browser.read(0)
        while self._browser.events:
            event = self._browser.events.popleft()
            if event.get("sessionId") == self._session:
                self._handle(event["method"], event["params"])

    def _handle(self, method: str, event: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = event["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded" if event["entry"]["level"] == "error":
                self.problems.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
            case "Fetch.requestPaused":
                path = next(path for path in self.routes if path in event["request"]["url"])
                answers = self.routes[path]
                status, media, body = answers.pop(0) if len(answers) > 1 else answers[0]
                self.command(
                    "Fetch.fulfillRequest",
                    requestId=event["requestId"],
                    responseCode=status,
                    responseHeaders=[{"name": "content-type", "value": media}],
                    body=base64.b64encode(body.encode()).decode(),
                )

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        data = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def chromium(program: str, folder: Path) -> Iterator[Browser]:
    """A running browser whose profile is in a folder."""
    for_browser, to_browser = os.pipe()
    from_browser, of_browser = os.pipe()
    arguments = [
        program,
        "--headless",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
        "--no-first-run",
        "--no-default-browser-check",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--hide-scrollbars",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]
    # The protocol's descriptors are 3 and 4.
    script = f'exec 3<&{for_browser} 4>&{of_browser}; exec "$@"'
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", *arguments], pass_fds=[for_browser, of_browser], stdout=log, stderr=log
        )
    os.close(for_browser)
    os.close(of_browser)
    try:
        yield Browser(process, to_browser, from_browser)
    finally:
        process.kill()
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
