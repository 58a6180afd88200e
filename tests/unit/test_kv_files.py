"""Files of KV blocks: whole or not there, private, and refused when they are not what they should be."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from launcher.cli import main
from moeserve.engine.kv.disk.copier import BlockBuffer, BlockCopier, make_buffers
from moeserve.engine.kv.disk.files import BlockError, BlockFiles, clear, open_root, scan, why_damaged, why_unusable
from moeserve.scheduling.arrivals import Result
from moeserve.scheduling.lower_tier import CopyJob
from radix_cache import BlockCopy, Chores, Kind, StoredBlock, border_name

FINGERPRINT = "ab" * 16
FOLDER = f"{FINGERPRINT}/{'cd' * 16}.{'ef' * 16}"
TOKENS = array("i", range(4)).tobytes()


def copy_of(block: int, tokens: bytes = TOKENS) -> BlockCopy:
    return BlockCopy(block, bytes([block]) * 16, FOLDER, block, tokens)


def read(files: BlockFiles, copy: BlockCopy) -> bytes:
    content = bytearray(64)
    files.read(copy, memoryview(content))
    return bytes(content)


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    open_root(tmp_path / "kv")
    files = BlockFiles(tmp_path / "kv", FINGERPRINT)
    files.describe(b'{"model": "m", "arithmetic": "float32", "block_size": 4}')
    for number in range(3):
        files.write(copy_of(number), memoryview(bytes([number]) * 64))
    return files


def test_a_block_comes_back_and_all_is_private(files: BlockFiles) -> None:
    assert [read(files, copy_of(number)) for number in range(3)] == [bytes([n]) * 64 for n in range(3)]
    for path in (files.root, *files.root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    found = sorted(scan(files.root, time.time()), key=lambda block: block.used_at)
    # The end of a prefix is the first to go.
    assert [block.name[0] for block in found] == [2, 1, 0]


def parts_of_a_block(folder: Path) -> list[BlockFiles]:
    """Two ranks that share layers and have written a block."""
    open_root(folder)
    parts = [BlockFiles(folder, FINGERPRINT, part=part, num_parts=2) for part in range(2)]
    for number, files in enumerate(parts):
        files.write(copy_of(7), memoryview(bytes([number]) * 64))
    return parts


def test_parts_of_a_block_are_one_block_with_the_bytes_of_all(tmp_path: Path) -> None:
    parts = parts_of_a_block(tmp_path / "kv")
    assert [read(files, copy_of(7)) for files in parts] == [bytes(64), bytes([1]) * 64]
    (found,) = scan(tmp_path / "kv", time.time())
    assert found.num_bytes == sum(path.stat().st_size for path in (tmp_path / "kv" / FOLDER).iterdir())
    assert parts[0].status(found).num_bytes == found.num_bytes
    assert why_damaged(tmp_path / "kv", found) is None
    assert clear(tmp_path / "kv") == 1
    assert not list((tmp_path / "kv").rglob("07*"))


def test_a_part_that_is_missing_damaged_or_anothers_is_not_served_and_verify_finds_it(tmp_path: Path) -> None:
    root, path = tmp_path / "kv", tmp_path / "kv" / copy_of(7).path
    parts = parts_of_a_block(root)
    other = Path(f"{path}.1")
    whole = other.read_bytes()
    (block,) = scan(root, time.time())
    for bad, why in ((path.read_bytes(), "another block"), (whole[:-1], "size"), (whole[:-4] + bytes(4), "checksum")):
        other.write_bytes(bad)
        with pytest.raises(BlockError):
            read(parts[1], copy_of(7))
        assert why in (why_damaged(root, block) or "")
    other.unlink()
    with pytest.raises(FileNotFoundError):
        parts[0].status(block)
    assert why_damaged(root, block) == "its part of rank 1 is missing"


def test_a_part_whose_block_is_gone_goes_unless_it_is_being_written(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    parts_of_a_block(root)
    (root / copy_of(7).path).unlink()
    assert list(scan(root, time.time())) == []
    assert [path.name[-2:] for path in (root / FOLDER).iterdir()] == [".1"]
    assert list(scan(root, time.time() + 100.0)) == []
    assert not list((root / FINGERPRINT).iterdir())


def test_folders_that_others_have_removed_are_private_when_they_come_again(files: BlockFiles) -> None:
    clear(files.root)
    assert not (files.root / FINGERPRINT).exists()
    files.write(copy_of(1), memoryview(bytes(64)))
    for path in (files.root / FINGERPRINT, files.root / FOLDER):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    shutil.rmtree(files.root)
    with pytest.raises(FileNotFoundError):
        files.write(copy_of(1), memoryview(bytes(64)))
    assert not files.root.exists()


def test_no_flipped_bit_is_served(files: BlockFiles) -> None:
    path = files.root / copy_of(1).path
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(BlockError):
            read(files, copy_of(1))


def test_torn_foreign_and_misnamed_files_are_not_served(files: BlockFiles) -> None:
    path = files.root / copy_of(1).path
    whole = path.read_bytes()
    for length in (0, 10, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(BlockError):
            read(files, copy_of(1))
    path.write_bytes((files.root / copy_of(2).path).read_bytes())
    with pytest.raises(BlockError):
        read(files, copy_of(1))
    path.write_bytes(whole)
    with pytest.raises(BlockError, match="other tokens"):
        read(files, copy_of(1, array("i", [9, 9, 9, 9]).tobytes()))
    with pytest.raises(BlockError):
        BlockFiles(files.root, "ff" * 16).read(copy_of(1), memoryview(bytearray(64)))
    assert read(files, copy_of(1)) == bytes([1]) * 64


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("call", ["write", "utime", "close", "rename", "open"])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("is_kill", [True, False])
def test_a_write_that_ends_at_any_call_leaves_the_old_block_or_the_new_one(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch, call: str, number: int, is_kill: bool
) -> None:
    real, num_calls = getattr(os, call), 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number + 1:
            if call == "write":
                real(args[0], memoryview(args[1])[:5])
            elif call == "close":
                real(*args)
            raise KilledError if is_kill else OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **options)

    with monkeypatch.context() as patch:
        if is_kill:
            patch.setattr(os, "unlink", lambda *_: None)
        patch.setattr(os, call, failing)
        try:
            files.write(copy_of(7), memoryview(b"7" * 64))
            has_failed = False
        except (KilledError, OSError):
            has_failed = True
    assert has_failed == (num_calls > number)
    left = list(files.root.rglob("*.new"))
    assert is_kill or left == []
    if (files.root / copy_of(7).path).exists():
        assert read(files, copy_of(7)) == b"7" * 64
    assert len(list(scan(files.root, time.time() + 100_000.0))) in (3, 4)
    assert list(files.root.rglob("*.new")) == []


def test_links_pipes_and_folders_in_the_place_of_blocks_are_no_blocks_and_hold_nobody_up(files: BlockFiles) -> None:
    copies = [copy_of(number) for number in range(3)]
    linked, piped, folder = (files.root / copy.path for copy in copies)
    linked.rename(files.root / "elsewhere")
    linked.symlink_to(files.root / "elsewhere")
    piped.unlink()
    os.mkfifo(piped)
    folder.unlink()
    folder.mkdir()
    for copy in copies:
        with pytest.raises((BlockError, OSError)):
            read(files, copy)
        with pytest.raises(FileNotFoundError):
            files.status(StoredBlock(copy.name, copy.folder, 0, 0.0))
    assert list(scan(files.root, time.time())) == []
    files.write(copies[0], memoryview(b"n" * 64))
    assert read(files, copies[0]) == b"n" * 64


def test_a_link_to_a_folder_of_blocks_makes_no_second_ones(files: BlockFiles) -> None:
    folder = files.root / FOLDER
    (folder.parent / f"{'00' * 16}.{'11' * 16}").symlink_to(folder)
    (files.root / ("22" * 16)).symlink_to(folder.parent)
    assert [block.folder for block in scan(files.root, time.time())] == [FOLDER] * 3
    with pytest.raises(OSError, match="symbolic link"):
        BlockFiles(files.root, "22" * 16).describe(b"{}")


def test_files_from_before_the_clock_was_set_back_count_as_used_now(files: BlockFiles) -> None:
    now = float(int(time.time()) - 100_000)
    unfinished = files.root / FOLDER / ".x.new"
    unfinished.touch()
    assert {block.used_at for block in scan(files.root, now)} == {now}
    assert not unfinished.exists()
    # They age from then on, also while no service runs.
    assert {block.used_at for block in scan(files.root, now + 50_000.0)} == {now}


def test_no_unfinished_file_stays_in_any_folder(files: BlockFiles) -> None:
    left = [files.root / ".secret.1.new", files.root / FINGERPRINT / ".about.1.new", files.root / FOLDER / ".x.new"]
    for path in left:
        path.touch()
    list(scan(files.root, time.time()))
    assert all(path.exists() for path in left)
    list(scan(files.root, time.time() + 100.0))
    assert not any(path.exists() for path in left)


def test_a_folder_goes_with_its_last_file_and_an_empty_one_at_the_next_start(files: BlockFiles) -> None:
    copies = [copy_of(1), copy_of(2)]
    shutil.rmtree(files.root / FOLDER)
    for copy in copies:
        files.write(copy, memoryview(bytes(64)))
    files.remove(copies[0].path)
    assert read(files, copies[1])
    files.remove(copies[1].path)
    assert not (files.root / FOLDER).exists()
    files.remove(copies[1].path)
    files.write(copies[0], memoryview(bytes(64)))
    (files.root / FINGERPRINT / f"{'12' * 16}.{'34' * 16}").mkdir()
    assert [block.name for block in scan(files.root, time.time())] == [copies[0].name]
    assert [path.name for path in (files.root / FINGERPRINT).iterdir() if path.is_dir()] == [FOLDER.split("/")[1]]


def test_a_block_is_written_though_another_service_removes_its_folder_meanwhile(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other service finds the folder empty just after it was made."""
    shutil.rmtree(files.root / FOLDER, ignore_errors=True)
    make, removed = Path.mkdir, list[Path]()

    def make_and_lose(path: Path, *args: Any, **options: Any) -> None:
        make(path, *args, **options)
        if path.name == FOLDER.split("/")[1] and not removed:
            removed.append(path)
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    files.write(copy_of(1), memoryview(bytes(64)))
    assert removed
    assert read(files, copy_of(1))


