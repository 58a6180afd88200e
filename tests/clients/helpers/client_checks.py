"""For the scripts of clients in Python: the service's address, from the environment, and checks that report JSON lines.

A script may run in any environment: nothing but the standard library is imported.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000")
V1 = f"{URL}/v1"
MODEL = os.environ.get("MODEL", "")
KEY = os.environ.get("API_KEY", "")

# The service scripts a model that calls what the user spells, and then repeats the results.
ONE_CALL = 'Use get_weather({"city": "Paris"}) and tell me what it says.'
TWO_CALLS = 'Use get_weather({"city": "Paris"}) and get_time({"zone": "UTC"}) at once, and tell me what they say.'
# Nothing is spelled: forced calls and structured answers are the demo model's own, held to their schemas.
QUESTION = "What will the weather be like in Rome?"
SYSTEM = "You are a helpful assistant."
UNKNOWN = "no-such-model"

FORECAST_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "summary": {"type": "string", "maxLength": 40},
    },
    "required": ["city", "days", "summary"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: The name of the city.
    """
    CALLED.append("get_weather")
    return f"22 degrees in {city}"


def get_time(zone: str) -> str:
    """Return the time in a zone.

    Args:
        zone: The name of the time zone.
    """
    CALLED.append("get_time")
    return f"half past nine in {zone}"


CALLED: list[str] = []

WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The name of the city."}},
    "required": ["city"],
    "additionalProperties": False,
}
TIME_SCHEMA = {
    "type": "object",
    "properties": {"zone": {"type": "string", "description": "The name of the time zone."}},
    "required": ["zone"],
    "additionalProperties": False,
}


def check_answer(text: object, *calls: str) -> None:
    """Raise AssertionError unless the calls were made, once each, and the text repeats their results."""
    made, CALLED[:] = CALLED.copy(), []
    # Clients may run calls of one answer side by side.
    assert sorted(made) == sorted(calls), f"called {made}, not {list(calls)}"
    assert isinstance(text, str), text
    for name, result in (("get_weather", "22 degrees in Paris"), ("get_time", "half past nine in UTC")):
        assert name not in calls or result in text, f"no {result!r} in {text!r}"


def check_forecast(value: Any) -> None:
    """Raise AssertionError unless a value obeys FORECAST_SCHEMA."""
    assert isinstance(value, dict), value
    assert value.keys() == {"city", "days", "summary"}, value
    assert value["city"] in ("Paris", "Rome"), value
    assert type(value["days"]) is int, value
    assert 1 <= value["days"] <= 9, value
    assert isinstance(value["summary"], str), value


class Checks:
    """Runs the checks of one API as its functions are decorated; prints one JSON line for each."""

    def __init__(self, api: str) -> None:
        self.api = api

    def __call__(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Run a check, which may be a coroutine function; its name is the check's."""
        CALLED.clear()
        try:
            outcome = function()
            if inspect.iscoroutine(outcome):
                outcome = asyncio.run(outcome)
        except Exception as error:
            lines = traceback.format_exception_only(error)
            frame = traceback.extract_tb(error.__traceback__)
            own = [entry.lineno for entry in frame if entry.filename == inspect.getsourcefile(function)]
            self._report(function.__name__, False, f"line {own[-1] if own else '?'}: {''.join(lines).strip()[-1500:]}")
        else:
            self._report(function.__name__, True, str(outcome or ""))
        return function

    def cannot(self, name: str, reason: str) -> None:
        """Report a check that the client has no way to do."""
        self._report(name, None, reason)

    def _report(self, name: str, ok: bool | None, detail: str) -> None:
        # The client may have left a line of its own without an end.
        print("\n" + json.dumps({"api": self.api, "check": name, "ok": ok, "detail": detail}), flush=True)


def raised(function: Callable[[], Any], kind: type[BaseException] | tuple[type[BaseException], ...]) -> BaseException:
    """Return the error of a kind that a function raises. Raise AssertionError where it raises none."""
    try:
        outcome = function()
        if inspect.iscoroutine(outcome):
            outcome = asyncio.run(outcome)
    except kind as error:
        return error
    raise AssertionError(f"served: {outcome!r}")


SECRET = "the number of the day is 4711"


def run_program(command: list[str], **variables: str) -> str:
    """Run a terminal agent in a folder with note.txt, which holds SECRET; return what it prints, errors too.

    `seconds` of clients.toml bound how long it may take.
    """
    folder = Path("project")
    folder.mkdir(exist_ok=True)
    (folder / "note.txt").write_text(f"{SECRET}\n")
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables, "PWD": str(folder.resolve())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def check_agent(check: Checks, ask: Callable[..., str], shell: str) -> None:
    """Run the checks of a terminal agent that streams and offers tools, but for `error`.

    ask: puts a request to the agent and returns what it prints. shell: a call, as the model spells it, of the tool that
    shows the note.
    """
    for name in ("plain", "streaming", "tool", "required", "structured"):
        check.cannot(name, "every request of it is streamed and offers tools")

    @check
    def parallel() -> None:
        said = ask(f"Use {shell} and {shell} at once, and tell me what they say.")
        assert said.rpartition("The tools said:")[2].count(SECRET) == 2, said[-1500:]

    @check
    def streamed_tool() -> None:
        said = ask(f"Use {shell} and tell me what it says.")
        assert SECRET in said.rpartition("The tools said:")[2], said[-1500:]
