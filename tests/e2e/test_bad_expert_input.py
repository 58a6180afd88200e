"""Bad input about experts: one sentence and a failing exit code before anything is served, or for open requests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from experts.routing.choices import RoutingStatistics, StatisticsSpec
from experts.routing.files import save_statistics
from tests.support.saved_models import saved_model
from tests.support.service import Service, service, wait_until
from tests.support.slot_bytes import slots_on_cpu
from tests.support.tiny_model import write_model_dir

ONE: tuple[str, ...] = ()
TWO = ("--expert-parallel-size", "2", "--engine-timeout", "6")


def on_ranks(short: int) -> pytest.MarkDecorator:
    """On one rank and on two; only `short` is tested every time."""
    ranks = {1: ONE, 2: TWO}
    return pytest.mark.parametrize(
        "ranks",
        [
            pytest.param(ranks[count], id=f"{count}", marks=[] if count == short else pytest.mark.long)
            for count in (1, 2)
        ],
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    write_model_dir(folder)
    saved_model("mixtral", folder, max_position_embeddings=8192)
    return folder


@pytest.fixture(scope="module")
def bounded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings under which experts are read from a file, which is there."""
    store = tmp_path_factory.mktemp("store")
    settings = (
        "--expert-memory",
        str(slots_on_cpu(model, 2)),
        "--expert-prefetch",
        "off",
        "--expert-store-dir",
        str(store),
    )
    with service(model, tmp_path_factory.mktemp("first"), *settings) as first:
        wait_until(lambda: bool(list(store.glob("*/experts.bin"))))
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 0
    return settings


def expert_file(bounded: tuple[str, ...]) -> Path:
    (path,) = Path(bounded[-1]).glob("*/experts.bin")
    return path


def refused(model: Path, folder: Path, *settings: str) -> str:
    """The one sentence with which a start ends that never gets ready."""
    run_root = folder / "run"
    run_root.mkdir()
    started = Service(model, run_root, "--kv-cache-memory", "1MiB", *settings)
    try:
        out, _ = started.process.communicate(timeout=60)
    finally:
        started.process.kill()
    assert "ready on" not in out
    assert started.process.returncode in (1, 2)
    return one_sentence(started)


def one_sentence(ended: Service) -> str:
    said = ended.errors.read_text()
    assert "Traceback" not in said
    (sentence,) = [line for line in said.splitlines() if line.startswith("Error: ")]
    assert sentence.endswith(".")
    return sentence


@on_ranks(1)
def test_too_little_memory_for_the_experts_of_a_token(model: Path, tmp_path: Path, ranks: tuple[str, ...]) -> None:
    sentence = refused(model, tmp_path, "--expert-memory", "100KB", *ranks)
    assert "holds 1 experts" in sentence
    assert "give at least" in sentence


def test_experts_that_ranks_cannot_share(model: Path, tmp_path: Path) -> None:
    sentence = refused(model, tmp_path, "--expert-parallel-size", "3")
    assert all(count in sentence for count in ("8 experts", "3 ranks"))


@pytest.mark.parametrize(
    "settings",
    [ONE, pytest.param(("--no-record-experts",), marks=pytest.mark.long), pytest.param(TWO, marks=pytest.mark.long)],
)
def test_statistics_of_another_model_end_the_start(model: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    file = tmp_path / "statistics.safetensors"
    save_statistics(file, RoutingStatistics(StatisticsSpec(3, 8, 2)), "another")
    assert f"{file} belongs to another model" in refused(model, tmp_path, "--expert-statistics", str(file), *settings)


@on_ranks(2)
def test_a_torn_expert_file_ends_the_start_and_stays(
    model: Path, tmp_path: Path, bounded: tuple[str, ...], ranks: tuple[str, ...]
) -> None:
    path = expert_file(bounded)
    whole, times = path.read_bytes(), path.stat()
    os.truncate(path, len(whole) // 2)
    try:
        sentence = refused(model, tmp_path, *bounded, *ranks)
        assert all(part in sentence for part in (f"{len(whole) // 2} bytes", f"{len(whole)}", f"delete {path}"))
        assert path.stat().st_size == len(whole) // 2
    finally:
        path.write_bytes(whole)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@on_ranks(2)
def test_an_expert_file_that_is_cut_while_serving(
    model: Path, tmp_path: Path, bounded: tuple[str, ...], ranks: tuple[str, ...]
) -> None:
    path = expert_file(bounded)
    whole = path.read_bytes()
    settings = (*bounded, *ranks, "--max-restarts", "0")
    with service(model, tmp_path, *settings) as running:
        # So long that none ends before the file is cut; all have begun then.
        streams = [running.stream(8000, prompt="hello", temperature=1.5, seed=number) for number in range(4)]
        for events in streams:
            next(events)
        try:
            os.truncate(path, 4096)
            last = [list(events)[-1] for events in streams]
            assert [event["error"]["code"] for event in last] == ["engine_dead"] * 4
            assert running.end() == 1
        finally:
            path.write_bytes(whole)
        assert f"{path} was cut off" in one_sentence(running)
        assert running.leaves_nothing()