def test_the_secret_stays_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    secret = open_root(tmp_path / "kv")
    assert open_root(tmp_path / "kv") == secret
    (tmp_path / "kv" / "secret").write_bytes(b"short")
    with pytest.raises(OSError, match="damaged"):
        open_root(tmp_path / "kv")


def test_a_folder_in_which_another_user_could_put_blocks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "kv"
    open_root(root)
    root.chmod(0o777)
    with pytest.raises(PermissionError, match="all users may write to it"):
        open_root(root)
    assert why_unusable(root) == "all users may write to it"
    root.chmod(0o755)
    open_root(root)
    if os.geteuid() == 0:
        os.chown(root, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="it belongs to another user"):
        open_root(root)
    assert why_unusable(root) == "it belongs to another user"


def finish(copier: BlockCopier, job: CopyJob) -> Result[CopyJob]:
    copier.start(job)
    (result,) = copier.take(30.0)
    assert not copier.is_busy
    return result


def test_threads_copy_blocks_and_tell_where_a_reading_ended(tmp_path: Path) -> None:
    open_root(tmp_path)
    numbers = np.random.default_rng(1)
    memory = [numbers.integers(0, 256, (3, 40, 8), np.uint8), numbers.integers(0, 256, (1, 40, 16), np.uint8)]
    before = [array.copy() for array in memory]
    copier = BlockCopier(BlockFiles(tmp_path, FINGERPRINT), lambda: make_buffers({Kind.KV: memory}))
    copies = [copy_of(number) for number in range(20)]
    written = finish(copier, CopyJob(copies, is_write=True))
    assert (len(written.num_bytes), written.error) == (20, None)
    moved = [BlockCopy(20 + copy.block, copy.name, copy.folder, copy.depth, copy.tokens) for copy in copies]
    whole = finish(copier, CopyJob(moved))
    assert (len(whole.num_bytes), whole.error) == (20, None)
    for now, then in zip(memory, before, strict=True):
        assert (now[:, 20:] == then[:, :20]).all()
    (tmp_path / copies[13].path).write_bytes(b"")
    finish(copier, CopyJob([], is_write=True, chores=Chores([copies[17].path], [])))
    part = finish(copier, CopyJob(moved))
    assert (len(part.num_bytes), part.error) == (13, "its size is wrong")
    copier.close()


