"""`moeserve run-batch`: answer a file of requests in OpenAI's batch form, and go on where an earlier run ended."""

from __future__ import annotations

import asyncio
import fcntl
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import msgspec

from launcher.own_service import ServiceGone, ServiceNotStarted, ask_patiently, own_service
from launcher.server_client import optional_server_option
from moeserve.bench.client import Endpoint, ExchangeError, Response, error_message
from moeserve.frontend.dialects.batch_lines import BatchLine, read_line, repeated, result_line


@click.command(name="run-batch")
@click.argument("source", metavar="IN", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("settings", metavar="[-- MODEL AND SETTINGS OF SERVE]", nargs=-1, type=click.UNPROCESSED)
@optional_server_option
@click.option("--api-key", envvar="MOESERVE_API_KEY", help="Key of the server. [MOESERVE_API_KEY]")
@click.option("--concurrency", type=click.IntRange(1, 4096), default=16, show_default=True, help="Requests at once.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=3600, show_default=True, help="Seconds an answer takes."
)
def run_batch(
    source: Path,
    target: Path,
    settings: tuple[str, ...],
    url: str | None,
    api_key: str | None,
    concurrency: int,
    timeout: float,
) -> None:
    """Answer the requests in IN, a JSON object a line, and append the answers to OUT.

    A line of IN has `custom_id`, `method`, `url` and `body`, a line of OUT `id`, `custom_id`, `response` and `error`.
    Requests that OUT answers already are left out, so the same command goes on after an interruption. Without --url a
    service is started for the run; what follows `--` is passed to `moeserve serve`. The exit status is 0 if all
    requests in OUT and IN have succeeded.
    """
    if url is not None and settings:
        raise click.UsageError("Settings of a service are for a run without --url.")
    try:
        with Results(target) as results:
            if _answer_all(results, source, url, settings, (api_key, concurrency, timeout)):
                click.echo(results.in_words(), err=True)
                sys.exit(1 if results.num_failed else 0)
            click.echo(f"\nInterrupted: the same command goes on. {results.in_words()}", err=True)
            sys.exit(128 + signal.SIGINT)
    except (BatchError, ServiceNotStarted, ValueError) as error:
        raise click.ClickException(str(error)) from None


def _answer_all(
    results: Results, source: Path, url: str | None, settings: tuple[str, ...], how: tuple[str | None, int, float]
) -> bool:
    """Return whether nobody has interrupted. how: key, concurrency, timeout in seconds."""
    api_key, concurrency, timeout = how
    jobs = results.open_jobs(read_input(source))
    first = next(jobs, None)
    if first is None:
        return True
    try:
        with nullcontext(url) if url is not None else own_service(settings) as address:
            batch = Batch(Endpoint.parse(address), api_key, timeout, results)
            asyncio.run(batch.run(chain([first], jobs), concurrency))
    except KeyboardInterrupt:
        return False
    return True


class BatchError(Exception):
    """The run cannot go on; the message is one sentence or two."""


def read_input(source: Path) -> Iterator[BatchLine]:
    """Yield the job of every line that is not blank."""
    seen: set[str] = set()
    with source.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                job = read_line(number, line)
                if job.custom_id is not None and job.custom_id in seen:
                    job = BatchLine(number, problem=repeated(number, job.custom_id))
                seen.add(job.custom_id or "")
                yield job


class Results:
    """The output file: one line a request, there as soon as it is known. Raises BatchError where it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.num_succeeded = self.num_failed = self.num_before = 0
        self._path = path
        self._done: set[str] = set()
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise BatchError(f"{path} cannot be written ({error.strerror or error}).") from None
        try:
            self._take_over()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def open_jobs(self, jobs: Iterable[BatchLine]) -> Iterator[BatchLine]:
        """Yield the requests that the file does not answer."""
        return (job for job in jobs if (job.custom_id or job.result_id) not in self._done)

    def write(self, job: BatchLine, response: dict[str, Any] | None, error: dict[str, str] | None) -> None:
        self._file.write(result_line(job, response, error))
        self._file.flush()
        self._count(response, error)

    def in_words(self) -> str:
        before = f" ({self.num_before} of them before this run)" if self.num_before else ""
        return f"{self._path}: {self.num_succeeded} succeeded, {self.num_failed} failed{before}."

    def _take_over(self) -> None:
        """Read the results of an earlier run; cut off a line that it did not finish."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BatchError(f"Another run writes to {self._path}.") from None
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                entry = msgspec.json.decode(line, type=dict[str, Any])
                self._done.add(entry["custom_id"] or entry["id"])
                self._count(entry["response"], entry["error"])
            except (ValueError, KeyError, TypeError):
                raise BatchError(f"{self._path} holds other things than results (line {number}).") from None
        self._file.truncate(whole)
        self.num_before = self.num_succeeded + self.num_failed

    def _count(self, response: dict[str, Any] | None, error: dict[str, str] | None) -> None:
        if error is None and response is not None and 200 <= response["status_code"] < 300:
            self.num_succeeded += 1
        else:
            self.num_failed += 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Sends jobs to a server, several at once, and writes their results."""

    endpoint: Endpoint
    api_key: str | None
    timeout_s: float
    results: Results

    async def run(self, jobs: Iterator[BatchLine], concurrency: int) -> None:
        """Work until no job is left. Raise BatchError where the server cannot answer any."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._work(jobs))
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None

    async def _work(self, jobs: Iterator[BatchLine]) -> None:
        for job in jobs:
            if job.problem is not None:
                self.results.write(job, None, {"code": "invalid_line", "message": job.problem})
                continue
            try:
                response = await self._answer(job)
            except ExchangeError as error:
                self.results.write(job, None, {"code": "no_answer", "message": str(error)})
            else:
                self.results.write(job, _described(response), None)

    async def _answer(self, job: BatchLine) -> Response:
        """Return the answer to a job. Raise ExchangeError, BatchError."""
        try:
            response = await ask_patiently(self.endpoint, job.path, job.body, self.api_key, self.timeout_s)
        except ServiceGone as error:
            raise BatchError(f"{error} The same command goes on where this one ended.") from None
        if response.status in (401, 403):
            raise BatchError(error_message(response.body))
        return response


def _described(response: Response) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(response.body)
    except msgspec.DecodeError:
        body = response.body.decode("utf-8", "replace")
    return {"status_code": response.status, "request_id": response.headers.get("x-request-id", ""), "body": body}
