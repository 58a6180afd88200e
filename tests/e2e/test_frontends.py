"""Several HTTP processes in front of one engine: each costs its own clients only, and together they are one service."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.kills import shared_memory
from tests.support.service import Service, children_of, descendants, is_alive, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint

SAMPLED = {"prompt": "once upon a time", "temperature": 1.1, "seed": 4, "max_tokens": 300, "ignore_eos": True}
# Its end does not come before a signal that a busy machine sends late.
ENDLESS = {**SAMPLED, "max_tokens": 4000}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("m"))
    settings = ("--num-frontends", "2", "--engine-timeout", "5", "--max-restarts", "1000", "--max-model-len", "4096")
    # With drafts a repeated stream would be over before a process is killed.
    settings += ("--speculative-config", "none")
    # On a busy machine no request is refused for being late.
    settings += ("--slo", "ttft:600s")
    with service(model, tmp_path_factory.mktemp("s"), *settings) as started:
        yield started


class Connection:
    """A connection that one of the HTTP processes has accepted. `comments`, `errors`: in its streams."""

    def __init__(self, running: Service) -> None:
        host, port = running.http.base_url.host, running.http.base_url.port
        self._http = http.client.HTTPConnection(host, port, timeout=60)
        self.comments: set[bytes] = set()
        self.errors: list[str] = []
        self.get("/health")
        self.name = holder(running, self._http.sock.getsockname()[1])

    def get(self, path: str) -> str:
        return self._answer("GET", path, None)

    def post(self, path: str, **body: Any) -> Any:
        return json.loads(self._answer("POST", path, {"model": "m", **body}))

    def delete(self, path: str) -> Any:
        return json.loads(self._answer("DELETE", path, None))

    def stream(self, **body: Any) -> Iterator[str]:
        """Pieces of the text of a completion; raises where the connection is cut."""
        answer = self.begin("/v1/completions", stream=True, **body)
        assert answer.status == 200
        for line in answer:
            if line.startswith(b":"):
                self.comments.add(line.strip())
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    self.errors.append(event["error"]["code"])
                else:
                    yield event["choices"][0]["text"]

    def begin(self, path: str, **body: Any) -> http.client.HTTPResponse:
        """Send a request and return its answer once it has begun."""
        self.send(path, **body)
        return self.answer()

    def send(self, path: str, **body: Any) -> None:
        self._send("POST", path, {"model": "m", **body})

    def ask(self, path: str) -> None:
        self._send("GET", path, None)

    def answer(self) -> http.client.HTTPResponse:
        return self._http.getresponse()

    def close(self) -> None:
        self._http.close()

    def _answer(self, method: str, path: str, body: Any) -> str:
        self._send(method, path, body)
        return self._http.getresponse().read().decode()

    def _send(self, method: str, path: str, body: Any) -> None:
        headers = {"Content-Type": "application/json"}
        self._http.request(method, path, None if body is None else json.dumps(body), headers)


def holder(running: Service, port: int) -> str:
    """Return which child holds the connection whose other end has that port.

    A connection to another service may have the same one.
    """
    own = f":{running.http.base_url.port:04X}"
    inode = next(
        fields[9]
        for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
        if fields[1].endswith(own) and fields[2].endswith(f":{port:04X}") and fields[3] == "01"
    )
    for name, pid in children_of(running.process.pid).items():
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                if os.readlink(link) == f"socket:[{inode}]":
                    return name
    raise AssertionError("no child holds the connection")


def connection_to_each(running: Service) -> dict[str, Connection]:
    """Return a connection to each of two processes, by its name. Others stay open until both have one."""
    found: dict[str, Connection] = {}
    others = []
    while len(found) < 2:
        assert len(others) < 300, "one process accepts everything"
        others.append(Connection(running))
        found.setdefault(others[-1].name, others[-1])
    for connection in others:
        if connection not in found.values():
            connection.close()
    return found


@pytest.fixture
def both(running: Service) -> Iterator[list[Connection]]:
    """A connection to each process, in their order."""
    found = connection_to_each(running)
    yield [found["frontend"], found["frontend 1"]]
    for connection in found.values():
        connection.close()


def metric(connection: Connection, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)", connection.get("/metrics"), re.MULTILINE)
    return float(found[1]) if found else 0.0


def wait_until_whole_again(running: Service) -> None:
    """Wait until both HTTP processes run."""
    wait_until(lambda: len(children_of(running.process.pid)) == 3)


def wait_until_whole(running: Service) -> None:
    """Wait until both HTTP processes run and the engine holds nothing."""
    wait_until_whole_again(running)
    wait_until(lambda: 'moeserve_kv_blocks{state="leased"} 0.0' in running.http.get("/metrics").text)


def test_they_serve_the_same_engine(running: Service, both: list[Connection]) -> None:
    texts = [connection.post("/v1/completions", **SAMPLED)["choices"][0]["text"] for connection in both]
    assert texts[0] == texts[1]
    assert texts[0]
    wait_until(lambda: answered_by(running) == {0, 1})


def answered_by(running: Service) -> set[int]:
    """Return the numbers of the processes that say in the log that they have answered a completion."""
    logged = [json.loads(line) for line in running.errors.read_text().splitlines() if line.startswith("{")]
    return {line["frontend"] for line in logged if line.get("route") == "/v1/completions"}


def test_a_killed_process_costs_its_own_streams_only(running: Service, both: list[Connection]) -> None:
    before = metric(both[0], 'moeserve_http_responses_total{route="/v1/completions",status="200"}')
    undisturbed = "".join(both[0].stream(**SAMPLED))
    pids = children_of(running.process.pid)
    streams = [both[0].stream(**SAMPLED), both[1].stream(**ENDLESS)]
    begun = [next(stream) for stream in streams]
    os.kill(pids["frontend 1"], signal.SIGKILL)
    assert begun[0] + "".join(streams[0]) == undisturbed
    cut = begun[1] + "".join(streams[1])
    assert cut.startswith(undisturbed[: len(cut)])
    assert [connection.errors for connection in both] == [[], ["http_process_ended"]]
    wait_until_whole(running)
    after = children_of(running.process.pid)
    assert after["frontend 1"] != pids["frontend 1"]
    assert {name: after[name] for name in ("worker", "frontend")} == {
        name: pids[name] for name in ("worker", "frontend")
    }
    # Nothing that the dead process had counted is lost.
    name = 'moeserve_http_responses_total{route="/v1/completions",status="200"}'
    wait_until(lambda: metric(both[0], name) == before + 2)


MESSAGES = [{"role": "user", "content": "Describe a pet."}]
# A long stream in each dialect, and the type of the event that ends it when its process does.
STREAMS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({**SAMPLED, "max_tokens": 3500}, "server_unavailable"),
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 3500, "ignore_eos": True}, "server_unavailable"),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 3500, "ignore_eos": True}, "overloaded_error"),
    "/v1/responses": ({"input": "Describe a pet.", "max_output_tokens": 3500, "ignore_eos": True}, "error"),
}


def kind_of_error(event: dict[str, Any]) -> str | None:
    """Return the type of an error event in any dialect, None for another event."""
    if "error" in event and event["error"] is not None:
        return str(event["error"]["type"])
    return "error" if event.get("type") == "error" else None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_of_a_process_that_ends_or_hangs_end_with_one_error_event_in_their_dialect(
    running: Service, number: signal.Signals
) -> None:
    found = {path: connection_to_each(running) for path in STREAMS}
    waiting = connection_to_each(running)
    waiting["frontend"].send("/v1/completions", prompt="x", max_tokens=3900, ignore_eos=True)
    asked = [(path, name) for path in STREAMS for name in ("frontend", "frontend 1")]
    for path, name in asked:
        found[path][name].send(path, stream=True, **STREAMS[path][0])
    streams = {(path, name): found[path][name].answer() for path, name in asked}
    first = {key: answer.readline() for key, answer in streams.items()}
    os.kill(children_of(running.process.pid)["frontend"], number)
    for (path, name), answer in streams.items():
        # A stream that is cut raises here; of one that goes on a part is enough.
        rest = answer.read() if name == "frontend" else b"".join(answer.readline() for _ in range(200))
        lines = (first[path, name] + rest).splitlines()
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
        errors = [kind for kind in map(kind_of_error, events) if kind is not None]
        assert errors == ([STREAMS[path][1]] if name == "frontend" else []), (path, name, lines[-3:])
        assert name != "frontend" or kind_of_error(events[-1]) is not None
    refused = waiting["frontend"].answer()
    assert (refused.status, refused.getheader("retry-after")) == (503, "1")
    assert json.loads(refused.read())["error"]["code"] == "http_process_ended"
    for connection in (connection for both in (*found.values(), waiting) for connection in both.values()):
        connection.close()
    wait_until_whole(running)


def test_a_burst_of_connections_is_shared_evenly(running: Service, both: list[Connection]) -> None:
    host, port = running.http.base_url.host, running.http.base_url.port

    def is_shared_evenly() -> bool:
        with ThreadPoolExecutor(32) as pool:
            clients = list(pool.map(lambda _: socket.create_connection((host, port), timeout=60), range(32)))
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        held = Counter(holder(running, client.getsockname()[1]) for client in clients)
        for client in clients:
            client.close()
        return min(held["frontend"], held["frontend 1"]) >= 12

    # A busy machine lets one of them run alone for a while, and it takes what the other one leaves waiting.
    wait_until(is_shared_evenly)


def test_whichever_is_scraped_tells_of_all(both: list[Connection]) -> None:
    name = 'moeserve_http_responses_total{route="/v1/completions",status="200"}'
    before = metric(both[0], name)
    for connection in both:
        connection.post("/v1/completions", prompt="x", max_tokens=1)
    # An answer is counted after its last byte, one of an earlier test too.
    wait_until(lambda: metric(both[0], name) == metric(both[1], name) >= before + 2)
    count = "moeserve_time_to_first_token_seconds_count"
    wait_until(lambda: metric(both[0], count) == metric(both[1], count) >= 2)


def test_a_conversation_goes_on_in_another_process(both: list[Connection]) -> None:
    first = both[0].post("/v1/responses", input="My name is Ada.", max_output_tokens=5)
    second = both[1].post(
        "/v1/responses", input="And what is it?", previous_response_id=first["id"], max_output_tokens=5
    )
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert json.loads(both[0].get(f"/v1/responses/{second['id']}"))["id"] == second["id"]
    assert both[0].delete(f"/v1/responses/{second['id']}")["deleted"]
    assert json.loads(both[1].get(f"/v1/responses/{second['id']}"))["error"]["code"] == "response_not_found"


def test_what_a_killed_process_has_kept_is_found_by_all(running: Service, both: list[Connection]) -> None:
    made = both[0].post("/v1/conversations", metadata={"topic": "names"})
    first = both[0].post("/v1/responses", input="I am Ada.", max_output_tokens=5, conversation=made["id"])
    os.kill(children_of(running.process.pid)["frontend"], signal.SIGKILL)
    assert json.loads(both[1].get(f"/v1/responses/{first['id']}")) == first
    second = both[1].post("/v1/responses", input="Who?", max_output_tokens=5, previous_response_id=first["id"])
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    items = json.loads(both[1].get(f"/v1/conversations/{made['id']}/items?order=asc"))["data"]
    assert [item["role"] for item in items] == ["user", "assistant"]
    assert items[1] == first["output"][0]
    wait_until_whole(running)


def events_until_cut(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the events of a response, up to an error event or the end of the stream."""
    for line in answer:
        if line.startswith(b"data: {"):
            event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            if event["type"] == "error":
                return
            yield event


