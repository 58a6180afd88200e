"""The manifest notices every change of a file, and a remembered verdict only ever saves the hashing."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moeserve.model.cache import MANIFEST_NAME, VERDICT_NAME, ManifestError, verify, write_manifest


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
