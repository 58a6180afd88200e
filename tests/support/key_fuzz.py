"""A client with the role `user` that does to a service whatever its key allows: `python -m tests.support.key_fuzz`.

Its actors draw one act after another by a seed: requests to every route with bodies of any shape, and acts that were
dear before, such as references to large kept items, files of millions of lines, slow readers and writers, storms of
cancellations. It prints how many answers of each status it got.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.poison_corpus import Poison, poisons
from moeserve.frontend.routes.table import ROUTES

ACTORS = 48
PATIENCE_S = 20.0
_LARGE_TEXT = "x" * 240_000
_USER_ROUTES = [route for route in ROUTES if route.role in ("user", "public") and not route.is_file]
_LINE = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{"model":"m","prompt":"a","max_tokens":1}}\n'


@dataclass
class Client:
    """Sends requests of one key; knows some ids of the things that it keeps, by their prefix."""

    port: int
    key: str
    draw: Random
    statuses: Counter[int] = field(default_factory=Counter)
    known: dict[str, deque[str]] = field(default_factory=dict)
    corpus: list[Poison] = field(default_factory=lambda: list(poisons(300_000)))

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        content: str = "application/json",
        headers: str = "",
        read: int = -1,
        stay_s: float = 0.0,
        sent: float = 1.0,
    ) -> bytes:
        """Return the answer's body, as far as it was read; note ids in it.

        read: bytes of the answer to read before the client stands still for `stay_s` and leaves. sent: the part of the
        body that is sent; then the client stands still.
        """
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.key}\r\nconnection: close\r\n"
            f"content-type: {content}\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        )
        try:
            async with asyncio.timeout(PATIENCE_S + stay_s):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)
                try:
                    writer.write(head.encode() + body[: int(len(body) * sent)])
                    with suppress(ConnectionError):
                        await writer.drain()
                    if sent < 1.0:
                        await asyncio.sleep(stay_s)
                        return b""
                    line = await reader.readline()
                    if line:
                        self.statuses[int(line.split()[1])] += 1
                    while (await reader.readline()).strip():
                        pass
                    if read >= 0:
                        await reader.read(read)
                        await asyncio.sleep(stay_s)
                        return b""
                    answer = await reader.read()
                finally:
                    writer.transport.abort()
        except (TimeoutError, OSError, ValueError, IndexError):
            self.statuses[0] += 1
            return b""
        self._note(answer)
        return answer

    async def json(self, method: str, path: str, body: Any, **options: Any) -> Any:
        """Return the JSON of an answer, {} for none."""
        answer = await self.ask(method, path, json.dumps(body).encode(), **options)
        try:
            return json.loads(answer)
        except ValueError:
            return {}

    def any_of(self, prefix: str) -> str:
        """Return an id of something kept, or one that was never given."""
        found = self.known.get(prefix)
        if not found or self.draw.random() < 0.1:
            return prefix + f"{self.draw.getrandbits(96):024x}"
        return self.draw.choice(found)

    def _note(self, answer: bytes) -> None:
        start = answer.find(b'"id":"')
        name = answer[start + 6 : answer.find(b'"', start + 6)].decode("ascii", "replace") if start >= 0 else ""
        for prefix in ("resp_", "conv_", "file-", "batch_", "msg_"):
            if name.startswith(prefix):
                self.known.setdefault(prefix, deque(maxlen=200)).append(name)


Act = Callable[[Client], Awaitable[Any]]


async def any_route(client: Client) -> None:
    """Ask any route with a body that is its example with fields changed, or anything."""
    draw = client.draw
    route = draw.choice(_USER_ROUTES)
    path = route.path
    for prefix, name in (("resp_", "{name}"), ("conv_", "{name}"), ("file-", "{name}"), ("batch_", "{name}")):
        path = path.replace(prefix + name, client.any_of(prefix))
    path = path.replace("{item}", client.any_of("msg_")).replace("{name:path}", "m")
    queries = (
        "limit=100",
        "limit=10000",
        "order=asc",
        f"after={client.any_of('msg_')}",
        "stream=true",
        "a=" + "b" * 500,
    )
    path += "?" + "&".join(draw.sample(queries, draw.randrange(3)))
    body = b""
    if route.method == "POST":
        content = {"model": "m", **(route.example or {})}
        for _ in range(draw.randrange(4)):
            content[draw.choice([*content, "metadata", "store", "n", "stream", "background", "x"])] = any_value(draw)
        body = json.dumps(content).encode()
    await client.ask(route.method, path, body, stay_s=0.1, read=draw.choice((-1, -1, -1, 10)))


def any_value(draw: Random, depth: int = 0) -> Any:
    kind = draw.randrange(8 if depth < 3 else 5)
    match kind:
        case 0:
            return draw.choice((None, True, False, 0, -1, 2**53 + 1, 1e308))
        case 1 | 2:
            return draw.choice(("", "x", "\u0000", "\ud83c\udf89")) * draw.choice((1, 10, 10_000))
        case 3:
            return [0] * draw.choice((0, 1, 100_000))
        case 4:
            return {str(number): "v" for number in range(draw.choice((0, 17, 20_000)))}
        case 5 | 6:
            return [any_value(draw, depth + 1) for _ in range(draw.randrange(4))]
        case _:
            return {draw.choice("abc"): any_value(draw, depth + 1) for _ in range(draw.randrange(4))}


async def dear_body(client: Client) -> None:
    poison = client.draw.choice(client.corpus)
    await client.ask("POST", poison.path, poison.body)


async def large_items(client: Client) -> None:
    """Keep items of 240 KB, and name as many of them as there may be."""
    items = [{"id": f"msg_{client.draw.randrange(900)}", "role": "user", "content": _LARGE_TEXT} for _ in range(15)]
    await client.json("POST", "/v1/conversations", {"items": items})
    named = [{"type": "item_reference", "id": f"msg_{number}"} for number in range(900)]
    await asyncio.gather(*(client.json("POST", "/v1/responses", {"model": "m", "input": named}) for _ in range(4)))


async def made_up_ids(client: Client) -> None:
    """Keep a response with much in it that no prompt shows, and name items of it that there are not."""
    sealed = {"type": "reasoning", "encrypted_content": "x" * 3_900_000}
    asked = {"model": "m", "input": [sealed, {"role": "user", "content": "a"}], "max_output_tokens": 1}
    made = await client.json("POST", "/v1/responses", asked)
    digits = str(made.get("id", "resp_")).removeprefix("resp_")
    named = [{"type": "item_reference", "id": f"msg_{digits}{number}"} for number in range(4096)]
    await asyncio.gather(*(client.json("POST", "/v1/responses", {"model": "m", "input": named}) for _ in range(6)))
    more = {"model": "m", "input": "b", "previous_response_id": made.get("id"), "max_output_tokens": 1}
    await asyncio.gather(*(client.json("POST", "/v1/responses", more) for _ in range(4)))


async def upload(client: Client, content: bytes, **options: Any) -> str:
    form = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + content + b"\r\n--b--\r\n"
    )
    answer = await client.ask("POST", "/v1/files", form, content="multipart/form-data; boundary=b", **options)
    with suppress(ValueError):
        return str(json.loads(answer).get("id", "file-"))
    return "file-"


async def batch_of_rubbish(client: Client) -> None:
    unit = client.draw.choice((b"0\n", b"{}\n", b"\n", b"[" * 1000 + b"\n", b'"' + b"x" * 999_990 + b'"\n'))
    file_id = await upload(client, unit * (8_000_000 // len(unit)))
    await start_batch(client, file_id)


async def batch_of_many(client: Client) -> None:
    file_id = await upload(client, b"".join(_LINE % number for number in range(50_000)))
    await start_batch(client, file_id)


async def start_batch(client: Client, file_id: str) -> None:
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    asked["metadata"] = {f"{number:064d}": "v" * 512 for number in range(16)}  # type: ignore[assignment]
    made = await client.json("POST", "/v1/batches", asked)
    await client.ask("GET", "/v1/batches?limit=100")
    if client.draw.random() < 0.5:
        await client.ask("POST", f"/v1/batches/{made.get('id', 'batch_')}/cancel")


async def slow_downloads(client: Client) -> None:
    """Ask 40 times for something large, and do not read it."""
    paths = (
        f"/v1/files/{client.any_of('file-')}/content",
        f"/v1/responses/{client.any_of('resp_')}",
        f"/v1/responses/{client.any_of('resp_')}/input_items?limit=100",
        f"/v1/conversations/{client.any_of('conv_')}/items?limit=100",
    )
    path = client.draw.choice(paths)
    await asyncio.gather(*(client.ask("GET", path, read=1000, stay_s=5.0) for _ in range(40)))


async def slow_uploads(client: Client) -> None:
    body = b'{"model": "m", "prompt": "' + b"x" * 3_900_000
    calls = [client.ask("POST", "/v1/completions", body, sent=0.9, stay_s=4.0) for _ in range(20)]
    await asyncio.gather(*calls, upload(client, b"0\n" * 4_000_000, sent=0.9, stay_s=4.0))


async def conversations(client: Client) -> None:
    metadata = {f"{number:064d}": "v" * 512 for number in range(16)}
    for _ in range(20):
        made = await client.json("POST", "/v1/conversations", {"metadata": metadata, "items": None})
        path = f"/v1/conversations/{made.get('id', 'conv_')}/items"
        await client.json("POST", path, {"items": [{"role": "user", "content": ""}] * 20})
        await client.ask("GET", path + "?limit=100")


async def cancel_storm(client: Client) -> None:
    asked = {
        "model": "m",
        "input": "a" * client.draw.choice((1, 60_000)),
        "background": True,
        "max_output_tokens": 2000,
    }
    made = await asyncio.gather(*(client.json("POST", "/v1/responses", asked) for _ in range(20)))
    names = [one.get("id", "resp_") for one in made]
    polls = [client.ask("GET", f"/v1/responses/{name}?stream=true", read=100, stay_s=1.0) for name in names]
    await asyncio.gather(*polls, *(client.ask("GET", f"/v1/responses/{name}") for name in names * 3))
    await asyncio.gather(*(client.ask("POST", f"/v1/responses/{name}/cancel") for name in names))


async def keyed_requests(client: Client) -> None:
    asked = {"model": "m", "prompt": "a" * 1000, "max_tokens": 50}
    for _ in range(10):
        header = f"idempotency-key: {client.draw.randrange(50)}\r\n"
        await client.json("POST", "/v1/completions", asked, headers=header)


async def long_answers(client: Client) -> None:
    asked = {"model": "m", "prompt": "a", "n": 8, "logprobs": 20, "max_tokens": 3000, "ignore_eos": True}
    stream = client.draw.random() < 0.5
    await client.json("POST", "/v1/completions", {**asked, "stream": stream}, read=client.draw.choice((-1, 10)))


async def salts(client: Client) -> None:
    for _ in range(20):
        asked = {"model": "m", "prompt": "a" * 100, "max_tokens": 1, "cache_salt": str(client.draw.getrandbits(64))}
        await client.json("POST", "/v1/completions", asked)
        await client.ask("GET", "/v1/cache?limit=1000")


ACTS: tuple[Act, ...] = (
    any_route,
    any_route,
    any_route,
    dear_body,
    large_items,
    made_up_ids,
    batch_of_rubbish,
    batch_of_many,
    slow_downloads,
    slow_uploads,
    conversations,
    cancel_storm,
    keyed_requests,
    long_answers,
    salts,
)


async def fuzz(port: int, key: str, seconds: float, seed: int, acts: tuple[Act, ...] = ACTS) -> Counter[int]:
    """Let the actors act for some seconds. Return the number of answers by status; 0 counts those that did not come."""
    client = Client(port, key, Random(seed))
    counts: Counter[str] = Counter()

    async def act() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    chosen = client.draw.choice(acts)
                    counts[chosen.__name__] += 1
                    await chosen(client)

    await asyncio.gather(*(act() for _ in range(ACTORS)))
    print(dict(counts), file=sys.stderr)
    return client.statuses


if __name__ == "__main__":
    _, port, key, seconds, seed, *names = sys.argv
    chosen = tuple(act for act in ACTS if not names or act.__name__ in names)
    print(json.dumps(asyncio.run(fuzz(int(port), key, float(seconds), int(seed), chosen))))
