"""The build cache: built once, rebuilt when broken, never half-written, never by two at a time.

Its manifest notices every change of a file, and a remembered verdict only ever saves the hashing.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from moeserve.config import ConfigError, cache_root
from moeserve.model import cache
from moeserve.model.cache import MANIFEST_NAME, VERDICT_NAME, ManifestError, ensure_built, verify, write_manifest
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
        assert self.may_go_on.wait(timeout=60)
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
    assert builder.started.wait(timeout=60)
    second.start()
    assert waiting.wait(timeout=60)
    builder.may_go_on.set()
    first.join(timeout=60)
    second.join(timeout=60)
    assert builder.builds == 1
    assert visible(target) == ["demo"]


def test_a_disk_too_small_is_said_with_numbers(
    target: Path, builder: FakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**7))
    with pytest.raises(ModelError, match=r"needs 715\.3 MiB in .*, but only 9\.5 MiB are free"):
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "weights").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "sub" / "config").write_text("{}")
    write_manifest(tmp_path, builder="test/1")
    return tmp_path


def stages(folder: Path, **options: bool) -> list[str]:
    seen: list[str] = []
    verify(folder, progress=lambda stage, done, total: seen.append(stage), **options)
    return seen


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)


def flip_byte_and_restore_the_time(path: Path) -> None:
    before = path.stat()
    flip_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def swap_in_another_file_of_the_same_size(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


@pytest.mark.parametrize("forget", [True, False])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_byte, "sha256"),
        (flip_byte_and_restore_the_time, "sha256"),
        (swap_in_another_file_of_the_same_size, "sha256"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 25599 bytes, but its manifest says 25600"),
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
        (lambda path: path.unlink(), "cannot be read"),
    ],
)
def test_a_changed_file_is_found_with_and_without_a_verdict(
    folder: Path, damage: Callable[[Path], None], words: str, forget: bool
) -> None:
    if forget:
        (folder / VERDICT_NAME).unlink()
    damage(folder / "weights")
    with pytest.raises(ManifestError, match=words):
        verify(folder)


def test_a_file_in_a_subfolder_is_covered(folder: Path) -> None:
    (folder / "sub" / "config").write_text("[]")
    with pytest.raises(ManifestError, match="sub/config"):
        verify(folder)


def test_files_that_were_just_hashed_are_not_hashed_again(folder: Path) -> None:
    assert stages(folder) == []


def test_without_a_verdict_files_are_hashed_once(folder: Path) -> None:
    (folder / VERDICT_NAME).unlink()
    assert "verify files" in stages(folder)
    assert stages(folder) == []


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"manifest": 1}', b'{"manifest": "0", "files": {}}'])
def test_a_broken_verdict_costs_a_check_and_nothing_else(folder: Path, content: bytes) -> None:
    (folder / VERDICT_NAME).write_bytes(content)
    assert "verify files" in stages(folder)
    assert stages(folder) == []


def test_a_thorough_check_hashes_despite_the_verdict(folder: Path) -> None:
    assert "verify files" in stages(folder, thorough=True)


def test_a_touched_file_is_hashed_again_and_passes(folder: Path) -> None:
    os.utime(folder / "weights", ns=(1, 1))
    assert "verify files" in stages(folder)


def test_a_copy_of_the_folder_is_hashed_again(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    (copy / "sub").mkdir()
    for name in ("weights", "sub/config", MANIFEST_NAME, VERDICT_NAME):
        (copy / name).write_bytes((folder / name).read_bytes())
    assert "verify files" in stages(copy)


def test_a_verdict_holds_for_its_manifest_only(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(path.read_text().replace("test/1", "test/2"))
    assert "verify files" in stages(folder)


def test_another_builder_is_refused(folder: Path) -> None:
    verify(folder, builder="test/1")
    with pytest.raises(ManifestError, match=r"made by 'test/1', not by 'test/2'"):
        verify(folder, builder="test/2")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"builder": "x", "files": {"a": 1}}'])
def test_a_broken_manifest_is_an_error(folder: Path, content: bytes) -> None:
    (folder / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(ManifestError, match="is not a manifest"):
        verify(folder)


def test_a_folder_without_manifest_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="has no readable"):
        verify(tmp_path)


@pytest.mark.parametrize("name", ["/etc/hostname", "../outside", "sub/../../outside"])
def test_a_manifest_cannot_name_files_outside_of_its_folder(folder: Path, name: str) -> None:
    (folder / MANIFEST_NAME).write_text(f'{{"builder": "x", "files": {{"{name}": {{"size": 1, "sha256": ""}}}}}}')
    with pytest.raises(ManifestError, match="outside of its folder"):
        verify(folder)


def test_without_a_home_the_cache_needs_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "MOESERVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match="no home for the cache: set HOME, or MOESERVE_CACHE"):
        cache_root()
