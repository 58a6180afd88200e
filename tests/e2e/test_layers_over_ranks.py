"""A service whose layers are on two ranks: the answers of one rank, whatever it is asked, and also after losing one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.kills import pid_of
from tests.support.saved_models import saved_model
from tests.support.service import Service, descendants, is_alive, service, wait_until
from tests.support.tiny_checkpoint import MAX_POSITION
from tests.support.tiny_model import write_model_dir

PATIENT = ("--slo", "ttft:100s", "--engine-timeout", "60")
TWO = ("--pipeline-parallel-size", "2", *PATIENT)
# A rank that hangs is to be found soon.
WATCHED = (*TWO, "--engine-timeout", "6", "--max-restarts", "0")


def prompts() -> list[list[int]]:
    random = Random(4)
    shared = [[random.randrange(3, 60) for _ in range(90)] for _ in range(3)]
    return [shared[n % 3] + [random.randrange(3, 60) for _ in range(1 + n)] for n in range(9)]


def bodies() -> list[dict[str, Any]]:
    """Greedy, sampled, with penalties, held by a grammar, with several choices, and a search with beams."""
    common = {"model": "m", "max_tokens": 24, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.2, "seed": 5, "logprobs": 3, "presence_penalty": 0.5},
        {"temperature": 1.5, "seed": 7, "guided_regex": "[a-f]{4,12}-[0-9]{2}"},
        {"temperature": 1.0, "seed": 9, "n": 3},
        {"temperature": 0, "use_beam_search": True, "n": 2, "max_tokens": 6},
    ]
    return [{**common, "prompt": prompt, **kinds[n % len(kinds)]} for n, prompt in enumerate(prompts())]


def ask(running: Service, body: dict[str, Any]) -> tuple[list[Any], int]:
    """The choices, and the number of cached prompt tokens."""
    answer = running.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    return said["choices"], said["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_all(running: Service) -> list[list[Any]]:
    """Ask five at a time."""
    with ThreadPoolExecutor(5) as pool:
        return [choices for choices, _ in pool.map(lambda body: ask(running, body), bodies())]


# With experts, with windows of their own blocks, with states, and without experts.
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("qwen3_moe", ("--layers-per-rank", "1,2", "--max-num-batched-tokens", "64")),
        ("qwen3_next", ("--speculative-config", "suffix")),
        ("qwen3", ("--kv-cache-memory", "200KiB", "--max-model-len", "160", "--max-num-seqs", "4")),
        pytest.param("gpt_oss", (), marks=pytest.mark.long),
        pytest.param("deepseek_v3-yarn", ("--pipeline-parallel-size", "3"), marks=pytest.mark.long),
    ],
)
def test_layers_on_several_ranks_give_the_answers_of_one_rank_and_end_cleanly(
    tmp_path_factory: pytest.TempPathFactory, case: str, settings: tuple[str, ...]
) -> None:
    model = tmp_path_factory.mktemp(case)
    write_model_dir(model)
    saved_model(case, model, eos_token_id=1)
    searches = case not in ("qwen3_next",)
    asked = [body for body in bodies() if searches or "use_beam_search" not in body]
    with service(model, tmp_path_factory.mktemp("one"), *PATIENT) as one:
        expected = [ask(one, body)[0] for body in asked]
        recorded = one.http.get("/metrics").text.count("moeserve_expert_recorded_tokens_total")
    with service(model, tmp_path_factory.mktemp("two"), *TWO, *settings) as two:
        processes = descendants(two.process.pid)
        for _ in range(2):
            with ThreadPoolExecutor(5) as pool:
                assert [choices for choices, _ in pool.map(lambda body: ask(two, body), asked)] == expected
        ask(two, asked[0])
        assert ask(two, asked[0])[1] > 0
        assert two.http.get("/metrics").text.count("moeserve_expert_recorded_tokens_total") == recorded
        two.process.send_signal(signal.SIGTERM)
        assert two.end() == 0
        assert two.leaves_nothing()
        wait_until(lambda: not any(map(is_alive, processes)))


def kill_in_turn(running: Service, ranks: Iterable[int]) -> None:
    """Kill one rank after another, each time with a stream open, which goes on."""
    whole = list(running.stream(max_tokens=300, temperature=1.0, seed=3))
    for rank in ranks:
        events = running.stream(max_tokens=300, temperature=1.0, seed=3)
        begun = [next(events)]
        copy = pid_of(running, f"rank {rank}")
        assert copy is not None
        os.kill(copy, signal.SIGKILL)
        found = [*begun, *events]
        assert [event["choices"] for event in found] == [event["choices"] for event in whole]
        wait_until(lambda rank=rank, copy=copy: pid_of(running, f"rank {rank}") not in (None, copy))
        wait_until(lambda rank=rank, copy=copy: f"Rank {rank} (process {copy})" in running.errors.read_text())
        assert running.process.poll() is None


def test_stages_whose_ranks_share_the_experts_have_the_answers_of_one_stage(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    experts = ("--expert-parallel-size", "2", *PATIENT)
    disk = ("--kv-disk-path", str(tmp_path_factory.mktemp("kv")))
    with service(model, tmp_path_factory.mktemp("one"), *experts) as one:
        expected = ask_all(one)
        links = one.http.get("/metrics").text.count("moeserve_expert_link_rows")
    with service(model, tmp_path_factory.mktemp("both"), *experts, *TWO, *disk) as both:
        for _ in range(2):
            assert ask_all(both) == expected
        ask(both, bodies()[0])
        assert ask(both, bodies()[0])[1] > 0
        assert both.http.get("/metrics").text.count("moeserve_expert_link_rows") == links
        kill_in_turn(both, (3, 2, 1, 0))
        assert ask_all(both) == expected
        both.process.send_signal(signal.SIGTERM)
        assert both.end() == 0
        assert both.leaves_nothing()
    with service(model, tmp_path_factory.mktemp("again"), *experts, *TWO, *disk) as again:
        choices, num_cached = ask(again, bodies()[0])
        assert (choices, num_cached > 0) == (expected[0], True)


def test_stages_whose_ranks_share_each_layer_have_the_answers_of_one_stage(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shards = ("--tensor-parallel-size", "2", *PATIENT)
    disk = ("--kv-disk-path", str(tmp_path_factory.mktemp("kv")))
    with service(model, tmp_path_factory.mktemp("one"), *shards) as one:
        expected = ask_all(one)
    with service(model, tmp_path_factory.mktemp("both"), *shards, *TWO, *disk) as both:
        for _ in range(2):
            assert ask_all(both) == expected
        kill_in_turn(both, (3, 2, 1, 0))
        assert ask_all(both) == expected
        both.process.send_signal(signal.SIGTERM)
        assert both.end() == 0
        assert both.leaves_nothing()
    with service(model, tmp_path_factory.mktemp("again"), *shards, *TWO, *disk) as again:
        choices, num_cached = ask(again, bodies()[0])
        assert (choices, num_cached > 0) == (expected[0], True)


def test_a_killed_rank_is_a_pause_and_no_whole_start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with service(model, tmp_path_factory.mktemp("s"), *TWO) as running:
        expected = ask_all(running)
        kill_in_turn(running, (1, 0))
        assert ask_all(running) == expected
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
        assert running.leaves_nothing()


@pytest.mark.parametrize(
    ("num_batches", "num_kills"), [(8, 2), pytest.param(1000, 40, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_random_batches_between_kills_have_the_answers_of_one_rank(
    model: Path, tmp_path_factory: pytest.TempPathFactory, num_batches: int, num_kills: int
) -> None:
    """With cached prefixes, in memory and on disk, drafts, grammars, and little memory, so that requests are
    preempted."""
    random = Random(num_batches)
    with service(model, tmp_path_factory.mktemp("one"), *PATIENT) as one:
        expected = [ask(one, body)[0] for body in bodies()]
    settings = ("--speculative-config", "suffix", "--kv-cache-memory", "100KiB", "--max-model-len", "160")
    disk = ("--kv-disk-path", str(tmp_path_factory.mktemp("kv")), "--max-num-seqs", "4", "--max-restarts", "1000")
    killing = set(random.sample(range(num_batches), num_kills))
    with service(model, tmp_path_factory.mktemp("two"), *TWO, *settings, *disk) as two, ThreadPoolExecutor(6) as pool:
        for batch in range(num_batches):
            places = random.sample(range(len(expected)), random.randint(1, 6))
            found = [pool.submit(ask, two, bodies()[place]) for place in places]
            copy = pid_of(two, f"rank {random.randint(0, 1)}")
            if batch in killing and copy is not None:
                os.kill(copy, signal.SIGKILL)
            assert [one.result()[0] for one in found] == [expected[place] for place in places]


@pytest.fixture
def watched(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(model, tmp_path_factory.mktemp("s"), *WATCHED) as started:
        yield started


@pytest.mark.parametrize(("rank", "is_busy"), [(1, True), pytest.param(1, False, marks=pytest.mark.long), (0, True)])
def test_a_stopped_rank_is_found_out_and_named(watched: Service, rank: int, is_busy: bool) -> None:
    stopped = pid_of(watched, f"rank {rank}")
    assert stopped is not None
    if is_busy:
        events = watched.stream(max_tokens=MAX_POSITION // 2)
        next(events)
    os.kill(stopped, signal.SIGSTOP)
    if is_busy:
        assert "error" in list(events)[-1]
    assert watched.end() == 1
    said = watched.errors.read_text()
    assert f"Rank {rank}" in said, said
    assert "hung" in said
    assert watched.leaves_nothing()


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_a_stopped_rank_is_named_though_the_other_rank_of_its_stage_waits_for_it(
    model: Path, tmp_path_factory: pytest.TempPathFactory, rank: int
) -> None:
    with service(model, tmp_path_factory.mktemp("s"), *WATCHED, "--expert-parallel-size", "2") as running:
        stopped = pid_of(running, f"rank {rank}")
        assert stopped is not None
        events = running.stream(max_tokens=MAX_POSITION // 2)
        next(events)
        os.kill(stopped, signal.SIGSTOP)
        assert "error" in list(events)[-1]
        assert running.end() == 1
        assert f"Rank {rank} (process {stopped})" in running.errors.read_text()
        assert running.leaves_nothing()


def test_a_request_that_is_aborted_on_the_way_leaves_no_block_behind(watched: Service) -> None:
    for _ in range(3):
        events = watched.stream(max_tokens=MAX_POSITION // 2)
        next(events)
        events.close()  # type: ignore[attr-defined]
    wait_until(lambda: 'moeserve_kv_blocks{state="leased"} 0.0' in watched.http.get("/metrics").text)
    assert ask(watched, bodies()[0])[0] == ask(watched, bodies()[0])[0]


def test_a_model_on_transformers_code_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    with service(model, tmp_path, *TWO, "--model-impl", "transformers", ready=False) as refused:
        assert refused.end() == 2
        assert "mixtral model, which transformers' code" in refused.errors.read_text()
