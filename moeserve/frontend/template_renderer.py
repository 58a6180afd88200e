"""Has chat templates rendered in a process that can be ended, one conversation after another."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import structlog

from moeserve.frontend import limits
from moeserve.frontend.http import invalid
from moeserve.frontend.template_process import FAILED, REFUSED, SIZE_BYTES
from moeserve.model.spec import ModelError

log = structlog.get_logger(__name__)

_MODULE = "moeserve.frontend.template_process"
# Of the clock, for a machine that has no time for the process; it limits its own processor time.
_LONGEST_WAIT_S = 30.0
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


class TemplateRenderer:
    """Owns the process, which `start` or the first conversation starts. Used by the frontend's event loop alone."""

    def __init__(self, folder: Path) -> None:
        """folder: of a model with a chat template."""
        self._folder = folder
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def render(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        """Return the text of a conversation. Raises ApiError (400) if the template refuses it, or takes too much.

        arguments: of `ChatTemplate.render`, beside the messages.
        """
        try:
            # Not MessagePack: integers of clients are of any size.
            job = json.dumps([messages, arguments], separators=(",", ":")).encode()
        except (ValueError, RecursionError):
            raise invalid("The messages cannot be given to the chat template: they are nested too deeply") from None
        # A client that leaves must not leave a text unread behind.
        answer = await asyncio.shield(asyncio.ensure_future(self._answer(job)))
        if answer[:1] == REFUSED:
            raise invalid(answer[1:].decode(), "messages")
        return answer[1:].decode()

    async def start(self) -> None:
        """Start the process, without waiting until it can render."""
        async with self._turn:
            await self._running()

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            await _end(self._process)

    async def _answer(self, job: bytes) -> bytes:
        async with self._turn:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                async with asyncio.timeout(_LONGEST_WAIT_S):
                    process.stdin.write(len(job).to_bytes(SIZE_BYTES) + job)
                    await process.stdin.drain()
                    size = int.from_bytes(await process.stdout.readexactly(SIZE_BYTES))
                    if not 1 <= size <= _MAX_ANSWER_BYTES:
                        raise ConnectionError("an answer that is none")
                    return await process.stdout.readexactly(size)
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                await _end(process)
                log.warning("template_ended", reason="rendering took too long or too much", status=process.returncode)
                return REFUSED + b"The chat template takes too long for these messages, or too much memory"

    async def _running(self) -> Process:
        """Return the process, started if it does not run."""
        if self._process is None or self._process.returncode is not None:
            # A session of its own: an interrupt from the keyboard is for the frontend, which ends the process itself.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", _MODULE, str(self._folder), stdin=PIPE, stdout=PIPE, start_new_session=True
            )
        return self._process


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
