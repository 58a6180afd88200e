"""A service of two ranks: the tokens of one rank, prefix hits on both, and an end that names the rank at fault."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.experts.synthetic_traces import SyntheticSpec, synthetic_trace
from experts.routing.choices import RoutingStatistics, StatisticsSpec
from experts.routing.files import load_statistics, save_statistics
from moeserve.engine.experts.settings import statistics_key
from tests.support.kills import pid_of
from tests.support.saved_models import saved_model
from tests.support.service import Service, children_of, descendants, is_alive, listening_addresses, service, wait_until
from tests.support.tiny_checkpoint import MAX_POSITION
from tests.support.tiny_model import write_model_dir

REPLICAS = ("--num-redundant-experts", "4")
# Experts are placed anew as often as that can be.
RESTLESS = ("--rebalance-interval", "1", "--rebalance-threshold", "0")
FOUR = ("--expert-parallel-size", "4", "--engine-timeout", "60")
TWO = ("--expert-parallel-size", "2", "--engine-timeout", "60")
# A rank that hangs is to be found soon.
WATCHED = (*TWO, "--engine-timeout", "6", "--max-restarts", "0")


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    shared = [[rng.randrange(3, 60) for _ in range(90)] for _ in range(3)]
    return [shared[n % 3] + [rng.randrange(3, 60) for _ in range(1 + n)] for n in range(12)]


def complete(running: Service, prompt: list[int]) -> tuple[str, int]:
    """The text and the number of cached prompt tokens."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = running.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def complete_constrained(running: Service) -> list[str]:
    """Drawn answers that a grammar holds, several at once, so that some are computed on each rank."""
    body = {"model": "m", "max_tokens": 40, "temperature": 1.5, "guided_regex": "[a-f]{4,12}-[0-9]{2}"}

    def draw(seed: int) -> str:
        answer = running.http.post("/v1/completions", json={**body, "prompt": prompts()[seed], "seed": seed}).json()
        return str(answer["choices"][0]["text"])

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(draw, range(8)))


def complete_all(running: Service) -> list[tuple[str, int]]:
    """Requests that come and go: at most five at a time, each longer than the one before."""
    with ThreadPoolExecutor(5) as pool:
        return list(pool.map(lambda prompt: complete(running, prompt), prompts()))


def links(running: Service) -> dict[tuple[str, str], float]:
    """Rows sent from rank to rank."""
    found = re.findall(
        r'moeserve_expert_link_rows_total{from="(\d)",to="(\d)"} (\S+)', running.http.get("/metrics").text
    )
    return {(source, target): float(rows) for source, target, rows in found}


def links_after(running: Service, answers: list[tuple[str, int]]) -> dict[tuple[str, str], float]:
    """Once the metrics tell of all that was computed for the answers, to `prompts` again and again."""
    lengths = [len(prompt) for prompt in prompts()]
    computed = sum(lengths[n % len(lengths)] + 23 - cached for n, (_, cached) in enumerate(answers))
    told = f"moeserve_expert_recorded_tokens_total {float(computed)}\n"
    wait_until(lambda: told in running.http.get("/metrics").text)
    return links(running)


def ask_again(running: Service, expected: list[str], answers: list[tuple[str, int]]) -> set[str]:
    """Ask all prompts, several at once, and again; return the ranks that have sent rows the second time.

    answers: all of the service so far. Grows.
    """
    answers += complete_all(running)
    before = links_after(running, answers)
    # One at a time, so that each goes where its prefix lies, whatever the load.
    again = [complete(running, prompt) for prompt in prompts()]
    assert all(cached > 0 for _, cached in again)
    answers += again
    after = links_after(running, answers)
    assert [text for text, _ in answers[-2 * len(expected) :]] == 2 * expected
    return {source for source, target in after if after[source, target] > before.get((source, target), 0)}


def ranks_of(running: Service) -> list[int]:
    """Pids of the ranks, in order."""
    agent = children_of(running.process.pid)["worker"]
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    ranks = {}
    for pid in children:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks[next(int(entry[5:]) for entry in environment if entry.startswith(b"RANK="))] = int(pid)
    return [ranks[rank] for rank in range(len(ranks))]


def num_placed_anew(running: Service) -> int:
    """The layers whose experts have been placed anew."""
    return running.errors.read_text().count("layer_placed_anew")


