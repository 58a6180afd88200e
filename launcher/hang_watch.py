"""Listens to the engine's heartbeats until they tell of a hang."""

from __future__ import annotations

import asyncio
import time

import zmq
import zmq.asyncio

from moeserve.frames import DecodeError, decode
from moeserve.frontend.engine_watch import ProgressWatch
from moeserve.messages import Heartbeat

_TICK = 0.25


async def wait_for_hang(address: str, incarnation: int, timeout: float) -> str:
    """Returns why the engine at `address` counts as hung, once it does; until then it runs for ever.

    timeout: seconds that a busy engine may take without a new step, or any engine without a heartbeat.
    """
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as heartbeats:
        heartbeats.setsockopt(zmq.LINGER, 0)
        heartbeats.setsockopt(zmq.RCVHWM, 100)
        heartbeats.subscribe(b"")
        heartbeats.connect(address)
        watch = ProgressWatch(timeout, time.monotonic())
        while (verdict := watch.verdict(time.monotonic())) is None:
            await asyncio.sleep(_TICK)
            await _observe_all(heartbeats, incarnation, watch)
        return verdict


async def _observe_all(heartbeats: zmq.asyncio.Socket, incarnation: int, watch: ProgressWatch) -> None:
    # Polling first, so that no receive is ever cancelled: a cancelled one may lose its message.
    while await heartbeats.poll(0):
        try:
            life, heartbeat = decode(await heartbeats.recv(), Heartbeat)
        except DecodeError:
            continue
        if life == incarnation:
            watch.observe(heartbeat, time.monotonic())
