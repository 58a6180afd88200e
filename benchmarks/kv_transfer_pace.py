"""`python -m benchmarks.kv_transfer_pace`: the time from the end of a prompt to its last blocks in the other service.

Two processes have memory of the demo's shape and no model. The one holds a prompt whose blocks become more, a step's at
a time; the other one has asked for all of them before. With `--prompt` services of the demo follow, a thread each: the
time to a prompt's first token from one service, and from two, with tickets that are made after the prompt and early.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from os import getloadavg
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import click
import httpx2
import numpy as np
import zmq

from benchmarks.kv_restart import serving
from benchmarks.prefill_apart import Arrangement, random_tokens
from moeserve.engine.kv_disk.copier import BlockMemory, block_bytes
from moeserve.engine.kv_transfer.answers import Coming
from moeserve.engine.kv_transfer.fetcher import BlockFetcher
from moeserve.engine.kv_transfer.server import BlockServer
from moeserve.engine.ranks.meeting import Gatekeeper, create_keys, load_keys
from moeserve.kv_transfer import KvTicket
from moeserve.scheduling.kv_transfer import FetchJob
from radix_cache import BlockCopy

_LAYERS, _HEADS, _BLOCK_BYTES = 30, 3, 16 * 64 * 4  # of the demo: 16 tokens of 64 channels in fp32
_CONNECTS_S = 0.3  # until the fetch has asked
_STEP_S = 0.1  # between two steps


def memory_of(num_blocks: int) -> BlockMemory:
    return [np.ones((_HEADS, num_blocks, _BLOCK_BYTES), np.uint8) for _ in range(2 * _LAYERS)]


class Growing:
    """A prompt of which `count` of all blocks are computed; no step is (`Offered`)."""

    def __init__(self, num_blocks: int) -> None:
        self.count = 0
        self._num_blocks = num_blocks

    def blocks(self, _: str) -> Sequence[int]:
        return range(self.count)

    def is_growing(self, _: str) -> bool:
        return self.count < self._num_blocks

    def coming(self, _: str) -> Coming | None:
        return None

    def is_present(self, _: object) -> bool:
        return False

    def is_last(self, _: object) -> bool:
        return False


def hold(pipe: Connection, key: Path, num_blocks: int) -> None:
    """Hold blocks in a process of its own, as many as the pipe says, which gets the time and the processor time."""
    sockets: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys, prompt = load_keys(key, ""), Growing(num_blocks)
    keeper = Gatekeeper(sockets, keys)
    server = BlockServer(sockets, keys, "tcp://127.0.0.1:*", memory_of(num_blocks))
    server.serve(prompt)
    pipe.send(server.port)
    while (count := pipe.recv()) is not None:
        prompt.count = count
        server.look_again()
        pipe.send((time.monotonic(), time.process_time()))
    server.stop()
    keeper.close()


def fetch(pipe: Connection, fetcher: BlockFetcher, port: int, num_blocks: int, last: int) -> tuple[float, float, float]:
    """Return the seconds from the last step's end to the last block, and the processor time of both ends for it."""

    def grow(count: int) -> tuple[float, float]:
        pipe.send(count)
        found: tuple[float, float] = pipe.recv()
        return found

    grow(0)
    ticket = KvTicket(request_id="t", host="127.0.0.1", port=port)
    fetcher.start(FetchJob(ticket, 0, [BlockCopy(block, b"", "", block, b"") for block in range(num_blocks)]))
    time.sleep(_CONNECTS_S)
    grow(num_blocks - last)
    time.sleep(_STEP_S)
    used = time.process_time()
    began, sent = grow(num_blocks)
    (result,) = fetcher.take(10.0)
    now = time.monotonic()
    if result.failure is not None:
        raise click.ClickException(f"the fetch failed: {result.failure}")
    used = time.process_time() - used
    return now - began, used, grow(num_blocks)[1] - sent


async def first_token(arrangement: Arrangement, prompt: list[int]) -> float:
    """Return the seconds to the first token of an answer."""
    async with httpx2.AsyncClient(timeout=600.0) as http:
        began = time.perf_counter()
        async with aclosing(arrangement.tokens(http, prompt, 2)) as answer:
            return await anext(answer) - began


def show_services(prompts: Sequence[int], rounds: int) -> None:
    """Print the times to first tokens by the length of the prompt."""
    with ExitStack() as ends:
        folder, urls = Path(ends.enter_context(TemporaryDirectory())), list[str]()
        create_keys(folder / "kv.key")
        for number, early in enumerate((False, False, True)):
            config = json.dumps({"key_file": str(folder / "kv.key"), "early": early})
            settings = ("--threads", "1", "--kv-transfer-config", config)
            (folder / str(number)).mkdir()
            http = ends.enter_context(serving(folder / str(number), settings, on_disk=False))
            urls.append(str(http.base_url).rstrip("/"))
        decodes, later, early_one = urls
        ways = [
            Arrangement("one service", decodes),
            Arrangement("after the prompt", decodes, later),
            Arrangement("early", decodes, early_one),
        ]
        draw = Random(1)
        for way in ways:
            asyncio.run(first_token(way, random_tokens(draw, 40)))
        for size in prompts:
            found: dict[str, list[float]] = {way.name: [] for way in ways}
            for number in range(rounds):
                for way in ways[number % 3 :] + ways[: number % 3]:
                    found[way.name].append(asyncio.run(first_token(way, random_tokens(draw, size))))
            shown = ", ".join(f"{name} {1e3 * median(times):.0f} ms" for name, times in found.items())
            click.echo(f"first token of {size} tokens: {shown}")


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--blocks", type=click.IntRange(min=1), multiple=True, default=(1, 16), show_default=True)
@click.option("--prompt", "prompts", type=click.IntRange(min=17), multiple=True, help="Tokens of services' prompts.")
def command(rounds: int, blocks: tuple[int, ...], prompts: tuple[int, ...]) -> None:
    """Print the medians, by the number of blocks of the last step."""
    num_blocks = 32 + max(blocks)
    context = get_context("spawn")
    with TemporaryDirectory() as folder:
        key = Path(folder) / "kv.key"
        create_keys(key)
        here, there = context.Pipe()
        holder = context.Process(target=hold, args=(there, key, num_blocks), daemon=True)
        holder.start()
        port = here.recv()
        sockets: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        fetcher = BlockFetcher(sockets, load_keys(key, ""), memory_of(num_blocks))
        for last in blocks:
            found = [fetch(here, fetcher, port, num_blocks, last) for _ in range(rounds)]
            took, fetched, sent = (1e3 * median(column) for column in zip(*found, strict=True))
            size = last * block_bytes(memory_of(1)) / 1e6
            click.echo(
                f"{last} blocks, {size:.1f} MB: {took:.1f} ms after the last step; "
                f"processor time {sent:.1f} ms where they are sent, {fetched:.1f} where they are fetched"
            )
        here.send(None)
        holder.join()
        fetcher.close()
    if prompts:
        show_services(prompts, rounds)
    click.echo(f"load {getloadavg()[0]:.1f}")


if __name__ == "__main__":
    command()