def test_a_stream_that_another_process_shows_is_taken_up_again_when_that_one_dies(
    running: Service, both: list[Connection]
) -> None:
    """The owner of the response lives on; the process that shows it to a second client is killed, twice."""
    owner, shower = both
    asked = {"input": "many times", "max_output_tokens": 1200, "ignore_eos": True, "seed": 6}
    own = events_until_cut(owner.begin("/v1/responses", stream=True, background=True, **asked))
    first = next(own)
    path = f"/v1/responses/{first['response']['id']}?stream=true"
    seen: list[dict[str, Any]] = []
    for _ in range(2):
        shower.ask(path + (f"&starting_after={seen[-1]['sequence_number']}" if seen else ""))
        shown = events_until_cut(shower.answer())
        seen += islice(shown, 30)
        os.kill(children_of(running.process.pid)["frontend 1"], signal.SIGKILL)
        seen += shown
        wait_until_whole_again(running)
        shower.close()
        shower = connection_to_each(running)["frontend 1"]
    shower.ask(f"{path}&starting_after={seen[-1]['sequence_number']}")
    seen += events_until_cut(shower.answer())
    assert seen == [first, *own]
    assert seen[-1]["response"]["usage"]["output_tokens"] == 1200
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    shower.close()


def test_what_was_kept_outlives_the_service(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "m")
    store, folders = tmp_path / "kept" / "store", [tmp_path / name for name in ("s1", "s2")]
    for folder in folders:
        folder.mkdir()
    settings = ("--response-store", str(store))
    with service(model, folders[0], *settings) as first:
        body = {"model": "m", "input": "Hi", "max_output_tokens": 5}
        kept = first.http.post("/v1/responses", json=body).json()
        first.process.kill()
    with service(model, folders[1], *settings) as second:
        assert second.http.get(f"/v1/responses/{kept['id']}").json() == kept


