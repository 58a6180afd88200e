"""The supervisor of a node other than node 0: it runs ranks for node 0 and ends with them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from launcher.processes import (
    Child,
    Computing,
    Failed,
    Loading,
    Ready,
    child_environment,
    decode_status,
    default_threads,
)
from launcher.supervisor import GROUP_MODULE, handled_signals
from moeserve.wire import RunContext

# A node that gets SIGTERM waits this many seconds longer for node 0 than node 0 gives its streams to drain.
_PATIENCE = 10.0
_SECONDS_TO_END = 3.0


class NodeSupervisor:
    """Supervises torchrun's agent, a child of this process and the parent of this node's ranks.

    computing: called once the ranks take steps. failed: called with one sentence if the node ends with exit code 1.
    """

    def __init__(self, context: RunContext, *, computing: Callable[[], None], failed: Callable[[str], None]) -> None:
        self._context = context
        self._computing, self._failed = computing, failed
        self._why: str | None = None
        self._is_computing = False
        self._exit_code: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Compute until node 0 or a signal ends the service; return the exit code. The ranks are gone then."""
        loop = asyncio.get_running_loop()
        context_file = str(self._context.save())
        reading, writing = os.pipe()
        config = self._context.config
        try:
            agent = Child(
                "ranks of this node",
                GROUP_MODULE,
                [context_file, "--status-fd", str(writing)],
                environment=child_environment(os.environ, config.threads or default_threads(config)),
                pass_fds=[writing],
            )
        finally:
            os.close(writing)
        for number in handled_signals():
            loop.add_signal_handler(number, self._on_signal, number, agent)
        status = self._spawn(self._read_status(reading, agent))
        try:
            await agent.ended
            await asyncio.wait({status}, timeout=0.5)
        finally:
            agent.send_signal(signal.SIGKILL)
            for task in self._tasks:
                task.cancel()
        return self._conclude(agent)

    def _conclude(self, agent: Child) -> int:
        clean = agent.end() == "ended with exit code 0"
        if self._exit_code is None and not (clean and self._why is None):
            self._failed(self._why or f"The process group of this node's ranks {agent.end()}.")
            return 1
        return self._exit_code or 0

    def _on_signal(self, number: signal.Signals, agent: Child) -> None:
        """Wait for node 0 after a first SIGTERM or SIGHUP: it needs this node until its streams have ended.

        End at once after another signal, but for SIGUSR1, which is for node 0.
        """
        if number == signal.SIGUSR1:
            return
        if number in (signal.SIGTERM, signal.SIGHUP) and self._exit_code is None and self._is_computing:
            self._exit_code = 0
            patience = self._context.config.shutdown_timeout + _PATIENCE
            asyncio.get_running_loop().call_later(patience, agent.send_signal, signal.SIGKILL)
            return
        self._exit_code = 128 + number
        agent.send_signal(signal.SIGKILL)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    async def _watch_first_node(self, agent: Child) -> None:
        """End the ranks soon after node 0 is gone, if they do not end by themselves: one may hang."""
        host, _, port = (self._context.config.rdzv_endpoint or "").rpartition(":")
        # Torchrun's store listens there. Nothing is sent: only the end of the connection counts.
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            await reader.read()
            writer.close()
        except OSError:
            # Node 0 cannot be reached any more, which ends the watch as well.
            pass
        await asyncio.sleep(_SECONDS_TO_END)
        self._why = (
            self._why or f"Node 0 at {host}:{port} has ended or cannot be reached, and a rank of this node hangs."
        )
        agent.send_signal(signal.SIGKILL)

    async def _read_status(self, descriptor: int, agent: Child) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        with open(descriptor, "rb", buffering=0) as pipe:
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
            while line := await reader.readline():
                match decode_status(line):
                    case Computing() if not self._is_computing:
                        self._is_computing = True
                        self._computing()
                        self._spawn(self._watch_first_node(agent))
                    case Failed(message=message):
                        # The first failure is the cause of the next ones.
                        self._why = self._why or message
                        loop.call_later(_SECONDS_TO_END, agent.send_signal, signal.SIGKILL)
                    case Loading() | Ready() | Computing():
                        pass
