"""Every signal to every process of a service in every phase: each answer is whole and the same, or has one clear end.

The table of docs/reliability.md comes from KILLS_TABLE=FILE, with `-m 'long or not long'` for the whole matrix.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import product
from pathlib import Path

import httpx2
import pytest

from tests.support.crash_traffic import KINDS, Answered, Traffic
from tests.support.kills import Kill, assert_nothing_is_left, assert_whole, kill, pid_of
from tests.support.service import Service, children_of, service, wait_until

SIGNALS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM, signal.SIGSTOP)
# The part of the matrix that is in the short suite, beside the tests of single processes.
SHORT = {("engine", "drain"), ("rank", "migration")}
SHORT_OF_TWO_HTTP_PROCESSES = {("engine", "prefill")}
# On a busy machine too every request is to be answered, and a drain to last until it is.
SLOW = ("--slo", "ttft:100s", "--shutdown-timeout", "100")
BOTH = ("--max-restarts", "1000", "--max-model-len", "32768", "--max-num-batched-tokens", "256", *SLOW)
ONE = ("--engine-timeout", "4", *BOTH)
TWO = ("--engine-timeout", "10", "--expert-parallel-size", "2", *BOTH)
# Experts are placed anew as often as that can be.
RESTLESS = ("--rebalance-interval", "1", "--rebalance-threshold", "0")
_WORDS = "It was the age of wisdom, it was the age of foolishness, " * 50
PROMPTS = {
    f"long prompt {number}": (
        "/v1/completions",
        {"prompt": f"{number} {_WORDS}", "max_tokens": 20, "temperature": 1.0, "seed": number, "stream": True},
    )
    for number in range(3)
}
TRAFFIC = {
    name: KINDS[name]
    for name in ("greedy", "sampled stream", "penalties", "several choices", "schema", "tool call", "pattern")
}


@pytest.fixture(scope="module")
def one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(model, tmp_path_factory.mktemp("s"), *ONE) as started:
        yield started


@pytest.fixture(scope="module")
def two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(model, tmp_path_factory.mktemp("s"), *TWO) as started:
        yield started


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with two HTTP processes."""
    with service(model, tmp_path_factory.mktemp("s"), *ONE, "--num-frontends", "2") as started:
        yield started


@pytest.fixture(scope="module")
def restless(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(model, tmp_path_factory.mktemp("s"), *TWO, *RESTLESS) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(both: Service) -> dict[str, Answered]:
    """The answers of a service of one rank, before anything happens to it; several ranks answer the same."""
    answers = Traffic(str(both.http.base_url), TRAFFIC | PROMPTS).start().wait()
    assert {name: answer.status for name, answer in answers.items()} == dict.fromkeys(answers, 200)
    return answers


def cells(
    targets: Sequence[str],
    phases: Sequence[str],
    numbers: Sequence[signal.Signals] = SIGNALS,
    short: Collection[tuple[str, str]] = SHORT,
) -> pytest.MarkDecorator:
    """Parametrize a test by `target`, `phase` and `number`. A target `rank` is rank 1 and rank 0 in turn.

    short: targets and phases whose SIGKILL is in the short suite.
    """
    parameters = []
    for place, (target, phase, number) in enumerate(product(targets, phases, numbers)):
        marks = () if (target, phase) in short and number == signal.SIGKILL else pytest.mark.long
        name = f"rank {(place + 1) % 2}" if target == "rank" else target
        parameters.append(pytest.param(name, phase, number, id=f"{name}-{phase}-{number.name}", marks=marks))
    return pytest.mark.parametrize(("target", "phase", "number"), parameters)


def hit_amid(killing: Kill) -> Traffic:
    """Bring the service into the phase, send the signal, and return the requests that were open or came next."""
    running = killing.running
    if killing.phase in ("prefill", "migration"):
        traffic = amid_prompts(running) if killing.phase == "prefill" else amid_migration(running)
        killing.hit()
        return traffic
    traffic = Traffic(str(running.http.base_url), TRAFFIC)
    if killing.phase == "idle":
        killing.hit()
        return traffic.start()
    if killing.phase == "start":
        first = pid_of(running, killing.target)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: pid_of(running, killing.target) not in (None, first), timeout=60)
        traffic.start()
    else:
        traffic.start()
        assert traffic.started.wait(60)
        assert traffic.admitted.wait(60)
    killing.hit()
    return traffic


