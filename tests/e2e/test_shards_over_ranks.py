"""A service whose layers are each on two ranks: one set of answers, whatever it is asked, and also after losing one."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.test_layers_over_ranks import PATIENT, ask, ask_all, bodies, kill_in_turn
from tests.support.kills import pid_of
from tests.support.saved_models import saved_model
from tests.support.service import descendants, is_alive, service, wait_until
from tests.support.slot_bytes import slots_on_cpu
from tests.support.tiny_model import write_model_dir

TWO = ("--tensor-parallel-size", "2", *PATIENT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("m")
    write_model_dir(directory)
    saved_model("qwen3_moe", directory, eos_token_id=1)
    return directory


# With experts, with states and shared experts, without experts; groups of ranks that share the experts.
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("qwen3_moe", ("--max-num-batched-tokens", "64")),
        ("qwen3_next", ("--speculative-config", "suffix")),
        ("qwen3", ("--kv-cache-memory", "150KiB", "--max-model-len", "160", "--max-num-seqs", "4")),
        ("qwen2_moe", ("--expert-parallel-size", "2")),
        pytest.param("gpt_oss", (), marks=pytest.mark.long),
    ],
)
def test_ranks_that_share_each_layer_give_the_answers_of_one_rank_and_end_cleanly(
    tmp_path_factory: pytest.TempPathFactory, case: str, settings: tuple[str, ...]
) -> None:
    directory = tmp_path_factory.mktemp(case)
    write_model_dir(directory)
    saved_model(case, directory, eos_token_id=1)
    asked = [body for body in bodies() if case != "qwen3_next" or "use_beam_search" not in body]
    with service(directory, tmp_path_factory.mktemp("one"), *PATIENT) as one:
        expected = [ask(one, body)[0] for body in asked]
    with service(directory, tmp_path_factory.mktemp("two"), *TWO, *settings) as two:
        processes = descendants(two.process.pid)
        alone = [ask(two, body)[0] for body in asked]
        assert [[choice["text"] for choice in choices] for choices in alone] == [
            [choice["text"] for choice in choices] for choices in expected
        ]
        with ThreadPoolExecutor(5) as pool:
            assert [choices for choices, _ in pool.map(lambda body: ask(two, body), asked)] == alone
        assert [ask(two, asked[0])[1] > 0 for _ in range(2)][-1]
        assert two.http.get("/server_info").json()["tp_size"] == 2
        two.process.send_signal(signal.SIGTERM)
        assert two.end() == 0
        assert two.leaves_nothing()
        wait_until(lambda: not any(map(is_alive, processes)))


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [((), (1, 0)), pytest.param(("--expert-parallel-size", "2"), (3, 1, 2, 0), marks=pytest.mark.long)],
)
def test_a_killed_rank_is_a_pause_and_no_whole_start(
    model: Path, tmp_path_factory: pytest.TempPathFactory, settings: tuple[str, ...], ranks: tuple[int, ...]
) -> None:
    with service(model, tmp_path_factory.mktemp("s"), *TWO, *settings) as running:
        expected = ask_all(running)
        kill_in_turn(running, ranks)
        assert ask_all(running) == expected
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
        assert running.leaves_nothing()


@pytest.mark.parametrize(
    "more", [(), pytest.param(("--pipeline-parallel-size", "2"), marks=pytest.mark.long)], ids=["shards", "both"]
)
def test_two_faults_at_once_or_one_after_the_other_cut_no_stream(
    model: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    last = 3 if more else 1

    def hit(rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        pid = pid_of(running, f"rank {rank}")
        assert pid is not None
        os.kill(pid, number)

    with service(model, tmp_path, *TWO, *more, "--max-restarts", "20") as running:
        whole = [event["choices"] for event in running.stream(max_tokens=150, temperature=1.0, seed=3)]
        for first, second, number in ((0, last, signal.SIGKILL), (last, 0, signal.SIGKILL), (last, 0, signal.SIGSTOP)):
            events = running.stream(max_tokens=150, temperature=1.0, seed=3)
            begun = next(events)
            hit(second, number)
            hit(first)
            assert [event["choices"] for event in (begun, *events)] == whole
        # The next life, before it serves.
        before = pid_of(running, f"rank {last}")
        events = running.stream(max_tokens=150, temperature=1.0, seed=3)
        begun = next(events)
        hit(0)
        wait_until(lambda: pid_of(running, f"rank {last}") not in (None, before))
        hit(last)
        assert [event["choices"] for event in (begun, *events)] == whole
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
        assert running.leaves_nothing()


def test_few_slots_for_the_experts_of_each_rank_change_no_answer(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with service(model, tmp_path_factory.mktemp("all"), *TWO) as running:
        expected = ask_all(running)
    slots = ("--expert-memory", str(slots_on_cpu(model, 3)), "--expert-store-dir", str(tmp_path_factory.mktemp("s")))
    with service(model, tmp_path_factory.mktemp("few"), *TWO, *slots) as running:
        assert ask_all(running) == expected
        told = running.http.get("/v1/experts").json()
        resident = told["residency"]["resident"]
        assert [[len(layer) for layer in layers] for layers in resident] == [[3] * len(resident[0])] * 2
        events = running.stream(max_tokens=100)
        next(events)
        killed = pid_of(running, "rank 1")
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        assert not any("error" in event for event in events)
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
        assert running.leaves_nothing()


def test_a_stopped_rank_is_found_out_and_named(model: Path, tmp_path: Path) -> None:
    with service(model, tmp_path, *TWO, "--engine-timeout", "6", "--max-restarts", "0") as watched:
        stopped = pid_of(watched, "rank 1")
        assert stopped is not None
        events = watched.stream(max_tokens=200)
        next(events)
        os.kill(stopped, signal.SIGSTOP)
        assert "error" in list(events)[-1]
        assert watched.end() == 1
        said = watched.errors.read_text()
        assert "Rank 1" in said, said
        assert watched.leaves_nothing()


def test_a_model_that_cannot_be_shared_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    for settings, said in (
        (("--model-impl", "transformers"), "qwen3_moe model, which transformers' code"),
        (("--tensor-parallel-size", "3"), "--tensor-parallel-size 3: 2 KV heads of this qwen3_moe model"),
    ):
        with service(model, tmp_path / settings[1], *TWO, *settings, ready=False) as refused:
            assert refused.end() == 2
            assert said in refused.errors.read_text()
