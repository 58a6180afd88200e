"""Prefill and decode apart: one service computes a prompt, another one fetches its KV and answers, with the same bits.

The proxy is the test: it sends what vLLM's toy proxy sends, and passes on what it gets unread.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moeserve.engine.ranks.meeting import create_keys
from tests.support.service import Service, children_of, descendants, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint

PROMPT = [3 + i * 7 % 50 for i in range(200)]
HELD = 192  # tokens in whole blocks without the last token
ASKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass
class Pair:
    """A service that computes prompts, one that decodes, and the settings of both."""

    prefills: Service
    decodes: Service
    settings: tuple[str, ...]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("m"))


def config_of(folder: Path, **fields: Any) -> tuple[str, str]:
    key = folder / "kv.key"
    if not key.exists():
        create_keys(key)
    return "--kv-transfer-config", json.dumps({"key_file": str(key), **fields})


def start(stack: ExitStack, model: Path, folder: Path, *settings: str) -> Service:
    folder.mkdir()
    return stack.enter_context(service(model, folder, *settings))


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    settings = config_of(folder)
    with ExitStack() as stack:
        yield Pair(*(start(stack, model, folder / name, *settings) for name in ("p", "d")), settings)


def completion(prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    return body | fields


def post(running: Service, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    answer = running.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def prefill(running: Service, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    """Have a prompt computed as vLLM's toy proxy does; return the parameters for the other service."""
    asked = {name: value for name, value in body.items() if name not in ("stream_options", "min_tokens")}
    asked |= {"kv_transfer_params": ASKS, "stream": False, "max_tokens": 1}
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
        del asked["max_tokens"]
    params: dict[str, Any] = post(running, asked, path)["kv_transfer_params"]
    return params


def bits(answer: dict[str, Any]) -> list[float]:
    found: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def figure(running: Service, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)", running.http.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def failures(running: Service, reason: str) -> float:
    return figure(running, f'moeserve_kv_transfer_failed_total{{reason="{reason}"}}')


def wait_for_failures(running: Service, reason: str, count: float) -> None:
    wait_until(lambda: failures(running, reason) == count)


def clear(*services: Service) -> None:
    for running in services:
        assert running.http.delete("/v1/cache").status_code == 200


