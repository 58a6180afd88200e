"""Has conversations rendered by the chat template in processes that can be ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.http import invalid
from moeserve.frontend.job_process import JobProcesses
from moeserve.frontend.template_process import FAILED, REFUSED
from moeserve.model.spec import ModelError

_MODULE = "moeserve.frontend.template_process"
# While one renders a conversation that takes all its time, the others' conversations go to another.
_NUM_PROCESSES = 2
_LONGEST_CHECK_S = 180.0
# Each character takes at most four bytes.
_MAX_ANSWER_BYTES = 4 * limits.MAX_RENDERED_CHARS + 1


def check_model_texts(folder: Path) -> None:
    """Load tokenizer and template once in a process that may take so much time and memory, and no more.

    Raises ModelError, also where a library aborts that process.
    """
    command = [sys.executable, "-m", _MODULE, "--check", str(folder)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_LONGEST_CHECK_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"The tokenizer and chat template of {folder} did not load in time.") from None
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    last = lines[-1] if lines else ""
    part = next((line for line in reversed(lines) if not line.startswith(FAILED)), "tokenizer")
    if last == FAILED + "it takes too much memory":
        raise ModelError(f"The {part} of {folder} cannot be used: it takes too much memory.")
    if last.startswith(FAILED):
        raise ModelError(last.removeprefix(FAILED))
    if done.returncode == -signal.SIGPROF:
        raise ModelError(f"The {part} of {folder} cannot be used: it takes too long.")
    if done.returncode:
        raise ModelError(f"The {part} of {folder} cannot be used: loading it breaks its library.")


def render_job(messages: list[dict[str, Any]], arguments: dict[str, Any]) -> bytes:
    """Return the job of rendering a conversation. Raises ApiError (400) for one that is nested too deeply.

    arguments: of `ChatTemplate.render`, beside the messages.
    """
    try:
        # Not MessagePack: integers of clients are of any size.
        return msgspec.json.encode([messages, arguments])
    except (ValueError, RecursionError):
        raise invalid("The messages cannot be given to the chat template: they are nested too deeply") from None


class TemplateRenderer:
    """Owns the processes, which `start` or conversations start. Used by the frontend's event loop alone."""

    def __init__(self, folder: Path) -> None:
        """folder: of a model with a chat template."""
        self._processes = JobProcesses(_MODULE, [str(folder)], _NUM_PROCESSES, _MAX_ANSWER_BYTES)

    async def render(self, job: bytes) -> str:
        """Return the text of a conversation. Raises ApiError (400) if the template refuses it, or takes too much.

        job: of `render_job`.
        """
        answer = await self._processes.ask(job)
        if not answer:
            raise invalid("The chat template takes too long for these messages, or too much memory", "messages")
        if answer[:1] == REFUSED:
            raise invalid(answer[1:].decode(), "messages")
        return answer[1:].decode()

    async def start(self) -> None:
        """Start the processes, without waiting until they can render."""
        await self._processes.start()

    async def stop(self) -> None:
        """End the processes."""
        await self._processes.stop()
