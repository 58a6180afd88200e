"""Listens to the engine's heartbeats until they tell of a hang."""

from __future__ import annotations

import asyncio
import time

import zmq
import zmq.asyncio

from launcher.hang import HangDetector
from moeserve.messages import DecodeError, Heartbeat, decode

_TICK = 0.25


async def wait_for_hang(address: str, incarnation: int, timeout: float) -> None:
    """Returns once the engine at `address` has hung for `timeout` seconds; until then it runs for ever."""
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as heartbeats:
        heartbeats.setsockopt(zmq.LINGER, 0)
        heartbeats.setsockopt(zmq.RCVHWM, 100)
        heartbeats.subscribe(b"")
        heartbeats.connect(address)
        now = time.monotonic()
        detector = HangDetector(timeout, now)
        while not detector.is_hung(now):
            await asyncio.sleep(_TICK)
            before, now = now, time.monotonic()
            if now - before > 1 + _TICK:
                # This process was itself stopped or starved: its silence is not the engine's.
                detector.restart(now)
            await _observe_all(heartbeats, incarnation, detector, now)


async def _observe_all(heartbeats: zmq.asyncio.Socket, incarnation: int, detector: HangDetector, now: float) -> None:
    # Polling first, so that no receive is ever cancelled: a cancelled one may lose its message.
    while await heartbeats.poll(0):
        try:
            life, heartbeat = decode(await heartbeats.recv(), Heartbeat)
        except DecodeError:
            continue
        if life == incarnation:
            detector.observe(now, step=heartbeat.step, busy=heartbeat.busy)