def amid_migration(running: Service) -> Traffic:
    """Return requests of which some are answered while experts are placed anew."""

    def num_placed() -> int:
        return running.errors.read_text().count("layer_placed_anew")

    while True:
        before = num_placed()
        traffic = Traffic(str(running.http.base_url), TRAFFIC).start()
        assert traffic.started.wait(60)
        wait_until(lambda before=before, traffic=traffic: num_placed() > before or traffic.has_ended)
        if not traffic.has_ended:
            return traffic


def amid_prompts(running: Service) -> Traffic:
    """Return requests of which one is answered while long prompts are computed."""
    while True:
        # Prompts that nobody has left in the cache.
        salt = {"cache_salt": os.urandom(8).hex()}
        prompts = {name: (path, body | salt) for name, (path, body) in PROMPTS.items()}
        traffic = Traffic(str(running.http.base_url), TRAFFIC | prompts).start()
        # Short requests pass the long prompts.
        assert traffic.started.wait(60)
        if not all(traffic.answers[name].num_events for name in PROMPTS):
            return traffic
        # The machine is busy: it let the prompts be read before this thread.
        traffic.wait()


def outlive(
    running: Service, target: str, phase: str, number: signal.Signals, undisturbed: dict[str, Answered]
) -> None:
    """Kill a process of a service that goes on, and see that nothing of it is left."""
    running.http.post("/reset_prefix_cache")
    with kill(running, target, phase, number) as killing:
        traffic = hit_amid(killing)
        allowed = {"same"}
        if target == "frontend":
            allowed |= {"error", "refused"}
            if phase != "decode" or number == signal.SIGTERM:
                # The supervisor tells the clients of open requests; new ones may find a process that is just ending.
                allowed |= {"cut"}
        elif phase in ("start", "idle"):
            # Where a restart takes long they are told to come again.
            allowed |= {"refused"}
        killing.judge(traffic, undisturbed, allowed)
        if target == "supervisor":
            running.process.send_signal(signal.SIGCONT)
        assert_whole(running, killing.seen)


@cells(["engine", "frontend"], ["start", "idle", "prefill", "decode"])
def test_a_service_of_one_rank_goes_on(
    one: Service, undisturbed: dict[str, Answered], target: str, phase: str, number: signal.Signals
) -> None:
    outlive(one, target, phase, number, undisturbed)


@cells(["engine"], ["start", "idle", "prefill", "decode"], short=SHORT_OF_TWO_HTTP_PROCESSES)
def test_a_service_of_two_http_processes_goes_on(
    both: Service, undisturbed: dict[str, Answered], target: str, phase: str, number: signal.Signals
) -> None:
    outlive(both, target, phase, number, undisturbed)


def pairs() -> pytest.MarkDecorator:
    """Parametrize a test by the phase, the seconds between two ends of the engine, and the signal of the first one."""
    parameters = []
    for phase, apart, number in product(("prefill", "decode"), (0.1, 0.3, 1.0, 3.0), SIGNALS):
        marks = () if (phase, apart, number) == ("decode", 0.3, signal.SIGKILL) else pytest.mark.long
        parameters.append(pytest.param(phase, apart, number, id=f"{phase}-{apart}-{number.name}", marks=marks))
    return pytest.mark.parametrize(("phase", "apart", "number"), parameters)


@pairs()
def test_unrelated_ends_soon_after_each_other_end_no_stream(
    both: Service, undisturbed: dict[str, Answered], phase: str, apart: float, number: signal.Signals
) -> None:
    """The second end is a SIGKILL, in whatever the next engine is just doing: loading, trials, prompts, decoding."""
    both.http.post("/reset_prefix_cache")
    with kill(both, "engine", phase, number) as killing:
        traffic = hit_amid(killing)
        if number == signal.SIGSTOP:
            wait_until(lambda: killing.watch.found is not None, timeout=60)
        time.sleep(apart)
        wait_until(lambda: pid_of(both, "engine") is not None, timeout=60)
        killing.hit_again()
        killing.judge(traffic, undisturbed, {"same"})
        assert_whole(both, killing.seen)


@cells(["supervisor"], ["idle", "prefill", "decode"], [signal.SIGSTOP])
def test_a_stopped_supervisor_holds_up_nobody(
    one: Service, undisturbed: dict[str, Answered], target: str, phase: str, number: signal.Signals
) -> None:
    outlive(one, target, phase, number, undisturbed)


