"""What one key can find out of another key's prompts by asking the same: nothing, in every tier and store.

The times of answers are measured by `python -m benchmarks.timing_attack`; here it is the work that they consist of.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing_attack import auc
from tests.support.service import Service, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint

KEYS = ("victim", "attacker")
NUM_PROBES = 24
PREFIX = 192  # tokens, in whole blocks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("m"))


def prompt_of(number: int) -> list[int]:
    return [3 + number, *(3 + (number * 11 + i * 7) % 50 for i in range(PREFIX))]


def ask(running: Service, key: str, prompt: list[int], **headers: str) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "cache_report": True}
    answer = running.http.post("/v1/completions", json=body, headers=headers | {"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def figure(running: Service, name: str) -> float:
    text = running.http.get("/metrics", headers={"authorization": "Bearer root"}).text
    found = re.search(rf"^{re.escape(name)} (\S+)", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def traces(running: Service, key: str, numbers: Sequence[int]) -> list[tuple[float, ...]]:
    """Return what a key sees of the answers to prompts: cached tokens by tier, and what the report tells."""
    found = []
    for number in numbers:
        usage = ask(running, key, prompt_of(number))["usage"]
        report, details = usage["cache_report"], usage.get("cached_tokens_details", {"device": 0, "disk": 0})
        known = report["reason"] not in ("never_seen", "not_known")
        found.append((usage["prompt_tokens_details"]["cached_tokens"], details["device"], details["disk"], known))
    return found


def num_read(running: Service) -> float:
    """The bytes of KV that were read from disk."""
    return figure(running, 'moeserve_kv_disk_copied_bytes_total{direction="read"}')


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
        wait_until(lambda: figure(running, 'moeserve_kv_tier_blocks{tier="disk"}') >= 12 * NUM_PROBES // 2)
    return start(stack, model, folder / "1", *settings)


def on_a_shared_disk(stack: ExitStack, model: Path, folder: Path, prime: Callable[[Service], None]) -> Service:
    """Another service has written it, and runs."""
    settings = ("--kv-disk-path", str(folder / "kv"), "--response-store", str(folder / "store"))
    first, second = (start(stack, model, folder / name, *settings) for name in "01")
    prime(first)
    wait_until(lambda: figure(first, 'moeserve_kv_tier_blocks{tier="disk"}') >= 12 * NUM_PROBES // 2)
    return second


@pytest.mark.parametrize("tier", [in_memory, on_disk, on_a_shared_disk])
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
        seen = traces(running, "victim", numbers)
        # From disk the first prefix is read; a later one is computed where that is expected to be sooner.
        assert separates(seen, is_cached) == 1.0 if tier is in_memory else separates(seen, is_cached) > 0.5
        from_disk = sum(disk for _, _, disk, _ in seen)
        wait_until(lambda: figure(running, 'moeserve_kv_tier_hit_tokens_total{tier="disk"}') == from_disk)
        read = num_read(running)
        assert separates(traces(running, "attacker", numbers), is_cached) == 0.5
        # No file of another key was even opened, and no answer of one was taken.
        assert num_read(running) == read
        ids = {ask(running, key, prompt_of(0), **{"idempotency-key": "the victim's 0"})["id"] for key in KEYS}
        assert len(ids) == 2
