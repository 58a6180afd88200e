"""Two services that share a response store and KV on disk: streams go on in one when the other one is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.parameters import first
from tests.support.reconnecting import NUM_TOKENS, Repeated, TakenUp, Underway, body_of, events_of, prompt_of
from tests.support.service import Service, children_of, descendants, service, wait_until

NUM_STREAMS = 16
SETTINGS = ("--engine-timeout", "20", "--max-model-len", "4096", "--max-num-seqs", "32")


@pytest.fixture
def replicas(model: Path, tmp_path: Path) -> Iterator[list[Service]]:
    shared = ("--response-store", str(tmp_path / "store"), "--kv-disk-path", str(tmp_path / "kv"))
    with ExitStack() as stack:
        found = []
        for name in ("a", "b"):
            found.append(stack.enter_context(service(model, tmp_path / name, *SETTINGS, *shared)))
        yield found


def kill_all(running: Service) -> None:
    """End every process of a service at once, as the loss of a container does."""
    found = [running.process.pid, *descendants(running.process.pid)]
    for pid in found:
        with suppress(ProcessLookupError):  # the first one's death may have ended others
            os.kill(pid, signal.SIGKILL)


def kill_supervisor(running: Service) -> None:
    os.kill(running.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("kill", first(1, [kill_all, kill_supervisor]))
def test_streams_of_a_killed_replica_go_on_in_the_other_one(
    replicas: list[Service], kill: Callable[[Service], None]
) -> None:
    victim, survivor = replicas
    # Of the victim's streams there is KV on disk when it is killed.
    for number in range(0, NUM_STREAMS // 2, 2):
        prompt = body_of(number, prompt=prompt_of(number), max_tokens=1)
        assert victim.http.post("/v1/completions", json=prompt).status_code == 200
    blocks = NUM_STREAMS // 4 * (len(prompt_of(0)) // 16)
    wait_until(lambda: victim.figure('moeserve_kv_tier_blocks{tier="disk"}') >= blocks)
    # Those of the victim that are streamed to clients: they are to be under way when it is killed.
    underway = Underway(NUM_STREAMS // 4)
    half = range(NUM_STREAMS // 2)
    addresses = [str(replica.http.base_url) for replica in replicas]
    clients = [Repeated(addresses, number, underway.note if number % 2 == 0 else lambda _: None) for number in half]
    backgrounds = [TakenUp(addresses, number, lambda _: None) for number in half]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(one.run) for one in (*clients, *backgrounds)]
        assert underway.event.wait(60)
        kill(victim)
        for each in running:
            each.result(130)
    assert any(client.broken for client in clients)
    # It has found the victim's blocks; whether it reads them or computes sooner is a matter of speed.
    found = ('moeserve_kv_tier_hit_tokens_total{tier="disk"}', "moeserve_kv_disk_slower_total")
    wait_until(lambda: any(survivor.figure(name) > 0 for name in found))
    for number, client in enumerate(clients):
        text = "".join(client.pieces)
        assert client.tokens == NUM_TOKENS
        assert len(client.ids) <= (2 if client.broken else 1)
        assert text.startswith("".join(client.broken))
        body = body_of(number, prompt=prompt_of(number), max_tokens=NUM_TOKENS)
        assert survivor.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
    for background in backgrounds:
        seen = background.seen
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        text = "".join(event["delta"] for event in seen if event["type"] == "response.output_text.delta")
        whole = seen[-1]["response"]
        assert (whole["output"][0]["content"][0]["text"], whole["usage"]["output_tokens"]) == (text, NUM_TOKENS)
        assert survivor.http.get(f"/v1/responses/{whole['id']}").json() == whole


def test_a_request_is_refused_by_another_replica_while_it_runs_and_then_answered_alike(
    replicas: list[Service],
) -> None:
    key = {"Idempotency-Key": "one"}
    body = body_of(0, prompt=prompt_of(0), max_tokens=NUM_TOKENS, stream=True)
    events = events_of(str(replicas[0].http.base_url), "/v1/completions", body, key)
    first = [next(events)]
    refused = replicas[1].http.post("/v1/completions", json=body, headers=key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_key_in_use")
    first += events
    for replica in replicas:
        assert list(events_of(str(replica.http.base_url), "/v1/completions", body, key)) == first
    other = replicas[1].http.post("/v1/completions", json=body | {"seed": 1}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


def test_a_service_of_another_kind_may_not_share_the_store(
    replicas: list[Service], model: Path, tmp_path: Path
) -> None:
    settings = ("--response-store", str(tmp_path / "store"), "--tool-call-parser", "none")
    with service(model, tmp_path / "c", *settings, ready=False) as refused:
        assert refused.end() == 1
        assert "Another service uses the response store" in refused.errors.read_text()
    wait_until(lambda: len(children_of(replicas[0].process.pid)) == 2)