@cells(["rank"], ["start", "idle", "prefill", "decode"])
def test_a_service_of_two_ranks_goes_on(
    two: Service, undisturbed: dict[str, Answered], target: str, phase: str, number: signal.Signals
) -> None:
    outlive(two, target, phase, number, undisturbed)


@cells(["rank", "frontend"], ["migration"])
def test_a_service_that_moves_experts_goes_on(
    restless: Service, undisturbed: dict[str, Answered], target: str, phase: str, number: signal.Signals
) -> None:
    outlive(restless, target, phase, number, undisturbed)


@pytest.mark.parametrize("ranks", [ONE, TWO], ids=["one rank", "two ranks"])
@cells(["supervisor"], ["start"])
def test_a_supervisor_leaves_nothing_while_it_loads(
    model: Path, tmp_path: Path, target: str, phase: str, number: signal.Signals, ranks: tuple[str, ...]
) -> None:
    with service(model, tmp_path, *ranks, ready=False) as running:
        wait_until(lambda: len(children_of(running.process.pid)) == 2)
        with kill(running, target, phase, number) as killing:
            killing.hit()
            if number == signal.SIGSTOP:
                running.process.send_signal(signal.SIGCONT)
                running.wait_until_ready()
                running.process.send_signal(signal.SIGTERM)
            code = running.end()
            assert code == (0 if number in (signal.SIGTERM, signal.SIGSTOP) else -number)
            assert_nothing_is_left(running, killing)


@cells(["supervisor"], ["idle", "prefill", "decode", "migration"], SIGNALS[:-1])
def test_a_supervisor_leaves_nothing(
    model: Path,
    tmp_path: Path,
    undisturbed: dict[str, Answered],
    target: str,
    phase: str,
    number: signal.Signals,
) -> None:
    settings = (*TWO, *RESTLESS) if phase == "migration" else ONE
    with service(model, tmp_path, *settings) as running, kill(running, target, phase, number) as killing:
        traffic = hit_amid(killing)
        drains = number == signal.SIGTERM
        # The shortest may be whole just before. Some come at that moment, and find nobody.
        late = {"cut"} if phase in ("idle", "prefill") else set()
        killing.judge(traffic, undisturbed, late | {"refused", "same"} | (set() if drains else {"error"}))
        assert not any(answer.status for answer in traffic.answers.values() if answer.error)
        assert drains or set(killing.outcomes) != {"same"}
        assert running.end() == (0 if drains else -number)
        assert_nothing_is_left(running, killing)


@cells(["engine", "frontend", "supervisor", "rank"], ["drain"])
def test_a_drain_goes_on_or_tells_of_its_end(
    model: Path,
    tmp_path: Path,
    undisturbed: dict[str, Answered],
    target: str,
    phase: str,
    number: signal.Signals,
) -> None:
    settings = TWO if target.startswith("rank") else ONE
    with service(model, tmp_path, *settings) as running, kill(running, target, phase, number) as killing:
        traffic = Traffic(str(running.http.base_url), TRAFFIC).start()
        assert traffic.started.wait(60)
        assert traffic.admitted.wait(60)
        # Nobody judges this one: while it is open, the drain is not over.
        holding = running.stream(30_000, prompt="and so on")
        next(holding)
        running.process.send_signal(signal.SIGTERM)
        with httpx2.Client(base_url=running.http.base_url, timeout=60) as other:
            wait_until(lambda: other.get("/ready").status_code == 503)
        killing.hit()
        # The one that is no stream may have come too late.
        allowed, code = {"same", "refused"}, 0
        if target == "frontend":
            # A second SIGTERM stops it at once, and in an orderly way. Else the supervisor ends its streams.
            allowed.add("error")
            code = int(number != signal.SIGTERM)
        elif target == "supervisor" and number != signal.SIGSTOP:
            allowed.add("error")
            code = 128 + number if number == signal.SIGTERM else -number
        killing.judge(traffic, undisturbed, allowed)
        holding.close()  # type: ignore[attr-defined]
        if target == "supervisor" and number == signal.SIGSTOP:
            running.process.send_signal(signal.SIGCONT)
        assert running.end() == code
        assert_nothing_is_left(running, killing)
