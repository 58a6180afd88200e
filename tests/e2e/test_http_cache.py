"""The prompt cache over a whole service with a tiny model: reports of misses, retention, pins, warming, listings."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import Service, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint

# The tokenizer has a token for each byte; blocks have 16 tokens, and there are 256 of them.
TAIL = "You are a careful assistant who answers in one line and never makes anything up. " * 3

# Keys of one test each: reports begin with the first one of a key, and what was evicted before is not known.
REPORTED = ("misses", "stranger", "late", "streamed", "several")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model, folder = write_tiny_checkpoint(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("service")
    others = "".join(f"user:{key}\n" for key in REPORTED)
    (folder / "keys").write_text(f"admin:root\nuser:alice\nuser:bob retention=0.125\n{others}")
    settings = ("--max-model-len", "2048", "--kv-cache-memory", "1MiB", "--api-key-file", str(folder / "keys"))
    with service(model, folder, *settings) as started:
        yield started


@pytest.fixture(autouse=True)
def empty(running: Service) -> None:
    """Nothing is cached of other tests: the blocks that a key may fill depend on how many keys have some."""
    assert call(running, "POST", "/reset_prefix_cache", "root").status_code == 200


def call(running: Service, method: str, path: str, key: str, body: dict[str, Any] | None = None) -> Any:
    return running.http.request(method, path, headers={"authorization": f"Bearer {key}"}, json=body)


def complete(running: Service, prompt: str, key: str = "alice", **fields: Any) -> dict[str, Any]:
    answer = call(running, "POST", "/v1/completions", key, {"model": "m", "prompt": prompt, "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def report(running: Service, prompt: str, key: str = "alice", **fields: Any) -> dict[str, Any]:
    usage = complete(running, prompt, key, cache_report=True, **fields)
    found: dict[str, Any] = usage["cache_report"]
    assert found["matched_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert found["prompt_tokens"] == usage["prompt_tokens"]
    return found


def cached(running: Service, prompt: str, key: str = "alice") -> int:
    tokens: int = complete(running, prompt, key)["prompt_tokens_details"]["cached_tokens"]
    return tokens


def flood(running: Service, key: str = "alice", times: int = 4) -> None:
    """Fill all KV blocks with prompts that nobody has asked before. A key's own prompts evict its prefixes first."""
    for number in range(times):
        complete(running, f"{number}{key}" + chr(65 + number) * 1500, key)


def test_ten_misses_have_their_reasons(running: Service) -> None:
    prompt = ("Zebras are striped. " * 11)[:208]
    key = "misses"
    first = report(running, prompt, key)
    assert (first["reason"], first["matched_tokens"], first["at_token"]) == ("never_seen", 0, 0)
    again = report(running, prompt, key)
    assert (again["reason"], again["matched_tokens"]) == ("last_token", 192)
    shorter = report(running, prompt[:200], key)
    assert (shorter["reason"], shorter["matched_tokens"]) == ("block_boundary", 192)

    other = report(running, prompt[:100] + "but horses are not, " + prompt[120:], key)
    assert (other["reason"], other["matched_tokens"], other["at_token"]) == ("diverged", 96, 100)
    assert other["before"] == prompt[88:100]
    assert other["yours"] == "but horses a"
    assert other["nearest"] == prompt[100:112]

    grown = report(running, prompt + " And now for something else entirely.", key)
    assert (grown["reason"], grown["matched_tokens"]) == ("never_seen", 208)

    complete(running, "Salted " + TAIL, key, cache_salt="s1")
    salted = report(running, "Salted " + TAIL, key, cache_salt="s2")
    assert (salted["reason"], salted["matched_tokens"]) == ("never_seen", 0)

    stranger = report(running, prompt, "stranger")
    assert (stranger["reason"], stranger["matched_tokens"]) == ("never_seen", 0)

    times = ["12:01:07", "12:03:41", "12:09:59"]
    heads = [report(running, f"It is now {time} o'clock. " + TAIL, key) for time in times]
    assert [one["reason"] for one in heads[1:]] == ["diverged", "volatile_head"]
    assert heads[2]["volatile_head"] == {"at_token": 14, "tokens": 4, "text": "9:59", "prompts": 2}

    skipped = report(running, prompt, key, echo=True, logprobs=1)
    assert (skipped["reason"], skipped["matched_tokens"]) == ("bypassed", 0)

    flood(running, key)
    gone = report(running, prompt, key)
    assert (gone["reason"], gone["matched_tokens"], gone["known_tokens"]) == ("evicted", 0, 192)


