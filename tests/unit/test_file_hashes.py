"""Hashes of weights: of all bytes, read once; a model's digest cannot be fooled by what lies where."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from moeserve.model import file_hashes
from moeserve.model.cache import locked
from moeserve.model.contents import model_digest
from moeserve.model.file_hashes import sampled_hashes, whole_hashes
from moeserve.model.spec import silent


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file that is sampled."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(17 * 2**20)
    return path


def refuse_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hashes, "_hash_piece", partial(pytest.fail, "read once more"))


def test_a_file_is_read_once(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "memory"
    first = whole_hashes([large], memory)
    assert memory.stat().st_mode & 0o777 == 0o600
    refuse_to_read(monkeypatch)
    assert whole_hashes([large], memory) == first


def test_a_change_between_the_samples_is_found(large: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    first, sampled, status = whole_hashes([large], memory), sampled_hashes([large]), large.stat()
    with large.open("r+b") as file:
        file.seek(40_000)
        file.write(b"?")
    os.utime(large, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert sampled_hashes([large]) == sampled
    assert whole_hashes([large], memory) != first


def test_other_weights_with_the_same_times_and_inode_are_read(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in images whose files all have one time."""
    monkeypatch.setattr(file_hashes, "identity_of", lambda status: (status.st_size, 1, 1, 1))
    first = whole_hashes([large], tmp_path / "memory")
    large.write_bytes(os.urandom(1000) * (17 * 2**20 // 1000) + bytes(17 * 2**20 % 1000))
    assert whole_hashes([large], tmp_path / "memory") != first


def test_every_byte_counts_whatever_piece_it_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hashes, "_PIECE_BYTES", 100)
    monkeypatch.setattr(file_hashes, "_READ_BYTES", 30)
    path, content = tmp_path / "weights", bytearray(os.urandom(250))
    found = set()
    for place in range(len(content) + 1):
        path.write_bytes(content)
        found.add(whole_hashes([path], tmp_path / "memory")[0])
        if place < len(content):
            content[place] ^= 1
    path.write_bytes(content[:200])
    found.add(whole_hashes([path], tmp_path / "memory")[0])
    assert len(found) == len(content) + 2


def test_the_hashes_of_files_that_are_gone_are_forgotten(large: Path, tmp_path: Path) -> None:
    memory, other = tmp_path / "memory", tmp_path / "other"
    whole_hashes([large], memory)
    other.write_bytes(b"weights")
    large.unlink()
    whole_hashes([other], memory)
    assert b"large" not in memory.read_bytes()
    assert b"other" in memory.read_bytes()


def damage(memory: Path) -> None:
    memory.write_bytes(b"\xff{")


def take_away(memory: Path) -> None:
    """Nothing can be written in a file's place."""
    memory.unlink()
    memory.parent.rmdir()
    memory.parent.write_bytes(b"")


@pytest.mark.parametrize("harm", [damage, take_away])
def test_a_memory_that_cannot_be_used_costs_time_alone(
    harm: Callable[[Path], None], large: Path, tmp_path: Path
) -> None:
    memory = tmp_path / "folder" / "memory"
    first = whole_hashes([large], memory)
    for path in memory.parent.glob(".*"):
        path.unlink()
    harm(memory)
    assert whole_hashes([large], memory) == first


def test_of_two_processes_one_reads(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = whole_hashes([large], tmp_path / "memory")
    refuse_to_read(monkeypatch)
    memory = tmp_path / "another"
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(whole_hashes([large], memory)))
    with locked(tmp_path / ".another.lock", silent):
        thread.start()
        shutil.copy(tmp_path / "memory", memory)
    thread.join()
    assert found == first


INDEX = b'{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'


def digest(folder: Path, first: bytes, second: bytes, **others: bytes) -> bytes:
    """Return the digest of a model with two files of weights. others: by names without an ending."""
    folder.mkdir()
    files = {"config": b"{}", "model.safetensors.index": INDEX} | others
    for name, content in files.items():
        (folder / f"{name}.json").write_bytes(content)
    (folder / "a.safetensors").write_bytes(first)
    (folder / "b.safetensors").write_bytes(second)
    return model_digest(folder, partial(whole_hashes, memory=folder / "memory"))


def test_bytes_that_move_from_one_file_to_another_are_another_model(tmp_path: Path) -> None:
    found = {
        digest(tmp_path / "1", b"12", b"3"),
        digest(tmp_path / "2", b"1", b"23"),
        digest(tmp_path / "3", b"3", b"12"),
        digest(tmp_path / "4", b"12", b"", tokenizer=b"3"),
        digest(tmp_path / "5", b"12", b"", quantize_config=b"3"),
        digest(tmp_path / "6", b"12", b"", quant_config=b"3"),
    }
    assert len(found) == 6


def test_the_order_of_an_index_and_files_that_it_does_not_name_change_nothing(tmp_path: Path) -> None:
    index = b'{"metadata": {}, "weight_map": {"y": "b.safetensors", "x": "a.safetensors"}}'
    others = {"model.safetensors.index": index, "processor_config": b"4"}
    assert digest(tmp_path / "1", b"12", b"3", **others) == digest(tmp_path / "2", b"12", b"3")
