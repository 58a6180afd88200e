"""Child processes: how they are started, what they inherit, and how their end is heard of."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

import msgspec

from launcher.preflight import LaunchError, usable_cores
from moeserve.config import ServeConfig, environment_name

_PACKAGE_ROOT = Path(__file__).resolve().parent.parent


def child_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """What a child inherits: the caller's environment without settings and keys, thread counts set on purpose.

    Children run the code of this very installation, whatever the working directory holds.

    Idle threads of the model spin for some microseconds, which bridges the gap to the next operation, and then sleep.
    By default they would spin for milliseconds and take the core from whatever the other thread waits for: next to one
    busy neighbour on two cores a matrix product then takes ten times as long. Huge pages halve the time of loading.
    Triton is to go on fusing products and sums, as no version will by default from 3.10 on.
    """
    settings = {environment_name(setting) for setting in fields(ServeConfig)}
    kept = {name: value for name, value in environment.items() if name not in settings | {"NOTIFY_SOCKET"}}
    paths = [str(_PACKAGE_ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return (
        {"GOMP_SPINCOUNT": "2000", "THP_MEM_ALLOC_ENABLE": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
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


def default_threads(config: ServeConfig) -> int:
    """Threads of a rank that shares this machine's cores with the other ranks of its node."""
    return max(1, usable_cores() // (config.expert_parallel_size // config.nnodes))


class Child:
    """One child process in a session of its own. Made and used on the event loop's thread, which is the main one."""

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
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            pass_fds=list(pass_fds),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            umask=0o077,
        )
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

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the child if it still runs."""
        if self.running:
            signal.pidfd_send_signal(self._pidfd, number)

    def end(self) -> str:
        """How the child ended, as the end of a sentence."""
        code = self._process.returncode
        if code is not None and code < 0:
            hint = " (often: out of memory)" if code == -signal.SIGKILL else ""
            return f"was ended by {signal.Signals(-code).name}{hint}"
        return f"ended with exit code {code}"

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._process.wait()
        os.close(self._pidfd)
        if not self.ended.done():
            self.ended.set_result(None)


# The listening HTTP socket, bound before anything slow begins, so that a taken port is known at once.


_BACKLOG = 2048


def open_listener(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Clients that connect early wait in its backlog until the frontend accepts.

    Raises LaunchError when the address is not usable.
    """
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LaunchError(f"The host name {host!r} cannot be resolved: {reason}.") from None
    family, kind, protocol, _, address = candidates[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two sockets may share an address while neither listens: only listening makes it ours.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise LaunchError(_bind_failure(host, port, error)) from None
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def reachable_address(listener: socket.socket) -> tuple[str, int]:
    """Host and port under which this machine itself reaches the socket."""
    host, port = listener.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


def url(address: tuple[str, int]) -> str:
    """`http://host:port`."""
    host, port = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind_failure(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is taken by another process: stop that one or choose another with --port."
    if error.errno == errno.EACCES:
        return f"Port {port} needs more rights than this user has: choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"This machine has no address {host}: choose one of its own with --host."
    return f"Cannot listen on {host} port {port}: {error.strerror}."


# What the model process tells the supervisor, one JSON object per line on a pipe.


# Called by the engine with an object that carries "event" and the fields of one class below.
Report = Callable[[dict[str, Any]], None]


class Loading(msgspec.Struct, tag_field="event", tag="loading"):
    """Bytes of weights read so far, of how many."""

    done: int
    total: int
    stage: str = "loading weights"


class Ready(msgspec.Struct, tag_field="event", tag="ready"):
    """The engine takes requests. `model_max_len` is what the model allows; `max_model_len` may be clamped below it.

    `no_compiled_kernels` says in a sentence why torch computes on the CPU in their place, if so.
    """

    device: str
    dtype: str
    weights_bytes: int
    kv_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    model_max_len: int | None = None
    no_compiled_kernels: str | None = None


class Computing(msgspec.Struct, tag_field="event", tag="computing"):
    """A rank other than 0 takes steps from now on."""


class Failed(msgspec.Struct, tag_field="event", tag="error"):
    """The engine ends; one sentence why."""

    message: str


Status = Loading | Ready | Computing | Failed
_decoder = msgspec.json.Decoder(Status)
_encoder = msgspec.json.Encoder()


def decode_status(line: bytes) -> Status:
    """The status in one line; one that is not understood becomes `Failed`."""
    try:
        status: Status = _decoder.decode(line)
    except msgspec.MsgspecError as error:
        return Failed(f"The model process sent a status that is not understood: {error}.")
    return status


def reporter(pipe: TextIO) -> Report:
    """A function that writes one status per call to `pipe`."""

    def report(status: dict[str, Any]) -> None:
        pipe.write(_encoder.encode(status).decode() + "\n")
        pipe.flush()

    return report
