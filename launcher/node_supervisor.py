"""The supervisor of a node other than node 0: it runs ranks for node 0, joins each of its lives, and ends with it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from launcher.life import RestartPolicy
from launcher.processes import Child, describe_end, start_computing, statuses
from launcher.supervisor import GROUP_MODULE, UNENDING, handled_signals
from moeserve.forever import vital
from moeserve.run_context import RunContext
from moeserve.statuses import Computing, Ended, Failed, Forked, Loading, Met, Ready

# A node that gets SIGTERM waits this many seconds longer for node 0 than node 0 gives its streams to drain.
_PATIENCE = 10.0
_SECONDS_TO_END = 3.0
_SECONDS_BETWEEN_TRIES = 0.5
# After a loss node 0 has to serve again within this time.
_SECONDS_TO_COME_BACK = 300.0


class NodeSupervisor:
    """Supervises torchrun's agent, a child of this process and the parent of this node's ranks.

    When a rank of any node is lost, the ranks of this node join node 0's next life: in copies of themselves where they
    can (`launcher.copies`), and else, or if node 0's own group has ended, as a new group. `RestartPolicy` bounds how
    often. computing: called once the ranks take steps. failed: called with one sentence if the node ends with exit
    code 1. notice: called with one sentence for each end after which the ranks join again.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        computing: Callable[[], None],
        failed: Callable[[str], None],
        notice: Callable[[str], None],
    ) -> None:
        self._context = context
        self._computing, self._failed, self._notice = computing, failed, notice
        self._policy = RestartPolicy(context.config.max_restarts)
        self._why: str | None = None
        self._has_computed = False
        self._computes_since: float | None = None
        self._exit_code: int | None = None
        self._agent: Child | None = None
        self._orders: int | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._gave_up = False
        self._told_to_end = asyncio.Event()

    async def run(self) -> int:
        """Compute until node 0 or a signal ends the service; return the exit code. The ranks are gone then."""
        loop = asyncio.get_running_loop()
        for number in handled_signals():
            loop.add_signal_handler(number, self._on_signal, number)
        while not self._told_to_end.is_set():
            clean, end = await self._run_group()
            if self._exit_code is not None or (clean and self._why is None):
                return self._exit_code or 0
            self._why = self._why or f"The process group of this node's ranks {end}."
            delay = None if self._gave_up else self._next_delay()
            if delay is None:
                self._failed(self._why)
                return 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told_to_end.wait(), delay)
        if self._gave_up and self._why is not None:
            self._failed(self._why)
        return 1 if self._gave_up else self._exit_code or 0

    async def _run_group(self) -> tuple[bool, str]:
        """Run one agent until it has ended; return whether that was the end of the service, and how it ended."""
        self._why = None
        self._context.save()
        agent, reading, self._orders = start_computing(
            "ranks of this node", GROUP_MODULE, self._context, takes_orders=self._context.config.max_restarts > 0
        )
        self._agent = agent
        status = vital("reports of the ranks", self._read_status(reading, agent))
        watch = vital("watch over node 0", self._watch_first_node(agent))
        try:
            await agent.ended
            await asyncio.wait({status}, timeout=0.5)
        finally:
            agent.send_signal(signal.SIGKILL)
            self._stay()
            for task in (status, watch):
                task.cancel()
            os.close(self._orders)
        return agent.end() == "ended with exit code 0", agent.end()

    def _next_delay(self) -> float | None:
        """Return the seconds until the ranks join again, None if they do not; log either."""
        served = None if self._computes_since is None else time.monotonic() - self._computes_since
        self._computes_since = None
        delay = self._policy.next_delay(served) if self._has_computed else None
        if delay is not None and self._giving_up is None:
            self._giving_up = asyncio.get_running_loop().call_later(_SECONDS_TO_COME_BACK, self._give_up)
        if delay is not None and self._why is not None:
            count = f"{self._policy.num_restarts} of at most {self._policy.max_restarts} in a row"
            self._notice(f"{self._why.removesuffix('.')}; this node's ranks join again ({count}).")
        return delay

    def _on_signal(self, number: signal.Signals) -> None:
        """Wait for node 0 after a first SIGTERM: it needs this node until its streams have ended.

        End at once after another signal, but for SIGHUP and SIGUSR1, which are for node 0.
        """
        if number in UNENDING:
            return
        computes = self._computes_since is not None
        if number == signal.SIGTERM and self._exit_code is None and computes:
            self._exit_code = 0
            patience = self._context.config.shutdown_timeout + _PATIENCE
            asyncio.get_running_loop().call_later(patience, self._kill)
            return
        self._exit_code = 128 + number
        self._told_to_end.set()
        self._kill()

    def _give_up(self) -> None:
        self._gave_up = True
        self._why = f"Node 0 did not serve again within {_SECONDS_TO_COME_BACK:.0f} s."
        self._told_to_end.set()
        self._kill()

    def _kill(self) -> None:
        if self._agent is not None:
            self._agent.send_signal(signal.SIGKILL)

    def _end_soon(self) -> None:
        """Kill the ranks unless they end, or join again, by themselves: one may hang."""
        self._stay()
        self._ending = asyncio.get_running_loop().call_later(_SECONDS_TO_END, self._kill)

    def _stay(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None

    def _on_end(self, end: Ended) -> None:
        """Have the ranks join again in other copies, unless the service has ended."""
        self._stay()
        if self._exit_code is None and end.code != 0:
            self._why = self._why or f"Rank {end.rank} (process {end.pid}) {describe_end(end.code)}."
            if self._next_delay() is not None:
                self._why = None
                assert self._orders is not None
                os.write(self._orders, f"{self._context.file}\n".encode())
                return
        if end.code == 0 and self._exit_code is None:
            self._exit_code = 0
        self._kill()

    async def _watch_first_node(self, agent: Child) -> None:
        """End the ranks soon after node 0's group is gone, if they do not end by themselves."""
        host, _, port = (self._context.config.rdzv_endpoint or "").rpartition(":")
        # Torchrun's store listens there. Nothing is sent: only the end of the connection counts.
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
                break
            except OSError:
                await asyncio.sleep(_SECONDS_BETWEEN_TRIES)
        # Node 0 that cannot be reached any more ends the watch as well.
        with suppress(OSError):
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            await reader.read()
            writer.close()
        await asyncio.sleep(_SECONDS_TO_END)
        self._why = self._why or f"Node 0 at {host}:{port} has ended or cannot be reached."
        agent.send_signal(signal.SIGKILL)

    async def _read_status(self, descriptor: int, agent: Child) -> None:
        async for status in statuses(descriptor):
            match status:
                case Computing():
                    self._computes_since = time.monotonic()
                    if self._giving_up is not None:
                        self._giving_up.cancel()
                        self._giving_up = None
                    if not self._has_computed:
                        self._has_computed = True
                        self._computing()
                case Met(incarnation=incarnation):
                    self._context.file.unlink(missing_ok=True)
                    self._context = replace(self._context, incarnation=incarnation)
                    self._context.save()
                case Failed(message=message):
                    # The first failure is the cause of the next ones.
                    self._why = self._why or message
                    self._end_soon()
                case Ended() as end:
                    self._on_end(end)
                case Loading() | Ready() | Forked():
                    pass
