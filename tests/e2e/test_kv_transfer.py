"""Prefill and decode apart: one service computes a prompt, another one fetches its KV and answers with its bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from moeserve.engine.curve import create_keys
from tests.support.kv_pair import (
    ASKS,
    Pair,
    alone,
    bits,
    cached,
    clear,
    completion,
    config_of,
    config_of_key,
    failures,
    post,
    prefill,
    start,
    start_pair,
    wait_for_failures,
)
from tests.support.service import children_of, descendants, wait_until

PROMPT = [3 + i * 7 % 50 for i in range(200)]
HELD = 192  # tokens in whole blocks without the last token


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield start_pair(stack, model, tmp_path_factory.mktemp("pair"))


def test_a_prompt_of_one_service_is_decoded_by_another_with_the_same_bits(pair: Pair) -> None:
    body = completion(PROMPT)
    expected = bits(alone(pair.decodes, body))
    fetched = pair.decodes.figure("moeserve_kv_transfer_tokens_total")
    params = prefill(pair.prefills, body)
    assert (params["do_remote_prefill"], params["remote_num_tokens"]) == (True, HELD)
    answer = post(pair.decodes, body | {"kv_transfer_params": params})
    assert (bits(answer), cached(answer)) == (expected, HELD)
    # The lease has ended, and the blocks stay cached in both.
    wait_until(lambda: pair.decodes.figure("moeserve_kv_transfer_tokens_total") == fetched + HELD)
    wait_until(lambda: pair.prefills.figure("moeserve_kv_transfer_held_blocks") == 0)
    assert cached(post(pair.decodes, body)) == HELD
    clear(pair.prefills, pair.decodes)


def test_chats_are_handed_over_streamed_with_several_choices_and_with_a_grammar(pair: Pair) -> None:
    messages = [{"role": "user", "content": "tell me of whales and of the sea " * 6}]
    body = {"model": "m", "messages": messages, "max_completion_tokens": 8, "temperature": 0, "seed": 4}
    fetched = pair.decodes.figure("moeserve_kv_transfer_tokens_total")
    offers = pair.prefills.figure("moeserve_kv_transfer_offers_total")
    extra: dict[str, Any]
    for extra in ({}, {"n": 2}, {"response_format": {"type": "json_object"}}):
        clear(pair.prefills, pair.decodes)
        expected = post(pair.decodes, body | extra, "/v1/chat/completions")["choices"]
        clear(pair.decodes)
        params = prefill(pair.prefills, body | extra, CHAT)
        answer = post(pair.decodes, body | extra | {"kv_transfer_params": params}, CHAT)
        assert answer["choices"] == expected
        assert cached(answer) == params["remote_num_tokens"]
        fetched += params["remote_num_tokens"]
    wait_until(lambda: pair.prefills.figure("moeserve_kv_transfer_offers_total") == offers + 3)
    clear(pair.decodes)
    params = prefill(pair.prefills, body, CHAT)
    asked = body | {"kv_transfer_params": params, "stream": True, "stream_options": {"include_usage": True}}
    text = pair.decodes.http.post(CHAT, json=asked).text
    assert f'"cached_tokens":{params["remote_num_tokens"]}' in text
    fetched += params["remote_num_tokens"]
    wait_until(lambda: pair.decodes.figure("moeserve_kv_transfer_tokens_total") == fetched)
    clear(pair.prefills, pair.decodes)


CHAT = "/v1/chat/completions"


def test_what_is_cached_already_is_not_fetched_and_the_lease_ends(pair: Pair) -> None:
    body = completion(PROMPT)
    post(pair.decodes, body)
    fetched = pair.decodes.figure("moeserve_kv_transfer_tokens_total")
    params = prefill(pair.prefills, body)
    assert cached(post(pair.decodes, body | {"kv_transfer_params": params})) == HELD
    wait_until(lambda: pair.prefills.figure("moeserve_kv_transfer_held_blocks") == 0)
    assert pair.decodes.figure("moeserve_kv_transfer_tokens_total") == fetched
    clear(pair.prefills, pair.decodes)


def test_only_what_lacks_is_fetched(pair: Pair) -> None:
    body = completion(PROMPT)
    expected = bits(alone(pair.decodes, body))
    post(pair.decodes, completion(PROMPT[:100]))
    fetched = pair.decodes.figure("moeserve_kv_transfer_tokens_total")
    params = prefill(pair.prefills, body)
    answer = post(pair.decodes, body | {"kv_transfer_params": params})
    assert (bits(answer), cached(answer)) == (expected, HELD)
    wait_until(lambda: pair.decodes.figure("moeserve_kv_transfer_tokens_total") == fetched + HELD - 96)
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
    wait_until(lambda: pair.prefills.figure("moeserve_kv_transfer_held_blocks") <= 12)
    lost = failures(pair.decodes, "lease")
    answer = post(pair.decodes, body | {"kv_transfer_params": params})
    assert (bits(answer), cached(answer)) == (expected, 0)
    wait_for_failures(pair.decodes, "lease", lost + 1)
    clear(pair.prefills, pair.decodes)


def test_requests_that_cannot_be_handed_over_are_refused_or_get_no_ticket(pair: Pair) -> None:
    for extra in ({"n": 2, "use_beam_search": True}, {"stream": True}, {"prompt": ["a", "b"]}):
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
            *config_of(pair.folder, lease_seconds=0.2),
            "--engine-timeout",
            "30",
        )
        short = start(stack, model, tmp_path / "p", *settings)
        params = prefill(short, body)
        wait_until(lambda: short.figure("moeserve_kv_transfer_expired_total") == 1)
        lost = failures(pair.decodes, "lease")
        assert bits(post(pair.decodes, body | {"kv_transfer_params": params})) == expected
        wait_until(lambda: failures(pair.decodes, "lease") == lost + 1)
        clear(pair.decodes)
        params = prefill(short, body)
        engine = next(iter(descendants(children_of(short.process.pid)["worker"])))
        gone = failures(pair.decodes, "gone")
        os.kill(engine, signal.SIGKILL)
        assert bits(post(pair.decodes, body | {"kv_transfer_params": params})) == expected
        wait_for_failures(pair.decodes, "gone", gone + 1)
        clear(pair.decodes)
        other = start(stack, model, tmp_path / "o", *pair.settings, "--block-size", "8")
        params = prefill(other, body)
        differing = failures(pair.decodes, "fingerprint")
        assert bits(post(pair.decodes, body | {"kv_transfer_params": params})) == expected
        clear(pair.decodes)
        assert bits(post(pair.decodes, body | {"kv_transfer_params": prefill(other, body)})) == expected
        wait_for_failures(pair.decodes, "fingerprint", differing + 2)
        assert pair.decodes.errors.read_text().count("kv_ticket_of_unlike_service") == 1
        create_keys(tmp_path / "other.key")
        stranger = start(stack, model, tmp_path / "s", *config_of_key(tmp_path / "other.key"))
        foreign = failures(pair.decodes, "foreign")
        assert bits(post(pair.decodes, body | {"kv_transfer_params": prefill(stranger, body)})) == expected
        wait_until(lambda: failures(pair.decodes, "foreign") == foreign + 1)
    clear(pair.decodes)
