"""The build cache: built once, rebuilt when broken, never half-written, never by two at a time."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from moeserve.config import cache_root
from moeserve.model import cache
from moeserve.model.cache import ensure_built
from moeserve.model.spec import ModelError, Progress


class FakeBuilder:
    """Writes a small folder; can be told to fail half-way or to wait."""

    def __init__(self) -> None:
        self.builds = 0
        self.fail: BaseException | None = None
        self.started = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, folder: Path, report: Progress) -> None:
        self.builds += 1
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        self.started.set()
        assert self.may_go_on.wait(timeout=30)
        if self.fail is not None:
            raise self.fail
        (folder / "weights").write_bytes(b"w" * 1000)


@pytest.fixture
def builder() -> FakeBuilder:
    return FakeBuilder()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "demo"


def ensure(target: Path, builder: FakeBuilder, version: str = "test/1", progress: Progress | None = None) -> Path:
    return ensure_built(target, builder=version, build=builder, bytes_needed=1000, progress=progress)


def visible(target: Path) -> list[str]:
    """What lies in the cache beside the lock file."""
    return sorted(path.name for path in target.parent.iterdir() if not path.name.endswith(".lock"))


def test_a_model_is_built_once(target: Path, builder: FakeBuilder) -> None:
    assert ensure(target, builder) == target
    assert ensure(target, builder) == target
    assert builder.builds == 1
    assert (target / "weights").read_bytes() == b"w" * 1000
    assert visible(target) == ["demo"]


@pytest.mark.parametrize("name", ["weights", "config.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_broken_cache_is_rebuilt(target: Path, builder: FakeBuilder, name: str, damage: str) -> None:
    path = ensure(target, builder) / name
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        half, flipped = content[: len(content) // 2], bytes([content[0] ^ 1]) + content[1:]
        path.write_bytes(half if damage == "truncate" else flipped)
    ensure(target, builder)
    assert builder.builds == 2
    assert (target / "weights").read_bytes() == b"w" * 1000
    assert visible(target) == ["demo"]


def test_what_is_too_precious_is_refused_when_broken_and_rebuilt_when_removed_or_of_another_version(
    target: Path, builder: FakeBuilder
) -> None:
    def ensure_kept(version: str = "test/1") -> None:
        ensure_built(target, builder=version, build=builder, bytes_needed=1000, refuse_damaged="weights")

    ensure_kept()
    path = target / "weights"
    path.write_bytes(b"w" * 999)
    with pytest.raises(ModelError, match=f"has 999 bytes, but its manifest says 1000: delete {path}, and the next"):
        ensure_kept()
    assert builder.builds == 1
    ensure_kept("test/2")
    assert builder.builds == 2
    path.unlink()
    ensure_kept("test/2")
    assert builder.builds == 3


def test_a_folder_without_manifest_is_never_served(target: Path, builder: FakeBuilder) -> None:
    target.mkdir(parents=True)
    (target / "weights").write_bytes(b"half")
    ensure(target, builder)
    assert (target / "weights").read_bytes() == b"w" * 1000


def test_a_cache_of_another_version_is_rebuilt(target: Path, builder: FakeBuilder) -> None:
    ensure(target, builder)
    ensure(target, builder, version="test/2")
    assert builder.builds == 2


@pytest.mark.parametrize("failure", [ModelError("no"), KeyboardInterrupt()])
def test_a_failed_build_leaves_nothing_and_the_next_one_succeeds(
    target: Path, builder: FakeBuilder, failure: BaseException
) -> None:
    builder.fail = failure
    with pytest.raises(type(failure)):
        ensure(target, builder)
    assert visible(target) == []
    builder.fail = None
    ensure(target, builder)
    assert visible(target) == ["demo"]


def test_leftovers_of_a_killed_build_are_removed(target: Path, builder: FakeBuilder) -> None:
    leftover = target.parent / ".demo.tmp-abc" / "new"
    leftover.mkdir(parents=True)
    (leftover / "weights").write_bytes(b"half")
    ensure(target, builder)
    assert visible(target) == ["demo"]


def test_two_that_start_together_build_once(target: Path, builder: FakeBuilder) -> None:
    waiting = threading.Event()

    def second_progress(stage: str, done: int, total: int) -> None:
        if stage.startswith("wait"):
            waiting.set()

    builder.may_go_on.clear()
    first = threading.Thread(target=ensure, args=(target, builder))
    second = threading.Thread(target=ensure, args=(target, builder, "test/1", second_progress))
    first.start()
    assert builder.started.wait(timeout=30)
    second.start()
    assert waiting.wait(timeout=30)
    builder.may_go_on.set()
    first.join(timeout=30)
    second.join(timeout=30)
    assert builder.builds == 1
    assert visible(target) == ["demo"]


def test_a_disk_too_small_is_said_with_numbers(
    target: Path, builder: FakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**7))
    with pytest.raises(ModelError, match=r"needs 0\.75 GB in .*, but only 0\.01 GB are free"):
        ensure_built(target, builder="test/1", build=builder, bytes_needed=750_000_000)
    assert builder.builds == 0


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, builder: FakeBuilder) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match=r"cannot be written \(.*\): set MOESERVE_CACHE"):
        ensure(tmp_path / "cache" / "demo", builder)


def test_the_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("MOESERVE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert os.fspath(cache_root()) == "/home/someone/.cache/moeserve"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert os.fspath(cache_root()) == "/home/someone/.cache/moeserve"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert os.fspath(cache_root()) == "/var/xdg/moeserve"
    monkeypatch.setenv("MOESERVE_CACHE", "~/models")
    assert os.fspath(cache_root()) == "/home/someone/models"
