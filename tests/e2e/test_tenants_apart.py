"""What one key can find out of another key's prompts by asking the same: nothing, in every tier and store.

The times of answers are measured by `python -m benchmarks.timing_attack`; here it is the work that they consist of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing_attack import auc
from tests.support.service import ROOT, Service, service, wait_until

KEYS = ("victim", "attacker")
TIERS = ("device", "host", "disk")
NUM_PROBES = 24
PREFIX = 192  # tokens, in whole blocks
BLOCK_BYTES = 4096  # of the tiny model's KV


def prompt_of(number: int) -> list[int]:
    return [3 + number, *(3 + (number * 11 + i * 7) % 50 for i in range(PREFIX))]


def ask(running: Service, key: str, prompt: list[int], **headers: str) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "cache_report": True}
    answer = running.http.post("/v1/completions", json=body, headers=headers | {"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def traces(running: Service, key: str, prompts: Sequence[list[int]]) -> list[tuple[float, ...]]:
    """Return what a key sees of the answers to prompts: cached tokens by tier, and what the report tells."""
    found = []
    for prompt in prompts:
        usage = ask(running, key, prompt)["usage"]
        report, details = usage["cache_report"], usage.get("cached_tokens_details", dict.fromkeys(TIERS, 0))
        known = report["reason"] not in ("never_seen", "not_known")
        in_tiers = [details[tier] for tier in TIERS]
        found.append((usage["prompt_tokens_details"]["cached_tokens"], *in_tiers, known))
    return found


def num_read(running: Service, tier: str) -> float:
    """The bytes of KV that were read from a tier."""
    return running.figure(f'moeserve_kv_{tier}_copied_bytes_total{{direction="read"}}', "root")


def separates(seen: Sequence[tuple[float, ...]], is_cached: Sequence[bool]) -> float:
    """Return the largest AUC of any trace, of 0.5 and more."""
    found = []
    for column in zip(*seen, strict=True):
        hits = [value for value, known in zip(column, is_cached, strict=True) if known]
        misses = [value for value, known in zip(column, is_cached, strict=True) if not known]
        found.append(max(auc(hits, misses), auc(misses, hits)))
    return max(found)


def start(stack: ExitStack, model: Path, folder: Path, *settings: str) -> Service:
    folder.mkdir()
    (folder / "keys").write_text("user:victim\nuser:attacker\nadmin:root\n")
    return stack.enter_context(service(model, folder, "--api-key-file", str(folder / "keys"), *settings))


def in_memory(stack: ExitStack, model: Path, folder: Path, prime: Callable[[Service], None]) -> Service:
    running = start(stack, model, folder / "0")
    prime(running)
    return running


def on_disk(stack: ExitStack, model: Path, folder: Path, prime: Callable[[Service], None]) -> Service:
    """The service has been restarted since."""
    settings = ("--kv-disk-path", str(folder / "kv"))
    with ExitStack() as first:
        running = start(first, model, folder / "0", *settings)
        prime(running)
        wait_until(lambda: running.figure('moeserve_kv_tier_blocks{tier="disk"}', "root") >= 12 * NUM_PROBES // 2)
    return start(stack, model, folder / "1", *settings)


def on_a_shared_disk(stack: ExitStack, model: Path, folder: Path, prime: Callable[[Service], None]) -> Service:
    """Another service has written it, and runs."""
    settings = ("--kv-disk-path", str(folder / "kv"), "--response-store", str(folder / "store"))
    first, second = (start(stack, model, folder / name, *settings) for name in "01")
    prime(first)
    wait_until(lambda: first.figure('moeserve_kv_tier_blocks{tier="disk"}', "root") >= 12 * NUM_PROBES // 2)
    return second


def in_host(stack: ExitStack, model: Path, folder: Path, prime: Callable[[Service], None]) -> Service:
    """Most of it has left the device for the host's memory."""
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setenv("PYTHONPATH", f"{ROOT}/tests/support/host_below_cpu:{ROOT}")
    settings = ("--kv-host-memory", "16MiB", "--kv-cache-memory", str(128 * BLOCK_BYTES), "--max-model-len", "256")
    running = start(stack, model, folder / "0", *settings)
    prime(running)
    others = count(NUM_PROBES)

    def is_most_there() -> bool:
        ask(running, "root", prompt_of(next(others)))
        headers = {"authorization": "Bearer victim"}
        held: int = running.http.get("/v1/cache", headers=headers).json()["host"]["blocks"]
        return held >= 12 * NUM_PROBES // 4

    wait_until(is_most_there)
    return running


@pytest.mark.parametrize("tier", [in_memory, in_host, on_disk, on_a_shared_disk])
def test_only_the_key_that_sent_a_prompt_finds_out_that_it_is_cached(
    tier: Callable[..., Service], model: Path, tmp_path: Path
) -> None:
    numbers = list(range(NUM_PROBES))
    sent = set(random.Random(1).sample(numbers, NUM_PROBES // 2))

    def prime(running: Service) -> None:
        for number in sorted(sent):
            ask(running, "victim", prompt_of(number), **{"idempotency-key": f"the victim's {number}"})

    with ExitStack() as stack:
        running = tier(stack, model, tmp_path, prime)
        is_cached = [number in sent for number in numbers]
        prompts = [prompt_of(number) for number in numbers]
        seen = traces(running, "victim", prompts)
        # From below memory the first prefix is read; a later one is computed where that is expected to be sooner.
        assert separates(seen, is_cached) == 1.0 if tier is in_memory else separates(seen, is_cached) > 0.5
        below = "host" if tier is in_host else "disk"
        found = sum(trace[1 + TIERS.index(below)] for trace in seen)
        assert found or tier is in_memory
        wait_until(lambda: running.figure(f'moeserve_kv_tier_hit_tokens_total{{tier="{below}"}}', "root") == found)
        read = num_read(running, below)
        assert separates(traces(running, "attacker", prompts), is_cached) == 0.5
        # No block of another key was even read, and no answer of one was taken.
        assert num_read(running, below) == read
        ids = {ask(running, key, prompt_of(0), **{"idempotency-key": "the victim's 0"})["id"] for key in KEYS}
        assert len(ids) == 2


def test_a_service_that_starts_again_with_other_keys_or_none_finds_nothing_of_a_key(
    model: Path, tmp_path: Path
) -> None:
    disk, both = ("--kv-disk-path", str(tmp_path / "kv")), ("--api-key", "one", "--api-key", "two")
    lives = [
        (("--api-key", "one"), "one", 0),
        ((), "nobody's", 0),
        (("--api-key", "two"), "two", 0),
        (both, "two", PREFIX),
        (both, "one", PREFIX),
        ((), "nobody's", PREFIX),
    ]
    for number, (settings, key, on_disk) in enumerate(lives):
        with service(model, tmp_path / str(number), *disk, *settings) as running:
            assert ask(running, key, prompt_of(0))["usage"]["cached_tokens_details"]["disk"] == on_disk
            running.http.headers["authorization"] = f"Bearer {key}"
            wait_until(lambda: running.http.get("/v1/cache").json()["disk"]["blocks"] >= PREFIX // 16)
