"""A service for one process: started on a free port, asked with patience, ended with it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TextIO

from moeserve.bench.client import Endpoint, ExchangeError, Response, exchange

_TRIES = 20  # a refused request (429, 503) is sent at most this number of times
_TRIES_OF_BROKEN = 3  # one whose connection broke, this number
_LONGEST_WAIT_S = 60.0  # between two tries, whatever Retry-After says
_ERROR = "Error: "  # begins the line that says why a service does not start
_END_S = 60.0  # seconds that the service gets to end before it is killed


class ServiceNotStarted(Exception):
    """The service has ended before it was ready; the message says why, where standard error is no terminal."""


class ServiceGone(Exception):
    """No service answers at the address; the message is one sentence."""


@contextmanager
def own_service(settings: Sequence[str]) -> Iterator[str]:
    """Start `moeserve serve` on a free port, give its address once it is ready, and end it.

    settings: of the command line, the model included. Raise ServiceNotStarted.
    """
    quiet = () if any(setting.startswith("--log-level") for setting in settings) else ("--log-level", "warning")
    child = [sys.executable, "-P", "-m", "launcher.child", str(os.getpid())]
    command = [*child, "launcher.cli", "serve", *settings, *quiet, "--port", "0"]
    # A session of its own: Ctrl-C is for this process, which ends the service, even where it is killed itself.
    # A terminal is the service's own, for its progress. Elsewhere its lines are passed on, and its errors are kept.
    heard = None if sys.stderr is not None and sys.stderr.isatty() else subprocess.PIPE
    service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=heard, text=True, start_new_session=True)
    errors: list[str] = []
    started = Event()
    listener = Thread(target=_pass_on, args=(service.stderr, errors, started), daemon=True)
    listener.start()
    try:
        assert service.stdout is not None
        found = next((found for line in service.stdout if (found := re.search(r"ready on (http://\S+)", line))), None)
        if found is None:
            code = service.wait()
            listener.join(_END_S)
            why = errors[-1] if errors else "it says above why."
            raise ServiceNotStarted(f"The service did not start (exit code {code}): {why}")
        started.set()
        yield found[1]
    finally:
        service.terminate()
        try:
            service.wait(_END_S)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()


def _pass_on(stream: TextIO | None, errors: list[str], started: Event) -> None:
    """Copy a service's standard error to this process's, but add its errors to `errors` until it has started."""
    for line in stream or ():
        if line.startswith(_ERROR) and not started.is_set():
            errors.append(line.removeprefix(_ERROR).strip())
        elif sys.stderr is not None:
            with suppress(OSError, ValueError):
                sys.stderr.write(line)


async def ask_patiently(endpoint: Endpoint, path: str, body: bytes, api_key: str | None, timeout_s: float) -> Response:
    """Return the answer to a POST, the last of some where the earlier ones ask for patience.

    Raise ServiceGone, and ExchangeError where the connection breaks again and again or the answer takes too long.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    for tried in range(1, _TRIES + 1):
        try:
            response = await exchange(endpoint, "POST", path, body, headers, timeout_s)
        except ExchangeError as error:
            if isinstance(error.__cause__, OSError):
                raise ServiceGone(f"The server is gone ({error}).") from None
            if isinstance(error.__context__, TimeoutError) or tried == _TRIES_OF_BROKEN:
                raise
            continue
        if response.status not in (429, 503) or tried == _TRIES:
            break
        await asyncio.sleep(_patience(response))
    return response


def _patience(response: Response) -> float:
    """Return the seconds to wait that the answer asks for."""
    asked = response.headers.get("retry-after", "")
    return min(max(1.0, float(asked)), _LONGEST_WAIT_S) if asked.isdigit() else 1.0