def test_what_was_evicted_before_the_first_report_of_a_key_is_not_known(running: Service) -> None:
    flood(running, "late")
    assert report(running, "0late" + "A" * 1500, "late")["reason"] == "not_known"


def test_a_report_comes_with_the_usage_of_a_stream_and_by_header_too(running: Service) -> None:
    body = {"model": "m", "prompt": "Streamed " + TAIL, "max_tokens": 2, "stream": True}
    headers = {"authorization": "Bearer streamed", "x-moeserve-cache-report": "1"}
    answer = running.http.post("/v1/completions", headers=headers, json=body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["usage"]["cache_report"]["reason"] == "never_seen"
    assert all(event["usage"] is None for event in events[:-1])
    messages = [{"role": "user", "content": TAIL}]
    for reason in ("never_seen", "block_boundary"):
        body = {"model": "m", "messages": messages, "max_tokens": 1, "cache_report": True}
        usage = call(running, "POST", "/v1/chat/completions", "streamed", body).json()["usage"]
        assert usage["cache_report"]["reason"] == reason


def test_several_prompts_have_a_report_each(running: Service) -> None:
    body = {"model": "m", "prompt": ["One " + TAIL, "Two " + TAIL], "max_tokens": 1, "n": 2, "cache_report": True}
    usage = call(running, "POST", "/v1/completions", "several", body).json()["usage"]
    assert [one["reason"] for one in usage["cache_report"]] == ["never_seen", "never_seen"]
    assert "cache_report" not in complete(running, "Three " + TAIL, "several")


@pytest.mark.parametrize(
    "wish",
    [
        {"prompt_cache_key": "agent"},
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_a_retained_prompt_outlives_a_flood_and_others_do_not(running: Service, wish: dict[str, Any]) -> None:
    name = next(iter(wish))
    complete(running, f"Plain {name} " + TAIL)
    complete(running, f"Kept {name} " + TAIL, **wish)
    wait_until(lambda: running.figure("moeserve_kv_retained_blocks", "root") > 0)
    flood(running)
    assert cached(running, f"Plain {name} " + TAIL) == 0
    assert cached(running, f"Kept {name} " + TAIL) > 200


def test_the_head_of_a_chat_up_to_a_mark_outlives_a_flood(running: Service) -> None:
    part = {"type": "text", "text": "Marked " + TAIL, "prompt_cache_breakpoint": {"mode": "explicit"}}
    messages = [{"role": "system", "content": [part]}, {"role": "user", "content": TAIL}]
    body = {"model": "m", "messages": messages, "max_tokens": 1, "prompt_cache_options": {"mode": "explicit"}}
    for _ in range(2):
        usage = call(running, "POST", "/v1/chat/completions", "alice", body).json()["usage"]
        flood(running)
    # The head is there, and what followed it was evicted.
    assert 240 <= usage["prompt_tokens_details"]["cached_tokens"] < 300 < usage["prompt_tokens"]


def test_pins_stay_until_they_are_unpinned_and_within_the_keys_budget(running: Service) -> None:
    prefix = {"prompt": "Pinned " + TAIL}
    missing = call(running, "POST", "/v1/cache/pin", "bob", prefix)
    assert (missing.status_code, missing.json()["error"]["code"]) == (409, "not_cached")
    assert call(running, "POST", "/v1/cache/warm", "bob", prefix).json()["cached_tokens"] == 0
    warm = call(running, "POST", "/v1/cache/warm", "bob", prefix).json()
    assert (warm["prompt_tokens"], warm["cached_tokens"]) == (len("Pinned " + TAIL), 240)
    pinned = call(running, "POST", "/v1/cache/pin", "bob", prefix)
    assert pinned.json() == {"object": "cache.pin", "tokens": 240, "prompt_tokens": len("Pinned " + TAIL)}
    flood(running, "bob")
    assert cached(running, "Pinned " + TAIL, "bob") == 240

    # An eighth of 256 blocks is what bob may retain, and pin; 15 of them are pinned.
    over = call(running, "POST", "/v1/cache/pin", "bob", {"prompt": "x" * 18 * 16})
    assert (over.status_code, over.json()["error"]["code"]) == (409, "over_budget")
    assert all(count in over.json()["error"]["message"] for count in ("17", "18"))

    listed = call(running, "GET", "/v1/cache", "bob").json()
    assert listed["budget"]["blocks"] == 32
    assert listed["budget"]["free"] == 17
    (entry,) = [one for one in listed["prefixes"] if one["pinned"]]
    assert (entry["prefix_tokens"], entry["preview"][:12]) == (240, "Pinned You a")
    assert entry["tokens_saved"] >= 240
    assert call(running, "POST", "/v1/cache/unpin", "alice", {"id": entry["id"]}).status_code == 404
    assert call(running, "POST", "/v1/cache/unpin", "alice", prefix).status_code == 404
    assert call(running, "POST", "/v1/cache/unpin", "bob", {"id": entry["id"]}).status_code == 200
    assert call(running, "POST", "/v1/cache/unpin", "bob", prefix).status_code == 404
    flood(running, "bob")
    assert cached(running, "Pinned " + TAIL, "bob") == 0


def test_a_listing_shows_ones_own_prefixes_and_all_of_them_to_an_admin(running: Service) -> None:
    complete(running, "Secret of alice " + TAIL)
    complete(running, "Secret of bob " + TAIL, "bob")
    mine = call(running, "GET", "/v1/cache?limit=1000", "alice").text
    assert "Secret of alice" in mine
    assert "Secret of bob" not in mine
    assert call(running, "GET", "/v1/cache?all=1", "alice").status_code == 403
    both = call(running, "GET", "/v1/cache?all=1&limit=1000", "root").json()
    previews = " ".join(one["preview"] for one in both["prefixes"])
    assert "Secret of alice" in previews
    assert "Secret of bob" in previews
    saved = [one["tokens_saved"] for one in both["prefixes"]]
    assert saved == sorted(saved, reverse=True)
    assert call(running, "GET", "/v1/cache?limit=0", "alice").status_code == 400


def test_dropping_takes_ones_own_prefixes_alone(running: Service) -> None:
    for key in ("alice", "bob"):
        complete(running, "Dropped " + TAIL, key)
    assert call(running, "DELETE", "/v1/cache", "alice").json()["blocks_freed"] > 0
    assert call(running, "GET", "/v1/cache", "alice").json()["prefixes"] == []
    assert cached(running, "Dropped " + TAIL) == 0
    assert cached(running, "Dropped " + TAIL, "bob") > 200


def test_a_salt_keeps_its_prefixes_from_the_keys_other_salts(running: Service) -> None:
    salted = {"cache_salt": "secret"}
    complete(running, "Of the salt " + TAIL, **salted)
    complete(running, "Without salt " + TAIL)
    shown = {
        salt: call(running, "GET", f"/v1/cache?limit=1000{salt}", "alice").text
        for salt in ("", "&cache_salt=secret", "&cache_salt=other")
    }
    assert ["Of the salt" in text for text in shown.values()] == [False, True, False]
    assert ["Without salt" in text for text in shown.values()] == [True, False, False]
    assert call(running, "GET", "/v1/cache?cache_salt=", "alice").status_code == 400
    assert "Of the salt" in call(running, "GET", "/v1/cache?all=1&limit=1000", "root").text
    complete(running, "Of the salt " + TAIL, "root", **salted)
    told = report(running, "Of the salt " + TAIL, "root", cache_salt="other")
    assert (told["reason"], told["matched_tokens"], told["known_tokens"]) == ("other_salt", 0, 240)
    pinned = {"prompt": "Of the salt " + TAIL, **salted}
    assert call(running, "POST", "/v1/cache/pin", "alice", pinned).status_code == 200
    (entry,) = [one for one in json.loads(shown["&cache_salt=secret"])["prefixes"] if "Of the salt" in one["preview"]]
    assert call(running, "POST", "/v1/cache/unpin", "alice", {"id": entry["id"]}).status_code == 404
    assert call(running, "POST", "/v1/cache/unpin", "alice", {"id": entry["id"], **salted}).status_code == 200
    assert call(running, "DELETE", "/v1/cache", "alice").json()["blocks_freed"] > 0
    assert complete(running, "Of the salt " + TAIL, **salted)["prompt_tokens_details"]["cached_tokens"] > 200
    assert call(running, "DELETE", "/v1/cache?cache_salt=secret", "alice").json()["blocks_freed"] > 0
    assert complete(running, "Of the salt " + TAIL, **salted)["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "/v1/completions", {"prompt_cache_retention": "1y"}, "prompt_cache_retention"),
        ("POST", "/v1/completions", {"prompt_cache_options": {"ttl": "2d"}}, "prompt_cache_options.ttl"),
        ("POST", "/v1/completions", {"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ("POST", "/v1/completions", {"cache_report": "yes"}, "cache_report"),
        ("POST", "/v1/cache/warm", {"prompt": None}, "prompt"),
        ("POST", "/v1/cache/warm", {"stream": True}, "stream"),
        ("POST", "/v1/cache/warm", {"temperature": 0.5}, "temperature"),
        ("POST", "/v1/cache/pin", {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ("POST", "/v1/cache/pin", {"prompt": "short"}, "prompt"),
        ("POST", "/v1/cache/pin", {"prompt": [-1] * 32}, "prompt"),
        ("POST", "/v1/cache/unpin", {"id": "0.1"}, "id"),
    ],
)
def test_bad_input_is_named(running: Service, method: str, path: str, body: dict[str, Any], param: str) -> None:
    answer = call(running, method, path, "alice", {"model": "m", "prompt": "hi", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_public_prefixes_are_shared_by_all_keys_and_what_follows_is_not(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    (tmp_path / "keys").write_text("admin:root\nuser:alice\nuser:bob\n")
    public = [{"prompt": "Public " + TAIL}, {"messages": [{"role": "system", "content": TAIL}]}]
    (tmp_path / "public.json").write_text(json.dumps(public))
    settings = ("--max-model-len", "2048", "--kv-cache-memory", "1MiB", "--api-key-file", str(tmp_path / "keys"))
    with service(model, tmp_path, *settings, "--public-prefixes", str(tmp_path / "public.json")) as running:
        wait_until(lambda: running.figure("moeserve_kv_pinned_prefixes", "root") == 2)
        question = "Public " + TAIL + "What is the capital of Peru?"
        assert [cached(running, question, key) for key in ("alice", "bob")] == [240, 240]
        assert [cached(running, question, key) for key in ("alice", "alice")] == [272, 272]
        assert "capital of Peru" not in call(running, "GET", "/v1/cache", "root").text
        chat = {"model": "m", "max_tokens": 1, "messages": [*public[1]["messages"], {"role": "user", "content": "hi"}]}
        usage = call(running, "POST", "/v1/chat/completions", "bob", chat).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 240
        flood(running, "bob")
        assert [cached(running, question, key) for key in ("alice", "bob")] == [272, 240]
        assert call(running, "DELETE", "/v1/cache", "alice").status_code == 200
        assert cached(running, question, "alice") == 240
        (tmp_path / "public.json").write_text(json.dumps(public[1:]))
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: running.figure("moeserve_kv_pinned_prefixes", "root") == 1)
        (tmp_path / "public.json").write_text(json.dumps([*public[1:], {"prompt": "Another " + TAIL}]))
        wait_until(lambda: running.figure("moeserve_kv_pinned_prefixes", "root") == 2)
