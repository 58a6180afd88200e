"""A service of several ranks as a user starts it, for as long as it is measured."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from benchmarks.experts.texts import documents
from benchmarks.experts.unavailable import Unavailable
from moeserve.bench.client import ChatClient, Endpoint, RequestFailed
from moeserve.bench.metrics import Metrics, summarise
from moeserve.bench.workloads import Conversation, Workload, run_workload, seeded_text

_READY = re.compile(r"ready on (http://\S+)")
_SECONDS_TO_START, _SECONDS_TO_END = 180, 30
_TIMEOUT = 600.0


class Service:
    """A running service; requests come from this process."""

    def __init__(self, url: str, log: TextIO) -> None:
        self._log = log
        self._client = ChatClient(Endpoint.parse(url), "m", None, ignore_eos=True, timeout_s=_TIMEOUT)
        self._num_runs = 0

    def run(self, num_streams: int, num_tokens: int, seed: int) -> Metrics:
        """Of independent streams that all begin at once. Each call sends texts of its own. Raises Unavailable."""
        self._num_runs += 1
        conversations = tuple(
            Conversation("", None, (seeded_text(24, seed, self._num_runs, number),), cold=True)
            for number in range(num_streams)
        )
        workload = Workload("streams", num_streams, num_tokens, conversations)
        records = asyncio.run(run_workload(self._client, workload))
        for record in records:
            if record.error is not None:
                raise Unavailable(f"{record.error}; the service said: {last_error(self._log)}")
        return summarise(records, None)

    def answers(self, num_requests: int, num_tokens: int, num_at_once: int = 8) -> list[str]:
        """Greedy texts for the first documents, requests coming and going."""
        prompts = [" ".join(document.split()[:24]) for document in documents()[:num_requests]]
        return asyncio.run(self._answers(prompts, num_tokens, num_at_once))

    def experts(self) -> dict[str, Any]:
        """What `/v1/experts` says."""
        try:
            said: dict[str, Any] = asyncio.run(self._client.get("/v1/experts"))
        except RequestFailed as error:
            raise Unavailable(f"{error}; the service said: {last_error(self._log)}") from error
        return said

    async def _answers(self, prompts: Sequence[str], num_tokens: int, num_at_once: int) -> list[str]:
        places = asyncio.Semaphore(num_at_once)

        async def answer(prompt: str) -> str:
            async with places:
                _, found = await self._client.chat([{"role": "user", "content": prompt}], num_tokens)
                return found.text

        try:
            return await asyncio.gather(*map(answer, prompts))
        except RequestFailed as error:
            raise Unavailable(f"{error}; the service said: {last_error(self._log)}") from error


@contextmanager
def service(folder: Path, num_ranks: int, threads: int, *options: str) -> Iterator[Service]:
    """`moeserve serve` on a free port of this machine, ended afterwards. Raises Unavailable if it does not start."""
    sizes = ("--expert-parallel-size", str(num_ranks), "--threads", str(threads), "--kv-cache-memory", "256MiB")
    # Others may use the machine too.
    patience = ("--engine-timeout", "60")
    command = [sys.executable, "-m", "launcher.cli", "serve", str(folder), "--port", "0", "--served-model-name", "m"]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, *sizes, *patience, *options], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        too_long = threading.Timer(_SECONDS_TO_START, process.kill)
        too_long.start()
        try:
            url = _url(process)
            too_long.cancel()
            if url is None:
                raise Unavailable(f"A service of {num_ranks} ranks did not start: {last_error(errors)}")
            yield Service(url, errors)
        finally:
            too_long.cancel()
            _end(process)


def last_error(log: TextIO) -> str:
    """The last line of a log that speaks of one."""
    log.seek(0)
    lines = [line.strip() for line in log if "rror" in line]
    return lines[-1] if lines else "nothing"


def _url(process: subprocess.Popen[str]) -> str | None:
    """Where it listens, once it is ready; None if it ends before."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := _READY.search(line):
            return found[1]
    return None


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
