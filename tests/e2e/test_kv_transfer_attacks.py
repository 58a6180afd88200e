"""Prefill and decode apart among rogues and faults: each case ends in computing, with the bits of one service.

No request hangs, no block stays leased or held, and a later transfer goes as ever.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from moeserve.engine.curve import create_keys
from moeserve.engine.kv.transfer.messages import BLOCK, NONE, pack_number
from tests.support.kv_pair import (
    Pair,
    alone,
    bits,
    cached,
    clear,
    completion,
    config_of,
    config_of_key,
    post,
    prefill,
    start,
    start_pair,
)
from tests.support.rogue_peers import Forger, HoldsKey, Message, Stranger, connections
from tests.support.service import Service, children_of, descendants, wait_until

NUM_TOKENS, HELD = 200, 192
# The beginning of a greeting of ZeroMQ's protocol, and one that ends before its mechanism is named.
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
SETTINGS = ("--max-model-len", "20000", "--engine-timeout", "60")


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("pair")
        # A lease that nobody could end is over soon.
        yield start_pair(stack, model, folder, *SETTINGS, *config_of(folder, lease_seconds=20))


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """The pair, which is found in order after each test."""
    yield shared
    check_order(shared)


def check_order(pair: Pair) -> None:
    """Both services hold nothing, and hand a prompt over."""
    for running in (pair.prefills, pair.decodes):
        wait_until(lambda running=running: is_at_rest(running))
        clear(running)
        wait_until(lambda running=running: running.figure('moeserve_kv_blocks{state="cached"}') == 0)
    body = completion(prompt_of(999))
    answer = post(pair.decodes, body | {"kv_transfer_params": prefill(pair.prefills, body)})
    assert cached(answer) == HELD
    clear(pair.prefills, pair.decodes)


def is_at_rest(running: Service) -> bool:
    names = ('moeserve_kv_blocks{state="leased"}', "moeserve_kv_transfer_held_blocks", *WAITS)
    return not any(running.figure(name) for name in names)


WAITS = ("moeserve_requests_running", "moeserve_requests_waiting")


def prompt_of(number: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    return [3 + number % 50, 3 + number // 50, *(3 + (number + i * 7) % 50 for i in range(num_tokens - 2))]


def reasons(running: Service, **headers: str) -> Counter[str]:
    """Return the failed transfers by reason; which of two times was over first depends on the machine."""
    pattern = r'^moeserve_kv_transfer_failed_total\{reason="(\w+)"\} (\S+)'
    text = running.http.get("/metrics", headers=headers).text
    found = re.findall(pattern, text, re.MULTILINE)
    counts = Counter[str]()
    for reason, count in found:
        counts["late" if reason in ("silent", "timeout") else reason] += int(float(count))
    return counts


def engine_of(running: Service) -> int:
    return next(iter(descendants(children_of(running.process.pid)["worker"])))


def forger_of(pair: Pair) -> Forger:
    """Return who forges tickets like a true one, which is used up."""
    body = completion(prompt_of(500))
    true = prefill(pair.prefills, body)
    post(pair.decodes, body | {"kv_transfer_params": true})
    return Forger(pair.folder / "kv.key", true)


def block(number: bytes, content: bytes) -> Callable[[bytes], list[Message]]:
    return lambda ticket: [[BLOCK, ticket, number, content]]


ZERO = pack_number(0)
NONSENSE: dict[str, tuple[Callable[[bytes], list[Message]], str]] = {
    "none": (lambda ticket: [[NONE, ticket]], "lease"),
    "another word": (lambda ticket: [[b"HELLO", ticket]], "lease"),
    "no word": (lambda _: [[]], "lease"),
    "a block without bytes": (lambda ticket: [[BLOCK, ticket]], "damaged"),
    "a block that is too short": (block(ZERO, b"x"), "damaged"),
    "a block that was not asked for": (block(pack_number(5), bytes(4096)), "damaged"),
    "no number": (block(b"x", bytes(4096)), "damaged"),
    "a huge block": (block(ZERO, bytes(2**26)), "gone"),
    "nothing": (lambda _: [], "late"),
}
STRANGERS_SAY = {
    "nothing, and closes": (b"", True, "gone"),
    "nothing": (b"", False, "late"),
    "half a signature": (SIGNATURE[:5], False, "late"),
    "half a greeting": (SIGNATURE + b"\x03", False, "late"),
    "a greeting without a key": (SIGNATURE + b"\x03\x01NULL" + bytes(48), False, "gone"),
    "another protocol": (b"HTTP/1.1 200 OK\r\n\r\n", False, "gone"),
}


def test_whatever_a_peer_answers_the_prompt_is_computed(pair: Pair) -> None:
    key = pair.folder / "kv.key"
    forger = forger_of(pair)
    with ExitStack() as stack:
        cases: list[tuple[int, str]] = []
        for messages, reason in NONSENSE.values():
            peer = HoldsKey(key, messages)
            stack.callback(peer.close)
            cases.append((peer.port, reason))
        for said, closes, reason in STRANGERS_SAY.values():
            stranger = Stranger(said, closes=closes)
            stack.callback(stranger.close)
            cases.append((stranger.port, reason))
        cases.append((1, "gone"))
        prompts = [prompt_of(number) for number in range(len(cases))]
        expected = [bits(alone(pair.decodes, completion(prompt))) for prompt in prompts]
        before = reasons(pair.decodes)
        bodies = [
            completion(prompt, kv_transfer_params=forger.ticket(prompt, port))
            for prompt, (port, _) in zip(prompts, cases, strict=True)
        ]
        with ThreadPoolExecutor(len(cases)) as pool:
            answers = list(pool.map(lambda body: post(pair.decodes, body), bodies))
        assert [bits(answer) for answer in answers] == expected
        assert [cached(answer) for answer in answers] == [0] * len(cases)
        wait_until(lambda: reasons(pair.decodes) - before == Counter(reason for _, reason in cases))


def test_tickets_for_a_silent_host_do_not_hold_up_those_of_others(pair: Pair) -> None:
    forger = forger_of(pair)
    silent = Stranger(b"")
    try:
        prompts = [prompt_of(number) for number in range(100)]
        expected = [bits(alone(pair.decodes, completion(prompt))) for prompt in prompts[:3]]
        bodies = [completion(one, kv_transfer_params=forger.ticket(one, silent.port), max_tokens=12) for one in prompts]
        before = reasons(pair.decodes)
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: post(pair.decodes, body), bodies))
        assert [bits(answer) for answer in answers[:3]] == expected
        # The host is known to be silent now.
        wait_until(lambda: reasons(pair.decodes) - before == Counter({"late": 100}))
        before, fetched = reasons(pair.decodes), pair.decodes.figure("moeserve_kv_transfer_tokens_total")
        clear(pair.decodes)
        good = [prompt_of(number) for number in range(600, 608)]
        params = [prefill(pair.prefills, completion(prompt)) for prompt in good]
        bodies += [completion(one, kv_transfer_params=ticket) for one, ticket in zip(good, params, strict=True)]
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: post(pair.decodes, body), bodies))
        assert [cached(answer) for answer in answers[-8:]] == [HELD] * 8
        wait_until(lambda: reasons(pair.decodes) - before == Counter({"late": 100}))
        assert pair.decodes.figure("moeserve_kv_transfer_tokens_total") == fetched + 8 * HELD
    finally:
        silent.close()


def send(running: Service, body: dict[str, Any]) -> socket.socket:
    """Send a request; return the connection over which its answer will come."""
    url, content = running.http.base_url, json.dumps(body).encode()
    connection = socket.create_connection((url.host, url.port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall(f"{head}\r\n\r\n".encode() + content)
    return connection


def test_clients_that_leave_at_any_stage_leave_no_block_behind(pair: Pair) -> None:
    # While the blocks are waited for: the other service stands still.
    body = completion(prompt_of(1))
    params = prefill(pair.prefills, body)
    os.kill(engine_of(pair.prefills), signal.SIGSTOP)
    try:
        leaver = send(pair.decodes, body | {"kv_transfer_params": params})
        wait_until(lambda: pair.decodes.figure("moeserve_requests_waiting") == 1)
        leaver.close()
        wait_until(lambda: is_at_rest(pair.decodes))
    finally:
        os.kill(engine_of(pair.prefills), signal.SIGCONT)
    wait_until(lambda: pair.prefills.figure("moeserve_kv_transfer_held_blocks") == 0)
    # While the answer is computed.
    body = completion(prompt_of(2), max_tokens=15000)
    leaver = send(pair.decodes, body | {"kv_transfer_params": prefill(pair.prefills, completion(prompt_of(2)))})
    wait_until(lambda: pair.decodes.figure("moeserve_requests_running") == 1)
    leaver.close()
    wait_until(lambda: is_at_rest(pair.decodes))
    # While the prompt is computed for the other service: no ticket is made.
    made = pair.prefills.figure("moeserve_kv_transfer_offers_total")
    leaver = send(pair.prefills, completion(prompt_of(3, 19000), kv_transfer_params={"do_remote_decode": True}))
    wait_until(lambda: pair.prefills.figure("moeserve_requests_running") == 1)
    left = pair.prefills.figure("moeserve_client_disconnects_total")
    # It stands still until it has been told, however late a busy machine notices that the client has left.
    os.kill(engine_of(pair.prefills), signal.SIGSTOP)
    try:
        leaver.close()
        wait_until(lambda: pair.prefills.figure("moeserve_client_disconnects_total") == left + 1)
    finally:
        os.kill(engine_of(pair.prefills), signal.SIGCONT)
    wait_until(lambda: is_at_rest(pair.prefills))
    assert pair.prefills.figure("moeserve_kv_transfer_offers_total") == made


def test_a_service_that_stands_still_amid_several_choices_leaves_all_of_them_to_be_computed(pair: Pair) -> None:
    body = completion(prompt_of(4), n=3, seed=7, temperature=1.0)
    expected = alone(pair.decodes, body)["choices"]
    params = prefill(pair.prefills, completion(prompt_of(4)))
    before = reasons(pair.decodes)
    os.kill(engine_of(pair.prefills), signal.SIGSTOP)
    try:
        assert post(pair.decodes, body | {"kv_transfer_params": params})["choices"] == expected
    finally:
        os.kill(engine_of(pair.prefills), signal.SIGCONT)
    wait_until(lambda: reasons(pair.decodes) - before == Counter({"late": 1}))


def test_a_prompt_of_15000_tokens_is_handed_over_to_several_choices(pair: Pair) -> None:
    prompt = prompt_of(5, 15000)
    body = completion(prompt, n=2, seed=3)
    expected = alone(pair.decodes, body)["choices"]
    params = prefill(pair.prefills, completion(prompt))
    answer = post(pair.decodes, body | {"kv_transfer_params": params})
    assert (answer["choices"], cached(answer)) == (expected, 14992)


def test_a_ticket_serves_another_key_with_its_own_prefixes_alone(model: Path, tmp_path: Path, pair: Pair) -> None:
    (tmp_path / "keys").write_text("user:key-a\nuser:key-b\nadmin:root\n")
    os.chmod(tmp_path / "keys", 0o600)
    with ExitStack() as stack:
        keyed = start(stack, model, tmp_path / "k", *pair.settings, *SETTINGS, "--api-key-file", str(tmp_path / "keys"))

        def ask(key: str, **fields: Any) -> dict[str, Any]:
            headers = {"Authorization": f"Bearer {key}"}
            answer = keyed.http.post("/v1/completions", json=completion(prompt_of(6), **fields), headers=headers)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        made = pair.prefills.figure("moeserve_kv_transfer_offers_total")
        params = prefill(pair.prefills, completion(prompt_of(6)))
        fetched = ask("key-a", kv_transfer_params=params)
        assert cached(fetched) == HELD
        wait_until(lambda: pair.prefills.figure("moeserve_kv_transfer_offers_total") == made + 1)
        wait_until(lambda: pair.prefills.figure("moeserve_kv_transfer_held_blocks") == 0)
        # What one key fetched is not there for another one, whose ticket is used up.
        found = ask("key-b", kv_transfer_params=params)
        assert (bits(found), cached(found)) == (bits(fetched), 0)
        wait_until(lambda: reasons(keyed, authorization="Bearer root") == Counter({"lease": 1}))


def test_two_engines_that_are_killed_at_once_leave_the_prompt_to_be_computed(
    model: Path, tmp_path: Path, pair: Pair
) -> None:
    body = completion(prompt_of(7))
    expected = bits(alone(pair.decodes, body))
    with ExitStack() as stack:
        first, second = (start(stack, model, tmp_path / name, *pair.settings, *SETTINGS) for name in "pd")
        params = prefill(first, body)
        os.kill(engine_of(first), signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, second, body | {"kv_transfer_params": params})
            wait_until(lambda: second.figure("moeserve_requests_waiting") == 1)
            # The other way around, the second engine may count the failure before it dies, and its count dies with it.
            for running in (second, first):
                os.kill(engine_of(running), signal.SIGKILL)
            assert bits(answer.result()) == expected
        wait_until(lambda: reasons(second).total() == 1)
        wait_until(lambda: is_at_rest(second))
        check_order(Pair(first, second, pair.folder))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without room, where one may be made."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_lost_lease_and_a_full_disk_at_once_leave_the_prompt_to_be_computed(
    model: Path, tmp_path: Path, pair: Pair, full_disk: Path
) -> None:
    body = completion(prompt_of(10))
    expected = bits(alone(pair.decodes, body))
    with ExitStack() as stack:
        first = start(stack, model, tmp_path / "p", *config_of(pair.folder, lease_seconds=0.1), *SETTINGS)
        second = start(stack, model, tmp_path / "d", *pair.settings, *SETTINGS, "--kv-disk-path", str(full_disk / "kv"))
        with (full_disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(4096))
        params = prefill(first, body)
        wait_until(lambda: first.figure("moeserve_kv_transfer_expired_total") == 1)
        answer = post(second, body | {"kv_transfer_params": params})
        assert (bits(answer), cached(answer)) == (expected, 0)
        wait_until(lambda: reasons(second) == Counter({"lease": 1}))
        # The prompt is in memory, though no block of it could be written.
        assert cached(post(second, body)) == HELD


def test_a_rotated_key_leaves_prompts_to_be_computed(model: Path, tmp_path: Path, pair: Pair) -> None:
    body = completion(prompt_of(8))
    expected = bits(alone(pair.decodes, body))
    create_keys(tmp_path / "new.key")
    forger = forger_of(pair)
    with ExitStack() as stack:
        rotated = start(stack, model, tmp_path / "r", *config_of_key(tmp_path / "new.key"), *SETTINGS)
        new = prefill(rotated, body)
        before = reasons(pair.decodes)
        # A ticket of the new key, and one of the old key at a port where the new one is asked for.
        for params in (new, forger.ticket(prompt_of(8), new["remote_port"])):
            answer = post(pair.decodes, body | {"kv_transfer_params": params})
            assert (bits(answer), cached(answer)) == (expected, 0)
            clear(pair.decodes)
        wait_until(lambda: reasons(pair.decodes) - before == Counter({"foreign": 1, "gone": 1}))


def test_strangers_at_the_port_and_odd_requests_of_holders_of_the_key_hold_nobody_up(pair: Pair) -> None:
    import zmq

    from moeserve.engine.curve import load_keys
    from moeserve.engine.kv.transfer.messages import FREE, GET

    body = completion(prompt_of(9))
    expected = bits(alone(pair.decodes, body))
    params = prefill(pair.prefills, body)
    ticket = params["remote_request_id"].encode()
    keys, context = load_keys(pair.folder / "kv.key", ""), zmq.Context[Any]()
    with context.socket(zmq.DEALER) as odd, connections(params["remote_port"], 200, SIGNATURE + b"\x03"):
        keys.secure_client(odd)
        odd.setsockopt(zmq.LINGER, 0)
        odd.connect(f"tcp://127.0.0.1:{params['remote_port']}")
        most, minus = struct.pack("<I", 2**32 - 1), struct.pack("<i", -1)
        for message in (
            [b""],
            [GET],
            [b"", GET],
            [b"", GET, ticket],
            [b"", GET, ticket, b"x", b"y"],
            [b"", GET, ticket, most, most],
            [b"", GET, ticket, minus, ZERO],
            [b"", GET, b"\xff\xfe", ZERO, ZERO],
            [b"", FREE],
            [b"", FREE, b"another"],
            [b"", FREE, b"x", b"y"],
            [b"", b"SING", ticket],
        ):
            odd.send_multipart(message)
        for _ in range(100):
            odd.send_multipart([b"", GET, ticket, ZERO, pack_number(8)])
        answer = post(pair.decodes, body | {"kv_transfer_params": params})
        assert (bits(answer), cached(answer)) == (expected, HELD)
        odd.send_multipart([b"", GET, bytes(10_000)])
    context.term()