def write_statistics(model: Path) -> Path:
    """A file as an earlier run of the mixtral case leaves it, of made-up routing."""
    trace = synthetic_trace(SyntheticSpec(3, 8, 2, popularity=0.8), 8, 40, seed=0)
    statistics = RoutingStatistics(StatisticsSpec(3, 8, 2))
    statistics.update(trace.ids)
    file = model / "statistics"
    save_statistics(file, statistics, statistics_key(model))
    return file


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """For tests that leave it as it is."""
    with service(model, tmp_path_factory.mktemp("s"), *TWO) as started:
        yield started


@pytest.fixture
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(model, tmp_path_factory.mktemp("s"), *WATCHED) as started:
        yield started


def test_public_prefixes_are_kept_on_every_rank(model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("admin:root\n" + "".join(f"user:key-{number}\n" for number in range(8)))
    prompt = "A rule for all who ask. " * 12
    (tmp_path / "public.json").write_text(json.dumps([{"prompt": prompt}]))
    settings = ("--api-key-file", str(tmp_path / "keys"), "--public-prefixes", str(tmp_path / "public.json"))

    def ask(number: int) -> int:
        body = {"model": "m", "prompt": f"{prompt}{number}", "max_tokens": 8}
        answer = running.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer key-{number}"})
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    with service(model, tmp_path, *TWO, *settings) as running:
        root = {"authorization": "Bearer root"}
        # One on each rank.
        wait_until(lambda: "moeserve_kv_pinned_prefixes 2.0" in running.http.get("/metrics", headers=root).text)
        # More at once than one rank would be given.
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(ask, range(8))) == {len(prompt) // 16 * 16}


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("mixtral", ["--placement", "coactivation", "--num-redundant-experts", "2"]),
        pytest.param("qwen3_moe", ["--dispatch", "allgather"], marks=pytest.mark.long),
        ("qwen3_moe", ["--dispatch", "alltoall", "--placement", "round-robin", *REPLICAS, *RESTLESS]),
        pytest.param("glm4_moe", [], marks=pytest.mark.long),
        pytest.param("glm4_moe", [*FOUR, "--dispatch", "allgather", *REPLICAS, *RESTLESS], marks=pytest.mark.long),
        pytest.param("gpt_oss", [*FOUR, "--dispatch", "alltoall", *RESTLESS], marks=pytest.mark.long),
        pytest.param("qwen3_moe", [*FOUR, "--dispatch", "fixed", *RESTLESS], marks=pytest.mark.long),
    ],
)
def test_several_ranks_give_the_text_of_one_and_end_cleanly(
    tmp_path_factory: pytest.TempPathFactory, case: str, settings: list[str]
) -> None:
    model = tmp_path_factory.mktemp(case)
    write_model_dir(model)
    saved_model(case, model)
    if "coactivation" in settings:
        settings = [*settings, "--expert-statistics", str(write_statistics(model))]
    with service(model, tmp_path_factory.mktemp("one")) as one:
        expected = [text for text, _ in complete_all(one)]
    with service(model, tmp_path_factory.mktemp("two"), *TWO, *settings) as two:
        pids = ranks_of(two)
        assert len(pids) == (4 if "4" in settings[:2] else 2)
        answers: list[tuple[str, int]] = []
        sources = ask_again(two, expected, answers)
        # Rows travel from the home of a request, so prefixes were found on more than one rank. A busy machine may send
        # one prompt after the other, and all to one rank.
        while "alltoall" in settings and len(sources) < 2:
            two.http.post("/reset_prefix_cache")
            sources = ask_again(two, expected, answers)
        if "--rebalance-interval" in settings:
            # Experts are read beside the steps, which do not wait for them.
            while num_placed_anew(two) <= 5:
                assert [text for text, _ in complete_all(two)] == expected
        assert (num_placed_anew(two) > 0) == ("--rebalance-interval" in settings)
        two.process.send_signal(signal.SIGTERM)
        assert two.end() == 0
        assert two.leaves_nothing()
        wait_until(lambda: not any(map(is_alive, pids)))