def beside(kind: Kind) -> BlockCopy:
    return replace(copy_of(1), name=border_name(copy_of(1).name, kind), kind=kind)


def test_window_blocks_and_states_have_files_beside_their_block_and_none_is_taken_for_another(
    files: BlockFiles,
) -> None:
    copies = [copy_of(1), *map(beside, (Kind.WINDOW, Kind.STATE))]
    for copy in copies[1:]:
        files.write(copy, memoryview(bytes([7]) * 64))
    assert [read(files, copy)[0] for copy in copies] == [1, 7, 7]
    found = [block for block in scan(files.root, time.time()) if block.name[0] == 1]
    assert sorted((block.name, block.is_kv) for block in found) == [
        (copy.name, copy.kind is Kind.KV) for copy in copies
    ]
    assert not any(why_damaged(files.root, block) for block in found)
    for copy in copies:
        for other in copies:
            if other is not copy:
                kept = (files.root / copy.path).read_bytes()
                (files.root / copy.path).write_bytes((files.root / other.path).read_bytes())
                with pytest.raises(BlockError):
                    read(files, copy)
                assert why_damaged(files.root, next(block for block in found if block.name == copy.name))
                (files.root / copy.path).write_bytes(kept)


def test_threads_copy_each_kind_from_and_to_its_own_memory(tmp_path: Path) -> None:
    open_root(tmp_path)
    numbers = np.random.default_rng(1)
    memories = {kind: [numbers.integers(0, 256, (2, 8, 8 + 8 * kind), np.uint8)] for kind in (Kind.KV, Kind.WINDOW)}
    memories[Kind.STATE] = [numbers.integers(0, 256, (1, 8, 24), np.uint8)]
    before = {kind: memories[kind][0].copy() for kind in Kind}
    copier = BlockCopier(BlockFiles(tmp_path, FINGERPRINT), lambda: make_buffers(memories))
    copies = [copy_of(1), *map(beside, (Kind.WINDOW, Kind.STATE))]
    assert finish(copier, CopyJob(copies, is_write=True)).error is None
    assert finish(copier, CopyJob([replace(copy, block=5) for copy in copies])).error is None
    for kind in Kind:
        assert (memories[kind][0][:, 5] == before[kind][:, 1]).all()
        assert (memories[kind][0][:, :5] == before[kind][:, :5]).all()
    # A search finds the files beside a block, and ends with the first missing block.
    (tmp_path / copies[1].path).unlink()
    rows = [[StoredBlock(copy.name, copy.folder, 0, 0.0) for copy in copies], [StoredBlock(bytes(16), FOLDER, 0, 0.0)]]
    found = finish(copier, CopyJob((), sought=rows)).found
    assert [block.name for block in found] == [copies[0].name, copies[2].name]
    copier.close()


