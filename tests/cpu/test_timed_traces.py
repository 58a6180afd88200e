"""Requests at any times, beside any others, in too little memory, get the bits that they get alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.token_engine import TokenEngine
from moeserve.config import ServeConfig
from tests.support.timed_traces import LONGEST, Asked, Played, known_requests, play_traces

BLOCK_SIZE = 4
TOKEN_BYTES = 256  # of keys and values, in the two layers of the model
BASE = ServeConfig(block_size=BLOCK_SIZE, max_model_len=LONGEST + BLOCK_SIZE, max_num_seqs=12)
# By name: what differs from the base. Memory is for one and a half of the longest requests, but for the last.
SETTINGS: dict[str, dict[str, Any]] = {
    "small steps": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "large steps": {"max_num_batched_tokens": 256},
    "middle steps": {"max_num_batched_tokens": 24},
    "no cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
    "room": {"kv_cache_memory": 4 * LONGEST * TOKEN_BYTES, "max_num_batched_tokens": 20},
}
MEMORY = 3 * LONGEST * TOKEN_BYTES // 2


def play(model: Path, requests: list[Asked], name: str, count: int) -> Played:
    llm = TokenEngine(model, replace(BASE, **{"kv_cache_memory": MEMORY, **SETTINGS[name]}))
    try:
        return play_traces(llm, requests, count, seed=len(name))
    finally:
        llm.close()


def test_requests_at_any_times_have_the_bits_of_an_isolated_run(model: Path) -> None:
    requests = known_requests(model, BASE, 40, seed=1)
    for name in ("small steps", "middle steps"):
        played = play(model, requests, name, 6)
        assert played.wrong == []
        assert played.aborted
        assert played.preempted


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_thousand_traces_and_five_hundred_preemptions_change_no_bit(model: Path) -> None:
    requests = known_requests(model, BASE, 400, seed=2)
    all_played = {name: play(model, requests, name, 200) for name in SETTINGS}
    for name, played in all_played.items():
        print(f"\n{name}: {played}")
        assert played.wrong == []
        assert played.aborted > 200
    assert sum(played.traces for played in all_played.values()) == 1000
    assert sum(played.preempted for played in all_played.values()) >= 500
