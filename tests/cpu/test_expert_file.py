"""The file experts are read from: whole, checked, and refused with one sentence where it is not what it should be."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest
import torch

import experts.memory.file
from experts.errors import ExpertStoreError
from experts.memory.file import PAGE_BYTES, read_header, round_to_page, write_expert_file
from experts.memory.mapped import MappedExperts
from experts.memory.tiers import DiskTier, PackingTier

SOURCE = bytes(range(32))
EXPERT_BYTES = 2 * PAGE_BYTES + 100
EXPERTS = [bytes([number]) * EXPERT_BYTES for number in range(6)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "experts.bin")
    return tmp_path / "experts.bin"


def write(path: Path, experts: list[bytes] = EXPERTS, source: bytes = SOURCE) -> None:
    write_expert_file(
        path,
        source=source,
        num_layers=2,
        num_experts=3,
        expert_bytes=EXPERT_BYTES,
        experts=(memoryview(expert) for expert in experts),
    )


def read_whole(tier: DiskTier, layer: int, expert: int) -> bytes:
    """In two pieces, into memory that starts on a page."""
    out = memoryview(mmap.mmap(-1, round_to_page(EXPERT_BYTES)))
    tier.read(layer, expert, 0, out[:PAGE_BYTES])
    tier.read(layer, expert, PAGE_BYTES, out[PAGE_BYTES:])
    return bytes(out[:EXPERT_BYTES])


def refuse_direct(really_open):
    def open_buffered(path, flags):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags)

    return open_buffered


@pytest.mark.parametrize("direct", [True, False])
def test_every_expert_is_read_back(path, monkeypatch, direct):
    if not direct:
        monkeypatch.setattr(os, "open", refuse_direct(os.open))
    tier = DiskTier(path, SOURCE)
    assert direct or tier.reads.description == "preadv through the page cache"
    assert path.stat().st_size == tier.header.file_bytes
    for layer in range(2):
        for expert in range(3):
            assert tier.header.offset(layer, expert) % PAGE_BYTES == 0
            assert read_whole(tier, layer, expert) == EXPERTS[layer * 3 + expert]
    tier.close()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - PAGE_BYTES)


def _unfinish(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(PAGE_BYTES))


def _damage_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(70)
        file.write(b"?")


def _another_version(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\x63")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_cut, "is torn, 73728 of 77824 bytes are there: delete it"),
        (_unfinish, "never finished"),
        (_damage_header, "damaged, its header"),
        (_another_version, "version 99"),
        (lambda path: write(path, source=bytes(32)), "made of other weights"),
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.write_bytes(b"short"), "not an expert file"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused_in_one_sentence(path, harm, words):
    harm(path)
    with pytest.raises(ExpertStoreError, match=words) as error:
        read_header(path, SOURCE)
    assert "\n" not in str(error.value)


def test_an_expert_whose_bytes_changed_is_found_out(path):
    tier = DiskTier(path, SOURCE)
    with path.open("r+b") as file:
        file.seek(tier.header.offset(1, 2) + 50)
        file.write(b"?")
    assert read_whole(tier, 1, 1) == EXPERTS[4]
    with pytest.raises(ExpertStoreError, match="expert 2 of layer 1"):
        read_whole(tier, 1, 2)
    tier.close()


def test_a_file_that_is_cut_while_in_use_is_found_out(path):
    tier = DiskTier(path, SOURCE)
    os.truncate(path, tier.header.offset(1, 2))
    with pytest.raises(ExpertStoreError, match="cut off"):
        read_whole(tier, 1, 2)
    tier.close()


def test_a_writer_that_is_given_the_wrong_experts_says_so(tmp_path):
    with pytest.raises(ValueError, match="5 experts, not 6"):
        write(tmp_path / "few.bin", EXPERTS[:5])
    with pytest.raises(ValueError, match="an expert of 3 bytes"):
        write(tmp_path / "short.bin", [b"abc"])
    with pytest.raises(ExpertStoreError, match="never finished"):
        read_header(tmp_path / "few.bin", SOURCE)


def test_an_expert_is_packed_into_the_memory_that_is_read_into():
    packed = {(layer, expert): os.urandom(2 * PAGE_BYTES + 10) for layer in range(2) for expert in range(3)}

    def pack(layer, expert, out):
        out[:] = torch.frombuffer(bytearray(packed[layer, expert]), dtype=torch.uint8)

    tier = PackingTier(pack, 2 * PAGE_BYTES + 10)
    for (layer, expert), content in packed.items():
        out = bytearray(3 * PAGE_BYTES)
        tier.read(layer, expert, 0, memoryview(out))
        assert bytes(out) == content + bytes(PAGE_BYTES - 10)


def test_a_mapped_file_has_every_expert_and_its_own_pages_when_they_are_written_over(path):
    mapped, content, told = MappedExperts(path, SOURCE), path.read_bytes(), []
    mapped.read(lambda done, total: told.append((done, total)))
    assert told in ([], [(len(content), len(content))])
    for layer in range(2):
        for expert in range(3):
            found = mapped.expert(layer, expert, EXPERT_BYTES - 1)
            assert bytes(found.numpy()) == EXPERTS[layer * 3 + expert][:-1]
    mapped.expert(1, 1, EXPERT_BYTES).fill_(7)
    assert path.read_bytes() == content
    with pytest.raises(ExpertStoreError, match="made of other weights"):
        MappedExperts(path, bytes(32))


def test_a_long_file_is_moved_to_the_disk_while_it_is_written(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(experts.memory.file, "_WINDOW_BYTES", 2 * round_to_page(EXPERT_BYTES))
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    write(tmp_path / "long.bin")
    header, record = PAGE_BYTES, round_to_page(EXPERT_BYTES)
    assert synced == [header + count * record for count in (2, 4, 6, 6, 6)]