def test_a_copy_and_a_search_without_memory_have_a_result_and_the_next_ones_work(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, sought = [copy_of(1)], [[StoredBlock(copy_of(1).name, FOLDER, 0, 0.0)]]
    memory = [np.zeros((1, 40, 64), np.uint8)]
    copier = BlockCopier(files, lambda: make_buffers({Kind.KV: memory}))

    def no_memory(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as short:
        short.setattr(BlockBuffer, "store", no_memory)
        short.setattr(BlockFiles, "status", no_memory)
        part = finish(copier, CopyJob(copies))
        assert (part.num_bytes, part.error) == ([], "MemoryError")
        assert finish(copier, CopyJob((), sought=sought)).found == []
    assert finish(copier, CopyJob(copies)).error is None
    assert len(finish(copier, CopyJob((), sought=sought)).found) == 1
    copier.close()


def test_the_commands_list_verify_and_clear(files: BlockFiles) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["cache", *arguments, str(files.root)])
        return result.exit_code, result.output

    code, said = run("list")
    assert (code, "m, float32" in said, "3 blocks = 12 tokens" in said) == (0, True, True)
    assert run("verify") == (0, "3 files, 0 damaged.\n")
    (files.root / copy_of(1).path).write_bytes(b"x")
    code, said = run("verify")
    assert (code, "it is too short" in said, "3 files, 1 damaged." in said) == (1, True, True)
    assert run("clear") == (0, "3 blocks removed.\n")
    assert run("list") == (0, f"{files.root} holds no blocks.\n")
    assert (files.root / "secret").is_file()
    result = CliRunner().invoke(main, ["cache", "clear", str(files.root.parent)])
    assert (result.exit_code, "is no folder of --kv-disk-path" in result.output) == (1, True)
