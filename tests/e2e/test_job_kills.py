"""Deaths under answers that outlive their connection: nothing of an answer is lost, nothing comes twice."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count, product
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from tests.support.service import Service, children_of, service, wait_until

SETTINGS = ("--num-frontends", "2", "--engine-timeout", "4", "--max-restarts", "1000", "--max-model-len", "4096")
ASKED = {"input": "once upon a time", "temperature": 1.2, "max_output_tokens": 250, "background": True}
BIASED = {"extra_body": {"seed": 5, "ignore_eos": True}}


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(model, tmp_path_factory.mktemp("s"), *SETTINGS) as started:
        yield started


def client_of(running: Service) -> OpenAI:
    # A connection for each request, so that any process may get it.
    http = httpx2.Client(limits=httpx2.Limits(max_keepalive_connections=0), timeout=60)
    return OpenAI(base_url=f"{running.http.base_url}/v1", api_key="none", max_retries=0, http_client=http)


def patiently(ask: Any) -> Any:
    """Return the result of a request that processes which end, or do not have it, may refuse."""
    until = time.monotonic() + 60
    while True:
        try:
            return ask()
        except (openai.APIConnectionError, openai.ConflictError, openai.InternalServerError, httpx2.HTTPError):
            assert time.monotonic() < until
            time.sleep(0.05)  # another process's state can only be polled


def taken_up(running: Service, client: OpenAI, kills: int, targets: tuple[str, ...], seed: int) -> list[Any]:
    """Return the events of a response in the background, taken up wherever the stream broke, while processes die."""
    draw = random.Random(seed)
    response_id = patiently(lambda: client.responses.create(model="m", **ASKED, **BIASED)).id
    seen: list[Any] = []
    until = time.monotonic() + 100
    at = sorted(draw.randrange(2, 200) for _ in range(kills))
    while not seen or seen[-1].type not in ("response.completed", "response.incomplete", "response.failed"):
        assert time.monotonic() < until
        after = {} if not seen else {"starting_after": seen[-1].sequence_number}
        stream = patiently(lambda after=after: client.responses.retrieve(response_id, stream=True, **after))
        with suppress(openai.APIError, httpx2.HTTPError):
            for event in stream:
                if event.type == "error":
                    break
                seen.append(event)
                if at and len(seen) >= at[0]:
                    at.pop(0)
                    strike(running, draw.choice(targets))
    assert patiently(lambda: client.responses.retrieve(response_id)) == seen[-1].response
    return seen


def strike(running: Service, target: str) -> None:
    children = children_of(running.process.pid)
    if (pid := children.get(target)) is not None:
        if target == "worker":
            below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            pid = int(below[0]) if below else pid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(running: Service) -> str:
    with client_of(running) as client:
        made = client.responses.create(model="m", **{**ASKED, "background": False}, **BIASED)
    assert made.usage.output_tokens == 250
    return str(made.output_text)


CASES = [
    pytest.param(targets, seed, id=f"{name}-{seed}", marks=() if seed == 0 else pytest.mark.long)
    for (name, targets), seed in product(
        {
            "frontends": ("frontend", "frontend 1"),
            "engine": ("worker",),
            "both": ("worker", "frontend", "frontend 1"),
        }.items(),
        range(6),
    )
]


@pytest.mark.parametrize(("targets", "seed"), CASES)
def test_a_stream_is_taken_up_over_deaths(
    running: Service, undisturbed: str, targets: tuple[str, ...], seed: int
) -> None:
    with client_of(running) as client:
        seen = taken_up(running, client, 3, targets, seed)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == undisturbed
    assert seen[-1].response.usage.output_tokens == 250
    wait_until(lambda: len(children_of(running.process.pid)) == 3, timeout=60)


def test_a_repeated_request_is_answered_once_over_a_death(running: Service, undisturbed: str) -> None:
    body = {"model": "m", **{**ASKED, "background": False, "store": True}}
    with client_of(running) as client:

        def ask() -> Any:
            return client.responses.create(**body, **BIASED, extra_headers={"Idempotency-Key": "over a death"})

        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(patiently, ask) for _ in range(3)]
            strike(running, "frontend")
            answers = [future.result(90) for future in asked]
    assert len({answer.id for answer in answers}) == 1
    assert {answer.output_text for answer in answers} == {undisturbed}
    wait_until(lambda: len(children_of(running.process.pid)) == 3, timeout=60)


def test_a_restarted_service_goes_on(model: Path, tmp_path: Path, undisturbed: str) -> None:
    """The whole service is killed amid a response; the next one with the same store completes it."""
    store = ("--response-store", str(tmp_path / "store"))
    with service(model, tmp_path / "a", *SETTINGS, *store) as first, client_of(first) as client:
        stream = client.responses.create(model="m", stream=True, **ASKED, **BIASED)
        seen = [next(stream) for _ in range(20)]
    with service(model, tmp_path / "b", *SETTINGS, *store) as second, client_of(second) as client:
        rest = client.responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number)
        seen += list(rest)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].response.output_text == undisturbed


LINES = {str(number): {"prompt": f"{number} upon a time", "max_tokens": 60, "ignore_eos": True} for number in range(24)}


def batch_file(requests: dict[str, dict[str, Any]] = LINES) -> bytes:
    lines = (
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "temperature": 0, **body},
        }
        for name, body in requests.items()
    )
    return "\n".join(map(json.dumps, lines)).encode()


def begun_batch(client: OpenAI, requests: dict[str, dict[str, Any]] = LINES) -> str:
    file = patiently(lambda: client.files.create(file=("in.jsonl", batch_file(requests)), purpose="batch"))
    make = client.batches.create
    batch = patiently(lambda: make(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"))
    return str(batch.id)


def texts_of(client: OpenAI, batch_id: str, requests: dict[str, dict[str, Any]] = LINES) -> dict[str, str]:
    """Wait for the end of a batch; return the texts of its answers."""
    bodies = bodies_of(client, batch_id, requests)
    return {name: body["choices"][0]["text"] for name, body in bodies.items()}


def bodies_of(client: OpenAI, batch_id: str, requests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Wait for the end of a batch; return its answers."""
    wait_until(lambda: patiently(lambda: client.batches.retrieve(batch_id)).status == "completed", timeout=100)
    batch = patiently(lambda: client.batches.retrieve(batch_id))
    assert (batch.request_counts.completed, batch.error_file_id) == (len(requests), None)
    lines = [
        json.loads(line) for line in patiently(lambda: client.files.content(batch.output_file_id)).text.splitlines()
    ]
    assert sorted(line["custom_id"] for line in lines) == sorted(requests)
    return {line["custom_id"]: line["response"]["body"] for line in lines}


