"""Reading experts through DeepNVMe, where libaio and its headers are installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from experts.errors import DeepNvmeError, ExpertStoreError
from experts.memory.deep_nvme import DeepNvme, compile_deep_nvme, deep_nvme, extensions_folder, extensions_kept_in
from experts.memory.file import PAGE_BYTES, write_expert_file
from experts.memory.slots import SlotArena
from experts.memory.tiers import DiskTier

SOURCE = bytes(32)
EXPERT_BYTES = 5 * PAGE_BYTES + 100


@pytest.fixture(scope="module")
def nvme() -> DeepNvme:
    try:
        return deep_nvme(12 * PAGE_BYTES)
    except DeepNvmeError as error:
        pytest.skip(str(error))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    experts = (memoryview(bytes([number + 1]) * EXPERT_BYTES) for number in range(6))
    path = tmp_path / "experts.bin"
    write_expert_file(path, source=SOURCE, num_layers=2, num_experts=3, expert_bytes=EXPERT_BYTES, experts=experts)
    return path


@pytest.mark.parametrize("locked", [True, False])
def test_experts_arrive_in_their_slots(nvme: DeepNvme, path: Path, locked: bool) -> None:
    num_bytes = 2 * 6 * PAGE_BYTES
    memory = nvme.locked_memory(num_bytes) if locked else None
    arena = SlotArena([1, 1], EXPERT_BYTES, memory)
    tier = DiskTier(path, SOURCE, nvme.open)
    assert tier.reads.description == "DeepNVMe"
    for layer in range(2):
        for expert in range(3):
            slot = arena.bytes_of(layer, 0)
            tier.read(layer, expert, 0, slot[: 2 * PAGE_BYTES])
            tier.read(layer, expert, 2 * PAGE_BYTES, slot[2 * PAGE_BYTES :])
            assert set(arena.tensor_of(layer, 0).tolist()) == {layer * 3 + expert + 1}
    tier.close()


def test_a_file_that_is_cut_while_in_use_is_found_out(nvme: DeepNvme, path: Path) -> None:
    tier = DiskTier(path, SOURCE, nvme.open)
    os.truncate(path, tier.header.offset(1, 2))
    with pytest.raises(ExpertStoreError, match="cut off"):
        tier.read(1, 2, 0, SlotArena([1], EXPERT_BYTES).bytes_of(0, 0))
    tier.close()


def test_every_environment_keeps_what_it_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("sys.prefix", "/first")
    first = extensions_folder()
    assert first.parent == tmp_path
    assert extensions_folder() == first
    monkeypatch.setattr("sys.prefix", "/second")
    assert extensions_folder() != first


def test_slots_that_may_not_be_locked_are_read_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experts.memory.deep_nvme.find_library", lambda _: "libaio.so")
    monkeypatch.setattr("resource.getrlimit", lambda _: (PAGE_BYTES, PAGE_BYTES))
    with pytest.raises(DeepNvmeError, match="ulimit -l"):
        deep_nvme(PAGE_BYTES + 1)


def test_what_is_not_compiled_is_not_compiled_on_the_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("experts.memory.deep_nvme.find_library", lambda _: "libaio.so")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(DeepNvmeError, match="`moeserve experts deepnvme`"):
        deep_nvme(PAGE_BYTES)
    assert not list(tmp_path.iterdir())


def test_without_libaio_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experts.memory.deep_nvme.find_library", lambda _: None)
    for attempt in (lambda: deep_nvme(PAGE_BYTES), compile_deep_nvme):
        with pytest.raises(DeepNvmeError, match="install libaio-dev"):
            attempt()


def test_a_process_that_was_killed_while_it_compiled_keeps_nobody_waiting(tmp_path: Path) -> None:
    folder = tmp_path / "extensions"
    left_behind = folder / "async_io" / "lock"
    left_behind.parent.mkdir(parents=True)
    left_behind.touch()
    with extensions_kept_in(folder):
        assert not left_behind.exists()
        assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder)
    assert "TORCH_EXTENSIONS_DIR" not in os.environ


def test_a_library_that_was_never_finished_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("experts.memory.deep_nvme.find_library", lambda _: "libaio.so")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    unfinished = extensions_folder() / "async_io" / "async_io.so"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(b"\x7fELF")
    with pytest.raises(DeepNvmeError, match="cannot be loaded"):
        deep_nvme(PAGE_BYTES)