def test_grammars_hold_on_every_rank(shared: Service, model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with service(model, tmp_path_factory.mktemp("one")) as one:
        expected = complete_constrained(one)
    assert all(re.fullmatch("[a-f]{4,12}-[0-9]{2}", text) for text in expected)
    assert complete_constrained(shared) == expected


def test_on_one_node_nothing_listens_but_on_loopback(shared: Service) -> None:
    complete(shared, prompts()[0])
    found = listening_addresses({shared.process.pid} | descendants(shared.process.pid))
    # HTTP, and each rank for the collectives.
    assert found.pop("127.0.0.1") >= 3
    assert not found


def test_what_two_ranks_saw_is_saved_at_the_end(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "statistics"
    with service(model, tmp_path, *TWO, "--expert-statistics", str(file)) as running:
        described = running.http.get("/v1/experts").json()
        assert described["num_ranks"] == 2
        assert described["placement"]["ranks"] == [[[0], [0], [1], [1]]] * 2
        assert len(described["balancedness"]["ranks"]) == 2
        usage = [complete(running, prompt) for prompt in prompts()[:4]]
        computed = described["recording"]["tokens"]
        computed += sum(len(prompt) + 23 - cached for prompt, (_, cached) in zip(prompts(), usage, strict=False))
        assert running.http.get("/v1/experts").json()["recording"]["tokens"] == computed
        wait_until(lambda: min(links(running).get(pair, 0) for pair in (("0", "1"), ("1", "0"))) > 0)
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
    statistics = load_statistics(file, statistics_key(model))
    assert statistics.load().sum(axis=1)[0] == pytest.approx(computed * statistics.spec.top_k, rel=0.01)


# `tests/cpu/test_ranked_executor.py` has the others every time.
KILLED = [(0, True), pytest.param(1, True, marks=pytest.mark.long), (1, False)]
STOPPED = [(0, True), (1, True), pytest.param(1, False, marks=pytest.mark.long)]


@pytest.mark.parametrize(("rank", "is_busy"), KILLED)
def test_a_killed_rank_ends_everything_and_is_named(running: Service, rank: int, is_busy: bool) -> None:
    pids = ranks_of(running)
    if is_busy:
        events = running.stream(max_tokens=MAX_POSITION // 2)
        next(events)
    os.kill(pids[rank], signal.SIGKILL)
    if is_busy:
        assert "error" in list(events)[-1]
    assert running.end() == 1
    assert f"Rank {rank} (process {pids[rank]})" in running.errors.read_text()
    assert running.leaves_nothing()
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(("rank", "is_busy"), STOPPED)
def test_a_stopped_rank_is_found_out_and_named(running: Service, rank: int, is_busy: bool) -> None:
    pids = ranks_of(running)
    if is_busy:
        events = running.stream(max_tokens=MAX_POSITION // 2)
        next(events)
    os.kill(pids[rank], signal.SIGSTOP)
    if is_busy:
        assert "error" in list(events)[-1]
    assert running.end() == 1
    said = running.errors.read_text()
    assert f"Rank {rank}" in said, said
    assert "hung" in said
    assert running.leaves_nothing()
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize("forked", [True, pytest.param(False, id="as users start it", marks=pytest.mark.long)])
def test_a_killed_supervisor_takes_the_ranks_with_it(model: Path, tmp_path: Path, forked: bool) -> None:
    with service(model, tmp_path, *WATCHED, forked=forked) as running:
        pids = ranks_of(running)
        running.process.kill()
        running.process.wait()
        wait_until(lambda: not any(map(is_alive, pids)) and running.leaves_nothing())


def test_a_killed_rank_costs_a_copy_of_each_and_no_whole_start(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with service(model, tmp_path_factory.mktemp("s"), *TWO) as running:
        expected = [text for text, _ in complete_all(running)]
        loaded = ranks_of(running)
        for rank in (1, 0):
            events = running.stream(max_tokens=300)
            next(events)
            copy = pid_of(running, f"rank {rank}")
            assert copy is not None
            os.kill(copy, signal.SIGKILL)
            assert "error" not in list(events)[-1]
            # The stream may have been whole before.
            named = f"Rank {rank} (process {copy})"
            wait_until(lambda named=named: named in running.errors.read_text())
            wait_until(lambda rank=rank, copy=copy: pid_of(running, f"rank {rank}") not in (None, copy))
        # The processes that have loaded their parts are still the same.
        assert ranks_of(running) == loaded
        assert [text for text, _ in complete_all(running)] == expected
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
        assert running.leaves_nothing()