def test_requests_of_both_go_on_after_a_crash_of_the_engine(running: Service, both: list[Connection]) -> None:
    streams = [connection.stream(**ENDLESS) for connection in both]
    texts = [next(stream) for stream in streams]
    [engine] = descendants(children_of(running.process.pid)["worker"])
    os.kill(engine, signal.SIGKILL)
    for place, (connection, stream) in enumerate(zip(both, streams, strict=True)):
        texts[place] += next(text for text in accumulate(stream) if b": resumed" in connection.comments)
        texts[place] += "".join(islice(stream, 50))
    assert [connection.errors for connection in both] == [[], []]
    for connection in both:
        connection.close()
    again = Connection(running)
    undisturbed = next(text for text in accumulate(again.stream(**ENDLESS)) if len(text) >= max(map(len, texts)))
    again.close()
    assert all(undisturbed.startswith(text) for text in texts)
    found = connection_to_each(running)
    restarts = [metric(connection, "moeserve_engine_restarts_total") for connection in found.values()]
    assert restarts[0] == restarts[1] >= 1
    for connection in found.values():
        connection.close()
    wait_until_whole(running)


def test_a_hung_process_is_killed_and_costs_its_own_streams_only(running: Service, both: list[Connection]) -> None:
    undisturbed = "".join(both[1].stream(**SAMPLED))
    pid = children_of(running.process.pid)["frontend"]
    streams = [connection.stream(**(ENDLESS if index == 0 else SAMPLED)) for index, connection in enumerate(both)]
    begun = [next(stream) for stream in streams]
    os.kill(pid, signal.SIGSTOP)
    # Nobody waits for the one that hangs to accept: the other takes new connections.
    assert Connection(running).name == "frontend 1"
    assert begun[1] + "".join(streams[1]) == undisturbed
    assert "".join(streams[0]) is not None
    assert [connection.errors for connection in both] == [["http_process_ended"], []]
    wait_until(lambda: not is_alive(pid))
    wait_until_whole(running)
    assert "HTTP process 0 hung (no heartbeat for 5 s) and was ended" in running.errors.read_text()


@pytest.mark.long
def test_a_drain_lets_the_streams_of_both_finish(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("m"))
    with service(model, tmp_path_factory.mktemp("s"), "--num-frontends", "2") as started:
        found = connection_to_each(started)
        streams = [connection.stream(**{**SAMPLED, "max_tokens": 1500}) for connection in found.values()]
        begun = [next(stream) for stream in streams]
        started.process.send_signal(signal.SIGTERM)
        texts = [text + "".join(stream) for text, stream in zip(begun, streams, strict=True)]
        assert texts[0] == texts[1]
        assert len(texts[0]) > 1000
        assert started.end() == 0
        assert started.leaves_nothing()


def test_nothing_is_left_of_a_killed_supervisor(tmp_path: Path) -> None:
    with service(write_tiny_checkpoint(tmp_path / "m"), tmp_path, "--num-frontends", "2") as started:
        everyone = descendants(started.process.pid)
        assert len(everyone) >= 6
        shared = shared_memory(everyone)
        started.process.kill()
        files = started.run_root
        wait_until(lambda: not any(is_alive(pid) for pid in everyone) and not list(files.iterdir()))
        assert not any(map(os.path.exists, shared))