def num_answered(client: OpenAI, batch_id: str) -> int:
    return int(patiently(lambda: client.batches.retrieve(batch_id)).request_counts.completed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_a_batch_is_answered_once_over_deaths(running: Service, model: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    with client_of(running) as client:
        undisturbed = texts_of(client, begun_batch(client))
        batch_id = begun_batch(client)
        for at in sorted(draw.sample(range(1, 20), 3)):
            wait_until(lambda at=at: num_answered(client, batch_id) >= at, timeout=60)
            for target in draw.choice((("worker",), ("frontend", "frontend 1"), ("worker", "frontend"))):
                strike(running, target)
            assert num_answered(client, batch_id) >= at
        assert texts_of(client, batch_id) == undisturbed
    wait_until(lambda: len(children_of(running.process.pid)) == 3, timeout=60)
    if seed:
        return
    store = ("--response-store", str(tmp_path / "store"))
    with service(model, tmp_path / "a", *SETTINGS, *store) as first, client_of(first) as client:
        batch_id = begun_batch(client)
        wait_until(lambda: num_answered(client, batch_id) >= 4)
        num_kept = num_answered(client, batch_id)
    with service(model, tmp_path / "b", *SETTINGS, *store) as second, client_of(second) as client:
        assert texts_of(client, batch_id) == undisturbed
        # The answers that there were are not computed again.
        metrics = second.http.get("/metrics").text
        drawn = re.search(r"^moeserve_generation_tokens_total (\S+)", metrics, re.MULTILINE)
        assert drawn is not None
        assert float(drawn[1]) <= 60 * (len(LINES) - num_kept)


def long_lines(attempt: int) -> dict[str, dict[str, Any]]:
    """Lines that no earlier attempt has asked."""
    body = {"max_tokens": 800, "ignore_eos": True}
    return {str(number): {"prompt": f"{attempt} {number} times", **body} for number in range(3)}


@pytest.mark.parametrize(
    "targets", [("worker",), ("frontend", "frontend 1"), ("worker", "frontend", "frontend 1")], ids=len
)
def test_a_line_that_runs_is_answered_once_when_processes_die(running: Service, targets: tuple[str, ...]) -> None:
    """It goes on where it was in the next engine, and begins anew in the next HTTP process."""

    def num_drawn() -> float:
        return running.figure("moeserve_generation_tokens_total")

    with client_of(running) as client:
        bodies: dict[str, Any] = {}
        # On a busy machine signals may come when a line is answered.
        for attempt in count():
            lines = long_lines(attempt)
            before = patiently(num_drawn)
            batch_id = begun_batch(client, lines)
            wait_until(lambda before=before: patiently(num_drawn) > before + 60)
            for target in targets:
                strike(running, target)
            bodies = bodies_of(client, batch_id, lines)
            if targets != ("worker",) or all("resumed" in body["usage"] for body in bodies.values()):
                break
        assert {body["usage"]["completion_tokens"] for body in bodies.values()} == {800}
        # The undisturbed comes last: drafts give known texts in so few steps that a kill may come too late.
        undisturbed = texts_of(client, begun_batch(client, lines), lines)
        assert {name: body["choices"][0]["text"] for name, body in bodies.items()} == undisturbed
    wait_until(lambda: len(children_of(running.process.pid)) == 3, timeout=60)


@contextmanager
def no_room(running: Service, store: Path) -> Iterator[None]:
    """Let HTTP processes write nothing more into the store, as on a full disk."""
    most = store.with_name(store.name + "-wal").stat().st_size
    children = children_of(running.process.pid)
    pids = [pid for name, pid in children.items() if name.startswith("frontend")]
    assert len(pids) == 2
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def fill(client: OpenAI) -> None:
    """Write into the store until that fails, at the end of some page. A process that ends or starts may fail too."""
    for _ in range(500):
        try:
            client.responses.create(model="m", input="x" * 2000, max_output_tokens=1, background=True)
        except openai.APIConnectionError:
            continue
        except openai.InternalServerError as error:
            if "store" in str(error):
                raise


@pytest.mark.parametrize("target", [None, "worker", "frontend"])
def test_what_is_kept_waits_for_room_and_everything_else_goes_on(
    model: Path, tmp_path: Path, undisturbed: str, target: str | None
) -> None:
    store = tmp_path / "store"
    with (
        service(model, tmp_path / "a", *SETTINGS, "--response-store", str(store)) as running,
        client_of(running) as client,
    ):
        kept = client.responses.create(model="m", input="kept", max_output_tokens=5)
        stream = client.responses.create(model="m", stream=True, **ASKED, **BIASED)
        seen = [next(stream) for _ in range(20)]
        with no_room(running, store):
            if target is not None:
                strike(running, target)
            with pytest.raises(openai.InternalServerError, match="store"):
                fill(client)
            said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            answer = patiently(lambda: client.chat.completions.create(model="m", **said, **BIASED))
            assert answer.usage.completion_tokens == 3
            assert patiently(lambda: client.responses.retrieve(kept.id)).output_text == kept.output_text
        stream.close()
        rest = patiently(
            lambda: list(
                client.responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number)
            )
        )
        seen += rest
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert seen[-1].response.output_text == undisturbed


def repeated_until_whole(
    running: Service, client: OpenAI, body: dict[str, Any], key: str, kills: list[tuple[int, str]]
) -> tuple[str, str]:
    """Repeat a streamed chat by its key until a stream is whole; return its id and text. kills: (after so many pieces,
    target)."""
    ask, headers, until = client.chat.completions.create, {"Idempotency-Key": key}, time.monotonic() + 100
    while True:
        assert time.monotonic() < until
        stream = patiently(lambda: ask(**body, stream=True, extra_headers=headers))
        pieces: list[str] = []
        with suppress(openai.APIError, httpx2.HTTPError):
            for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")
                if chunk.choices[0].finish_reason is not None:
                    return chunk.id, "".join(pieces)
                if kills and len(pieces) >= kills[0][0]:
                    strike(running, kills.pop(0)[1])


@pytest.mark.parametrize(("targets", "seed"), CASES)
def test_a_repeated_chat_is_one_answer_over_deaths(running: Service, targets: tuple[str, ...], seed: int) -> None:
    draw = random.Random(f"{targets} {seed}")
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 250, "temperature": 1.2}
    body |= {"seed": draw.randrange(10**6), "extra_body": {"ignore_eos": True}}
    kills = [(at, draw.choice(targets)) for at in sorted(draw.sample(range(1, 150), 2))]
    key = f"{targets} {seed}"
    with client_of(running) as client, ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(repeated_until_whole, running, client, body, key, kills if not n else []) for n in range(3)
        ]
        answers = {future.result() for future in asked}
        assert len(answers) == 1
        plain = patiently(lambda: client.chat.completions.create(**body))
        assert answers.pop()[1] == plain.choices[0].message.content
    wait_until(lambda: len(children_of(running.process.pid)) == 3, timeout=60)