def alone(running: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of one service that has nothing cached."""
    clear(running)
    answer = post(running, body)
    clear(running)
    return answer


def test_a_prompt_of_one_service_is_decoded_by_another_with_the_same_bits(pair: Pair) -> None:
    body = completion(PROMPT)
    expected = bits(alone(pair.decodes, body))
    fetched = figure(pair.decodes, "moeserve_kv_transfer_tokens_total")
    params = prefill(pair.prefills, body)
    assert (params["do_remote_prefill"], params["remote_num_tokens"]) == (True, HELD)
    answer = post(pair.decodes, body | {"kv_transfer_params": params})
    assert (bits(answer), cached(answer)) == (expected, HELD)
    # The lease has ended, and the blocks stay cached in both.
    wait_until(lambda: figure(pair.decodes, "moeserve_kv_transfer_tokens_total") == fetched + HELD)
    wait_until(lambda: figure(pair.prefills, "moeserve_kv_transfer_held_blocks") == 0)
    assert cached(post(pair.decodes, body)) == HELD
    clear(pair.prefills, pair.decodes)


def test_chats_are_handed_over_streamed_with_several_choices_and_with_a_grammar(pair: Pair) -> None:
    messages = [{"role": "user", "content": "tell me of whales and of the sea " * 6}]
    body = {"model": "m", "messages": messages, "max_completion_tokens": 8, "temperature": 0, "seed": 4}
    fetched = figure(pair.decodes, "moeserve_kv_transfer_tokens_total")
    extra: dict[str, Any]
    for extra in ({}, {"n": 2}, {"response_format": {"type": "json_object"}}):
        clear(pair.prefills, pair.decodes)
        expected = post(pair.decodes, body | extra, "/v1/chat/completions")["choices"]
        clear(pair.decodes)
        params = prefill(pair.prefills, body | {name: extra[name] for name in extra if name != "n"}, CHAT)
        answer = post(pair.decodes, body | extra | {"kv_transfer_params": params}, CHAT)
        assert answer["choices"] == expected
        assert cached(answer) == params["remote_num_tokens"]
        fetched += params["remote_num_tokens"]
    clear(pair.decodes)
    params = prefill(pair.prefills, body, CHAT)
    asked = body | {"kv_transfer_params": params, "stream": True, "stream_options": {"include_usage": True}}
    text = pair.decodes.http.post(CHAT, json=asked).text
    assert f'"cached_tokens":{params["remote_num_tokens"]}' in text
    fetched += params["remote_num_tokens"]
    wait_until(lambda: figure(pair.decodes, "moeserve_kv_transfer_tokens_total") == fetched)
    clear(pair.prefills, pair.decodes)


CHAT = "/v1/chat/completions"


def test_what_is_cached_already_is_not_fetched_and_the_lease_ends(pair: Pair) -> None:
    body = completion(PROMPT)
    post(pair.decodes, body)
    fetched = figure(pair.decodes, "moeserve_kv_transfer_tokens_total")
    params = prefill(pair.prefills, body)
    assert cached(post(pair.decodes, body | {"kv_transfer_params": params})) == HELD
    wait_until(lambda: figure(pair.prefills, "moeserve_kv_transfer_held_blocks") == 0)
    assert figure(pair.decodes, "moeserve_kv_transfer_tokens_total") == fetched
    clear(pair.prefills, pair.decodes)


def test_only_what_lacks_is_fetched(pair: Pair) -> None:
    body = completion(PROMPT)
    expected = bits(alone(pair.decodes, body))
    post(pair.decodes, completion(PROMPT[:100]))
    fetched = figure(pair.decodes, "moeserve_kv_transfer_tokens_total")
    params = prefill(pair.prefills, body)
    answer = post(pair.decodes, body | {"kv_transfer_params": params})
    assert (bits(answer), cached(answer)) == (expected, HELD)
    wait_until(lambda: figure(pair.decodes, "moeserve_kv_transfer_tokens_total") == fetched + HELD - 96)
    clear(pair.prefills, pair.decodes)


def test_tickets_that_do_not_serve_are_counted_by_reason_and_the_prompt_is_computed(pair: Pair) -> None:
    body = completion(PROMPT)
    expected = bits(alone(pair.decodes, body))
    params = prefill(pair.prefills, body)
    vllms = {name: params[name] for name in ("do_remote_prefill", "remote_host", "remote_port", "remote_engine_id")}
    bad = {
        "foreign": [vllms, params | {"remote_port": 1}, params | {"fingerprint": "0"}, params | {"transport": "nixl"}],
        "prompt": [prefill(pair.prefills, completion([*PROMPT[:50], 5, *PROMPT[51:]]))],
    }
    for reason, tickets in bad.items():
        before = failures(pair.decodes, reason)
        for ticket in tickets:
            answer = post(pair.decodes, body | {"kv_transfer_params": ticket})
            assert (bits(answer), cached(answer)) == (expected, 0)
            clear(pair.decodes)
        wait_for_failures(pair.decodes, reason, before + len(tickets))
    # A ticket serves once.
    assert cached(post(pair.decodes, body | {"kv_transfer_params": params})) == HELD
    clear(pair.decodes)
    wait_until(lambda: figure(pair.prefills, "moeserve_kv_transfer_held_blocks") <= 12)
    answer = post(pair.decodes, body | {"kv_transfer_params": params})
    assert (bits(answer), cached(answer)) == (expected, 0)
    wait_until(lambda: failures(pair.decodes, "lease") == 1)
    clear(pair.prefills, pair.decodes)


def test_requests_that_cannot_be_handed_over_are_refused_or_get_no_ticket(pair: Pair) -> None:
    for extra in ({"n": 2}, {"stream": True}, {"prompt": ["a", "b"]}):
        answer = pair.prefills.http.post(
            "/v1/completions", json=completion(PROMPT) | extra | {"kv_transfer_params": ASKS}
        )
        assert answer.status_code == 400, answer.text
    assert "kv_transfer_params" not in post(pair.prefills, completion([3, 4], kv_transfer_params=ASKS))
    both = {"do_remote_decode": True, "do_remote_prefill": True}
    assert pair.prefills.http.post("/v1/completions", json=completion([3], kv_transfer_params=both)).status_code == 400
    neither = {"do_remote_decode": False, "do_remote_prefill": False}
    assert "kv_transfer_params" not in post(pair.prefills, completion([3, 4], kv_transfer_params=neither))


def test_a_killed_prefiller_another_model_and_a_lost_lease_leave_the_prompt_to_be_computed(
    model: Path, tmp_path: Path, pair: Pair
) -> None:
    body = completion(PROMPT)
    expected = bits(alone(pair.decodes, body))
    with ExitStack() as stack:
        settings = (
            *config_of(Path(pair.settings[1].split('"')[3]).parent, lease_seconds=0.2),
            "--engine-timeout",
            "30",
        )
        short = start(stack, model, tmp_path / "p", *settings)
        params = prefill(short, body)
        wait_until(lambda: figure(short, "moeserve_kv_transfer_expired_total") == 1)
        lost = failures(pair.decodes, "lease")
        assert bits(post(pair.decodes, body | {"kv_transfer_params": params})) == expected
        wait_until(lambda: failures(pair.decodes, "lease") == lost + 1)
        clear(pair.decodes)
        params = prefill(short, body)
        engine = next(iter(descendants(children_of(short.process.pid)["worker"])))
        os.kill(engine, signal.SIGKILL)
        assert bits(post(pair.decodes, body | {"kv_transfer_params": params})) == expected
        wait_until(lambda: failures(pair.decodes, "gone") == 1)
        clear(pair.decodes)
        other = start(stack, model, tmp_path / "o", *pair.settings, "--block-size", "8")
        params = prefill(other, body)
        assert bits(post(pair.decodes, body | {"kv_transfer_params": params})) == expected
        wait_until(lambda: failures(pair.decodes, "fingerprint") == 1)
        create_keys(tmp_path / "other.key")
        stranger = start(stack, model, tmp_path / "s", *config_of_key(tmp_path / "other.key"))
        foreign = failures(pair.decodes, "foreign")
        assert bits(post(pair.decodes, body | {"kv_transfer_params": prefill(stranger, body)})) == expected
        wait_until(lambda: failures(pair.decodes, "foreign") == foreign + 1)
    clear(pair.decodes)


def config_of_key(key: Path) -> tuple[str, str]:
    return "--kv-transfer-config", f'{{"key_file": "{key}"}}'


LONG = [3 + i * 11 % 50 for i in range(1200)]
STEPS = ("--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--max-model-len", "2048")


def test_with_early_tickets_a_prompt_is_fetched_while_it_is_computed(model: Path, tmp_path: Path, pair: Pair) -> None:
    body = completion(LONG)
    expected = bits(alone(pair.decodes, body))
    folder = Path(pair.settings[1].split('"')[3]).parent
    with ExitStack() as stack:
        early = start(stack, model, tmp_path / "p", *config_of(folder, early=True), *STEPS)
        for number in range(4):
            prompt = [5 + number, *LONG[1:]]
            expected = bits(alone(pair.decodes, completion(prompt)))
            asked = completion(prompt, max_tokens=1, kv_transfer_params=ASKS)
            first = post(early, asked)
            assert (first["choices"][0]["text"], first["usage"]["completion_tokens"]) == ("", 0)
            params = first["kv_transfer_params"]
            assert (params["is_early"], params["remote_num_tokens"]) == (True, 1184)
            answer = post(pair.decodes, completion(prompt) | {"kv_transfer_params": params})
            assert (bits(answer), cached(answer)) == (expected, 1184)
        wait_until(lambda: figure(early, "moeserve_kv_transfer_early_total") == 4)
        wait_until(lambda: figure(early, "moeserve_kv_transfer_held_blocks") == 0)
        # So is a prompt of one step; a request that wants tokens is answered as ever.
        short = PROMPT[:40]
        expected = bits(alone(pair.decodes, completion(short)))
        params = prefill(early, completion(short))
        assert (params["is_early"], params["remote_num_tokens"]) == (True, 32)
        answer = post(pair.decodes, completion(short, kv_transfer_params=params))
        assert (bits(answer), cached(answer)) == (expected, 32)
        assert len(bits(post(early, completion(LONG, max_tokens=3, kv_transfer_params=ASKS)))) == 3
        # The prompt that nobody fetches ends when the service that was to fetch it says so.
        post(pair.decodes, completion(LONG))
        held = figure(early, "moeserve_kv_transfer_held_blocks")
        again = post(early, completion([9, *LONG[1:]], max_tokens=1, kv_transfer_params=ASKS))["kv_transfer_params"]
        post(pair.decodes, completion([9, *LONG[1:]]))
        assert cached(post(pair.decodes, completion([9, *LONG[1:]], kv_transfer_params=again))) == 1184
        wait_until(lambda: figure(early, "moeserve_kv_transfer_held_blocks") == held)
        # A killed service leaves the rest to be computed.
        prompt = [7, *LONG[1:], *LONG]
        expected = bits(alone(pair.decodes, completion(prompt[:1900])))
        params = post(early, completion(prompt[:1900], max_tokens=1, kv_transfer_params=ASKS))["kv_transfer_params"]
        os.kill(next(iter(descendants(children_of(early.process.pid)["worker"]))), signal.SIGKILL)
        assert bits(post(pair.decodes, completion(prompt[:1900], kv_transfer_params=params))) == expected
    clear(pair.decodes)
