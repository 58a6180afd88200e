"""Routers of others, unchanged and each in an environment of its own, over two services: `make test-routers`."""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import pytest
import zmq

from tests.clients.environments import Client
from tests.support.reconnecting import NUM_TOKENS, Repeated, Underway, body_of
from tests.support.reconnecting import prompt_of as prompt_of_stream
from tests.support.routers import address, cached, free_port, program, start, transfer_settings
from tests.support.service import Service, is_alive, wait_until

ROUTER = Client("vllm-router", "vllm-router", "pip", ("vllm-router==0.1.17",), "")
INDEXER = Client(
    "dynamo-indexer",
    "dynamo.indexer",
    "pip",
    ("pydantic", "uvloop", "zstandard", "numpy"),
    "",
    no_deps=("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),
)
# vLLM's own proxy of two services is in no package: its file comes from a checkout of vLLM.
TOY_PROXY = Client("toy-proxy", "vLLM's toy proxy", "pip", ("fastapi==0.165.0", "uvicorn==0.54.0", "httpx==0.28.1"), "")
TOY_PROXY_FILE = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
# It installs packages, so only `make test-routers` runs it.
pytestmark = pytest.mark.long

_FREE = "tcp://127.0.0.1:0"
_PUBLISHES = {"enable_kv_cache_events": True, "endpoint": _FREE, "replay_endpoint": _FREE}
EVENTS = ("--kv-events-config", json.dumps(_PUBLISHES))
NUM_PROMPTS = 24
PREFIX = 96  # tokens, in whole blocks


def prompt_of(number: int, tail: int = 0) -> list[int]:
    """Return a prompt of one of 2,000 prefixes."""
    prefix = [3 + number // 50, *(3 + (number * 11 + i * (7 + number)) % 50 for i in range(PREFIX - 1))]
    return prefix + [5 + (tail + i) % 40 for i in range(8)]


def ask(http: httpx2.Client, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def bits(answer: dict[str, Any]) -> array[float]:
    """Return the log probabilities in 32 bits: the router reads decimals of 64 without rounding them to the nearest."""
    return array("f", answer["choices"][0]["logprobs"]["token_logprobs"])


def check_handed_over(router: httpx2.Client, prefills: Service, decodes: Service) -> None:
    """Four prompts have been handed over and are held no more; so is that of a streamed chat."""
    wait_until(lambda: decodes.figure("moeserve_kv_transfer_tokens_total") == 4 * PREFIX)
    wait_until(lambda: prefills.figure("moeserve_kv_transfer_held_blocks") == 0)
    messages = [{"role": "user", "content": "tell me of whales " * 8}]
    chat = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0, "stream": True}
    assert "[DONE]" in router.post("/v1/chat/completions", json=chat).text
    wait_until(lambda: decodes.figure("moeserve_kv_transfer_tokens_total") > 4 * PREFIX)


def test_vllm_router_has_one_service_compute_prompts_for_another(model: Path, tmp_path: Path) -> None:
    settings = transfer_settings(tmp_path)
    with ExitStack() as stack:
        prefills, decodes = (start(stack, model, tmp_path / name, *settings) for name in ("p", "d"))
        command = ("vllm-router", "--vllm-pd-disaggregation", "--host", "127.0.0.1", "--port", "{port}")
        workers = ("--prefill", address(prefills), "--decode", address(decodes))
        router = stack.enter_context(program(ROUTER, tmp_path, *command, *workers, path="/health"))
        for number in range(4):
            alone = bits(ask(prefills.http, prompt_of(number), cache_salt="alone"))
            answer = ask(router, prompt_of(number))
            # The router replaces the cached tokens in `usage` by the count of the service that computed the prompt.
            assert bits(answer) == alone
        check_handed_over(router, prefills, decodes)


def test_the_toy_proxy_of_vllm_has_one_service_compute_prompts_for_another(model: Path, tmp_path: Path) -> None:
    checkout = os.environ.get("VLLM_CHECKOUT")
    if checkout is None:
        pytest.skip(f"no package has vLLM's toy proxy: let VLLM_CHECKOUT name a checkout, with its {TOY_PROXY_FILE}")
    settings = transfer_settings(tmp_path)
    with ExitStack() as stack:
        prefills, decodes = (start(stack, model, tmp_path / name, *settings) for name in ("p", "d"))
        command = ("python", str(Path(checkout).absolute() / TOY_PROXY_FILE), "--port", "{port}")
        prefill, decode = (str(one.http.base_url.port) for one in (prefills, decodes))
        hosts = ("--prefiller-host", "127.0.0.1", "--decoder-host", "127.0.0.1")
        command = (*command, *hosts, "--prefiller-port", prefill, "--decoder-port", decode)
        proxy = stack.enter_context(program(TOY_PROXY, tmp_path, *command, path="/healthcheck"))
        for number in range(4):
            alone = ask(prefills.http, prompt_of(number), cache_salt="alone")
            answer = ask(proxy, prompt_of(number))
            assert answer["choices"] == alone["choices"]
            assert cached(answer) == PREFIX
        check_handed_over(proxy, prefills, decodes)


def replicas(stack: ExitStack, model: Path, folder: Path) -> list[Service]:
    """Start two services that publish what they cache."""
    return [start(stack, model, folder / name, *EVENTS) for name in ("a", "b")]


def watched(stack: ExitStack, model: Path, folder: Path, services: list[Service], *flags: str) -> httpx2.Client:
    """Return a client of vllm-router, which looks after these services every second."""
    command = ("vllm-router", "--policy", "kv_aware", "--host", "127.0.0.1", "--port", "{port}")
    flags = ("--health-check-interval-secs", "1", "--worker-urls", *map(address, services), *flags)
    return stack.enter_context(program(ROUTER, folder, *command, *flags, path="/health"))


def fixed_ports(port: int, events: int, replays: int) -> tuple[str, ...]:
    """Return the settings of a replica at these ports."""
    publishes = {"endpoint": f"tcp://127.0.0.1:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replays}"}
    config = json.dumps(_PUBLISHES | publishes)
    return ("--port", str(port), "--kv-events-config", config, "--response-store", "memory")


def test_a_restarted_replica_of_four_is_found_again(model: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        # The router asks for sources once: a replica comes again at the ports that it had.
        settings = [fixed_ports(free_port(), free_port(), free_port()) for _ in range(4)]
        all_four = [start(stack, model, tmp_path / f"{number}", *one) for number, one in enumerate(settings)]
        router = watched(stack, model, tmp_path, all_four)
        for number in range(NUM_PROMPTS):
            ask(all_four[number % 4].http, prompt_of(number))
        wait_until(lambda: cached(ask(router, prompt_of(NUM_PROMPTS - 1, 1))) == PREFIX)
        assert [cached(ask(router, prompt_of(number, 2))) for number in range(NUM_PROMPTS)] == [PREFIX] * NUM_PROMPTS
        all_four[0].process.kill()
        all_four[0].process.wait()
        for number in range(NUM_PROMPTS):
            ask(router, prompt_of(number, 3))  # the router asks another one where the first does not answer
        again = start(stack, model, tmp_path / "again", *settings[0])
        numbers = count(NUM_PROMPTS)

        def finds_new_one() -> bool:
            """Return whether a prompt that only the restarted service has reaches it."""
            number = next(numbers)
            ask(again.http, prompt_of(number))
            return cached(ask(router, prompt_of(number, 4))) == PREFIX

        wait_until(finds_new_one)
        known = [next(numbers) for _ in range(12)]
        for number in known:
            ask(again.http, prompt_of(number))
        wait_until(finds_new_one)  # events are in order: the router knows of these then
        assert [cached(ask(router, prompt_of(number, 5))) for number in known] == [PREFIX] * 12


def test_streams_behind_vllm_router_survive_their_replica(model: Path, tmp_path: Path) -> None:
    shared = ("--response-store", str(tmp_path / "store"), "--kv-disk-path", str(tmp_path / "kv"))
    underway = Underway(16)
    with ExitStack() as stack:
        both = [start(stack, model, tmp_path / name, *EVENTS, *shared) for name in ("a", "b")]
        router = watched(stack, model, tmp_path, both)
        clients = [Repeated([str(router.base_url)], number, underway.note) for number in range(16)]
        with ThreadPoolExecutor(16) as pool:
            running = [pool.submit(client.run) for client in clients]
            assert underway.event.wait(60)
            busiest = max(both, key=lambda one: one.http.get("/v1/loads").json()["loads"][0]["num_running_reqs"])
            busiest.process.kill()
            for each in running:
                each.result(130)
        survivor = next(one for one in both if one is not busiest)
        assert any(client.broken for client in clients)
        for number, client in enumerate(clients):
            text = "".join(client.pieces)
            assert client.tokens == NUM_TOKENS
            # An answer that died with its service begins anew.
            assert len(client.ids) <= (2 if client.broken else 1)
            assert text.startswith("".join(client.broken))
            body = body_of(number, prompt=prompt_of_stream(number), max_tokens=NUM_TOKENS)
            assert survivor.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text


def source_of(running: Service) -> dict[str, str]:
    found: dict[str, str] = running.http.get("/kv_event_sources").json()["0"]
    return found


def named_sources(services: list[Service], endpoints: list[str] | None = None) -> list[str]:
    """Return the flags that name the sources of events, which the router finds by itself without them.

    endpoints: where events come from instead of the services themselves.
    """
    flags = ["--kv-event-model", "m"]
    for number, one in enumerate(services):
        source = source_of(one)
        flags += ["--kv-event-source", f"{address(one)}={endpoints[number] if endpoints else source['endpoint']}"]
        flags += ["--kv-event-replay-source", f"{address(one)}={source['replay_endpoint']}"]
    return flags


@pytest.mark.parametrize("finds", [False, True], ids=["named", "found"])
def test_vllm_router_sends_prompts_to_the_replica_that_has_them(model: Path, tmp_path: Path, finds: bool) -> None:
    with ExitStack() as stack:
        both = replicas(stack, model, tmp_path)
        flags = ["--worker-urls", *map(address, both), *([] if finds else named_sources(both))]
        command = ("vllm-router", "--policy", "kv_aware", "--host", "127.0.0.1", "--port", "{port}", *flags)
        router = stack.enter_context(program(ROUTER, tmp_path, *command, path="/health"))
        for number in range(NUM_PROMPTS):
            ask(both[number % 2].http, prompt_of(number))
        # The router follows in its own time: one more prompt tells that it has got so far.
        wait_until(lambda: cached(ask(router, prompt_of(NUM_PROMPTS - 1, 1))) == PREFIX)
        found = [cached(ask(router, prompt_of(number, 2))) for number in range(NUM_PROMPTS)]
        assert found == [PREFIX] * NUM_PROMPTS
        # A block that one of them has dropped is looked for in the other one.
        assert both[0].http.delete("/v1/cache").status_code == 200
        for number in range(0, NUM_PROMPTS, 2):
            ask(both[1].http, prompt_of(number))
        wait_until(lambda: cached(ask(router, prompt_of(NUM_PROMPTS - 2, 3))) == PREFIX)
        found = [cached(ask(router, prompt_of(number, 4))) for number in range(NUM_PROMPTS)]
        assert found == [PREFIX] * NUM_PROMPTS


def test_the_indexer_of_dynamo_finds_what_each_replica_has(model: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        both = replicas(stack, model, tmp_path)
        command = ("python", "-m", "dynamo.indexer", "--port", "{port}")
        indexer = stack.enter_context(program(INDEXER, tmp_path, *command, path="/workers"))
        for number, one in enumerate(both, 1):
            source = source_of(one)
            told = {"instance_id": number, "model_name": "m", "block_size": 16, "dp_rank": 0}
            told |= {name: source[name] for name in ("endpoint", "replay_endpoint")}
            assert indexer.post("/register", json=told).status_code == 201
        for number in range(NUM_PROMPTS):
            ask(both[number % 2].http, prompt_of(number))

        def held(number: int) -> dict[str, int]:
            body = {"model_name": "m", "token_ids": prompt_of(number)}
            scores = indexer.post("/query", json=body).json()["scores"]
            return {instance: tokens["0"] for instance, tokens in scores.items() if tokens.get("0")}

        expected = [{str(1 + number % 2): PREFIX} for number in range(NUM_PROMPTS)]
        wait_until(lambda: [held(number) for number in range(NUM_PROMPTS)] == expected)
        assert both[0].http.delete("/v1/cache").status_code == 200
        expected = [each if "2" in each else {} for each in expected]
        wait_until(lambda: [held(number) for number in range(NUM_PROMPTS)] == expected)


# The tiny model's KV takes 4 KiB per block of 16 tokens.
BLOCK_BYTES = 4096


def peek(running: Service, prompt: list[int]) -> int:
    """Return the tokens of a prompt that a service has cached, and compute nothing."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "cache_hit_threshold": 1}
    return cached(running.http.post("/v1/completions", json=body).raise_for_status().json())


def kill(running: Service) -> None:
    """End a service whose ports are wanted again."""
    running.process.kill()
    running.process.wait()
    wait_until(lambda: not any(map(is_alive, running.pids.values())))


def test_the_indexer_of_dynamo_agrees_with_each_tree_whatever_happens_to_it(model: Path, tmp_path: Path) -> None:
    draw = Random(1)
    memory = ("--kv-cache-memory", str(40 * BLOCK_BYTES), "--max-model-len", "256")
    settings = [(*fixed_ports(free_port(), free_port(), free_port()), *memory) for _ in range(2)]
    talks = [[3 + number, *(draw.randrange(3, 50) for _ in range(40))] for number in range(8)]
    with ExitStack() as stack:
        both = [start(stack, model, tmp_path / f"{number}", *one) for number, one in enumerate(settings)]
        command = ("python", "-m", "dynamo.indexer", "--port", "{port}")
        indexer = stack.enter_context(program(INDEXER, tmp_path, *command, path="/workers"))

        for number, one in enumerate(both):
            source = source_of(one)
            told = {"instance_id": number, "model_name": "m", "block_size": 16, "dp_rank": 0}
            told |= {name: source[name] for name in ("endpoint", "replay_endpoint")}
            assert indexer.post("/register", json=told).status_code == 201

        def agrees(prompt: list[int]) -> bool:
            scores = indexer.post("/query", json={"model_name": "m", "token_ids": prompt}).json()["scores"]
            held = [scores.get(str(number), {}).get("0", 0) for number in range(2)]
            return held == [peek(one, [*prompt, 3]) for one in both]

        for act in range(160):
            number, kind, talk = draw.randrange(2), draw.random(), draw.choice(talks)
            if kind < 0.03:
                kill(both[number])
                both[number] = start(stack, model, tmp_path / f"{number} {act}", *settings[number])
            elif kind < 0.06:
                assert both[number].http.delete("/v1/cache").status_code == 200
            else:
                talk += [draw.randrange(3, 50) for _ in range(draw.randrange(30))]
                del talk[draw.randrange(40, 200) :]
                ask(both[number].http, talk, max_tokens=draw.randrange(1, 20))
            if act % 8 == 7:
                for prompt in talks:
                    wait_until(lambda prompt=prompt: agrees(prompt))


@contextmanager
def lossy(endpoint: str) -> Iterator[str]:
    """Pass events on from a source, but every third; yield the address."""
    context = zmq.Context[zmq.Socket[bytes]]()
    inlet, outlet = context.socket(zmq.SUB), context.socket(zmq.PUB)
    inlet.connect(endpoint)
    inlet.subscribe(b"")
    port = outlet.bind_to_random_port("tcp://127.0.0.1")

    def pass_on() -> None:
        with suppress(zmq.ContextTerminated), inlet, outlet:
            for number in count():
                frames = inlet.recv_multipart()
                if number % 3 < 2:
                    outlet.send_multipart(frames)

    thread = threading.Thread(target=pass_on)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        context.term()
        thread.join()


def talk_all(first: int, alone: Service, router: httpx2.Client, replicas: list[Service]) -> list[list[int]]:
    """Have ten conversations, three at a time, with one service and behind a router; compare the cached tokens."""
    draw, found, wanted, known, reached = Random(first), 0, 0, 0, 0
    talks = [[3 + number % 40, 3 + number // 40] for number in range(first, first + 10)]
    turns = [0] * len(talks)
    while any(turn < 5 for turn in turns):
        chosen = draw.choice([number for number, turn in enumerate(turns) if turn < 5][:3])
        turns[chosen] += 1
        talk = talks[chosen]
        talk += [draw.randrange(3, 50) for _ in range(48)]
        longest = max(peek(one, talk) for one in replicas)
        wanted += cached(ask(alone.http, talk))
        got = cached(ask(router, talk))
        found += got
        if longest:
            known, reached = known + 1, reached + (got == longest)
    assert found >= 0.95 * wanted
    assert reached >= 0.99 * known
    return talks


@pytest.mark.parametrize("number", [2, 4])
def test_replicas_find_what_one_with_all_the_memory_finds_after_evictions_a_restart_and_lost_events(
    model: Path, tmp_path: Path, number: int
) -> None:
    def memory(share: int) -> tuple[str, ...]:
        return ("--kv-cache-memory", str(240 // share * BLOCK_BYTES), "--max-model-len", "320")

    settings = [(*fixed_ports(free_port(), free_port(), free_port()), *memory(number)) for _ in range(number)]
    with ExitStack() as stack:
        alone = start(stack, model, tmp_path / "alone", *memory(1))
        replicas = [start(stack, model, tmp_path / f"{at}", *one) for at, one in enumerate(settings)]
        endpoints = [stack.enter_context(lossy(source_of(one)["endpoint"])) for one in replicas]
        router = watched(stack, model, tmp_path, replicas, *named_sources(replicas, endpoints))
        talks = talk_all(0, alone, router, replicas)
        talk_all(10, alone, router, replicas)
        # Some had to make room.
        assert any(max(peek(one, talk) for one in replicas) < len(talk) - 16 for talk in talks)
        kill(replicas[0])
        replicas[0] = start(stack, model, tmp_path / "again", *settings[0])
        wait_until(lambda: all(each["is_healthy"] for each in router.get("/workers").json()["workers"]))
        talk_all(20, alone, router, replicas)
