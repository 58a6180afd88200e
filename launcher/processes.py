"""Child processes: the environment they inherit, how they start and end, and the pipes between them and this one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import TextIO

import msgspec

from launcher.preflight import usable_cores
from moeserve.config import ServeConfig, environment_name
from moeserve.device import kernels_variable
from moeserve.run_context import RunContext
from moeserve.statuses import Failed, Report, Status

# They are for this process: systemd's, and where another service counts.
_OWN = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "PROMETHEUS_MULTIPROC_DIR"}
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent


def child_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return a child's environment: the caller's without settings and keys, with thread counts.

    Children run the code of this very installation, whatever the working directory holds.

    Idle threads of torch spin for some microseconds, which bridges the gap to the next operation, and then sleep; the
    compiled kernels have threads of their own (`kernels/cpu/team.cpp`). By default torch's would spin for milliseconds
    and take the core from the thread that the others wait for: next to one busy neighbour on two cores a matrix product
    then takes ten times as long. Huge pages halve the time of loading.
    Triton fuses products and sums; versions from 3.10 on would not by default. Segments of a GPU's memory that grow
    leave no gaps between steps of different sizes.
    """
    settings = {environment_name(setting) for setting in fields(ServeConfig)}
    kept = {name: value for name, value in environment.items() if name not in settings | _OWN}
    paths = [str(_PACKAGE_ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return (
        {
            "GOMP_SPINCOUNT": "2000",
            "THP_MEM_ALLOC_ENABLE": "1",
            "TRITON_DEFAULT_FP_FUSION": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        }
        | kept
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
    )


def computing_environment(environment: Mapping[str, str], config: ServeConfig) -> dict[str, str]:
    """Return the environment of a process that computes the model, with as many threads as it may have."""
    return kernels_variable(config) | child_environment(environment, config.threads or default_threads(config))


def default_threads(config: ServeConfig) -> int:
    """Return the threads of a rank that shares this machine's cores with the other ranks of its node."""
    return max(1, usable_cores() // config.num_ranks_here)


class Child:
    """One child process in a session of its own. Used on the event loop's thread, which must be the main one."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
    ) -> None:
        """`name` is for sentences; `ended` is done once the process is reaped. `pass_fds` stay open in the child."""
        self.name = name
        command = [sys.executable, "-P", "-m", "launcher.child", str(os.getpid()), module, *arguments]
        # The child inherits the mask, until it has a handler of SIGHUP (`launcher.child`).
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                pass_fds=list(pass_fds),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                umask=0o077,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def ended_well(self) -> bool:
        """Return whether the child has ended with exit code 0, or by a SIGTERM that came before it could handle one."""
        return self._process.returncode in (0, -signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        if self.running:
            signal.pidfd_send_signal(self._pidfd, number)

    @property
    def code(self) -> int | None:
        """The exit code, or the signal below zero that ended the child; None while it runs."""
        return self._process.returncode

    def end(self) -> str:
        """Return how the child ended, as the end of a sentence."""
        return describe_end(self.code)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._process.wait()
        os.close(self._pidfd)
        if not self.ended.done():
            self.ended.set_result(None)


def start_computing(name: str, module: str, context: RunContext, *, takes_orders: bool) -> tuple[Child, int, int]:
    """Start the model process, or the group of a node's ranks, with `context`, whose file is written.

    Return it, the pipe on which its statuses come, and the pipe for orders to it, which it reads if it takes orders.
    """
    config = context.config
    (reading, writing), (hearing, orders) = os.pipe(), os.pipe()
    arguments = [str(context.file), "--status-fd", str(writing)]
    if takes_orders:
        arguments += ["--orders-fd", str(hearing)]
    environment = computing_environment(os.environ, config)
    try:
        child = Child(name, module, arguments, environment=environment, pass_fds=[writing, hearing])
    finally:
        os.close(writing)
        os.close(hearing)
    return child, reading, orders


def describe_end(code: int | None) -> str:
    """Return how a process with that exit code, or signal below zero, ended, as the end of a sentence."""
    if code is not None and code < 0:
        hint = " (often: out of memory)" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"
    return f"ended with exit code {code}"


_decoder = msgspec.json.Decoder(Status)


def decode_status(line: bytes) -> Status:
    """Return the status in one line; one that is not understood becomes `Failed`."""
    try:
        status: Status = _decoder.decode(line)
    except msgspec.MsgspecError as error:
        return Failed(f"The model process sent a status that is not understood: {error}.")
    return status


async def statuses(descriptor: int) -> AsyncIterator[Status]:
    """Yield the statuses that come on a pipe until its end, and close it."""
    reader = asyncio.StreamReader()
    pipe = open(descriptor, "rb", buffering=0)  # noqa: SIM115 - the transport closes it
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    with closing(transport):
        while line := await reader.readline():
            yield decode_status(line)


def reporter(pipe: TextIO) -> Report:
    """Return a function that writes a status as a line of the pipe."""

    def report(status: Status) -> None:
        pipe.write(msgspec.json.encode(status).decode() + "\n")
        pipe.flush()

    return report
