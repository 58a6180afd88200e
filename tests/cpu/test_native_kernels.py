"""The compiled kernels: how they are built, and their results beside torch's."""

from __future__ import annotations

import ctypes
import os
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from kernels.attention import paged_attention
from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.cpu import build, library
from kernels.cpu.build import KernelBuildError, build_library
from kernels.cpu.library import native_kernels, native_kernels_absence
from kernels.cpu.packing import WeightMemory
from kernels.cpu.targets import OTHER
from kernels.linear import pack_linear
from kernels.norm import rms_norm
from kernels.rope_kv import rotate_and_store, rotate_and_store_reference

pytestmark = pytest.mark.usefixtures("inference")


def test_the_kernels_are_compiled_where_the_suite_runs() -> None:
    assert native_kernels_absence() is None
    assert native_kernels() is not None


def test_a_library_is_built_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One that compiles at once; the suite computes with the others.
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "SOURCES", (str(source),))
    first = build_library(OTHER, tmp_path / "built")
    built = first.stat().st_mtime_ns
    assert build_library(OTHER, tmp_path / "built") == first
    assert first.stat().st_mtime_ns == built
    assert list((tmp_path / "built").iterdir()) == [first]
    assert ctypes.CDLL(str(first)).one() == 1


def test_a_missing_or_failing_compiler_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildError, match="There is no C"):
        build_library(OTHER, tmp_path)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(KernelBuildError, match="failed"):
        build_library(OTHER, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_long_call_counts_its_progress_part_by_part() -> None:
    kernels = native_kernels()
    assert kernels is not None
    num_tokens, num_heads, num_kv_heads, dim, block_size = 96, 4, 2, 16, 16
    start = 4096 - num_tokens
    pools = [torch.randn(num_kv_heads, 4096, dim) for _ in range(2)]
    plan = AttentionPlan([ChunkSpan(num_tokens, start, array("i", range(4096 // block_size)))], block_size)
    before = kernels.progress
    paged_attention(torch.randn(num_tokens, num_heads, dim), *pools, plan, scale=0.25)
    attended = kernels.progress
    # 48 tokens with two query heads each share 96 rows; each part takes up to 256 keys of a key head.
    assert attended - before >= num_kv_heads * (num_tokens // 48) * (start // 256)
    pack_linear(torch.randn(64, 32), dtype=torch.float32)(torch.randn(8, 32))
    assert kernels.progress > attended


def test_torch_computes_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESERVE_CPU_KERNELS", "torch")
    library.native_kernels_absence.cache_clear()
    try:
        assert library.native_kernels_absence() == "MOESERVE_CPU_KERNELS is torch."
    finally:
        library.native_kernels_absence.cache_clear()


@pytest.mark.parametrize("width", [1, 15, 16, 64, 576, 577])
def test_rms_norm_matches_torch_and_a_row_has_the_same_bits_anywhere(width: int) -> None:
    x, weight = torch.randn(40, width + 3)[:, :width], torch.randn(width)
    out = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, functional.rms_norm(x, (width,), weight, 1e-5), atol=1e-6, rtol=1e-5)
    assert torch.equal(rms_norm(x[7:8], weight, 1e-5), out[7:8])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 20, 32])
@pytest.mark.parametrize("num_norms", [0, 2, 3])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_rotating_and_storing_matches_its_reference(
    interleaved: bool, rotary_dim: int, num_norms: int, num_tokens: int
) -> None:
    num_heads, num_kv_heads, dim = 6, 2, 32
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, dim)
    angles = torch.randn(num_tokens, rotary_dim // 2)
    slots = torch.randperm(64)[:num_tokens]
    norms = tuple(torch.randn(num_norms, dim)) or None
    found, expected = ([torch.zeros(num_kv_heads, 64, dim) for _ in range(2)] for _ in range(2))
    arguments = {"interleaved": interleaved, "head_norms": norms, "eps": 1e-6}
    want = rotate_and_store_reference(qkv.clone(), angles.cos(), angles.sin(), slots, *expected, **arguments)
    got = rotate_and_store(qkv, angles.cos(), angles.sin(), slots, *found, **arguments)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)
    for pool, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(pool, wanted, atol=2e-6, rtol=2e-5)


def test_the_experts_of_a_layer_lie_side_by_side() -> None:
    memory, size = WeightMemory(), 2_728_961
    starts = [memory.take(size).data_ptr() for _ in range(128)]
    assert {second - first for first, second in pairwise(starts)} == {-(-size // 64) * 64}


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2", reason="no more may be mapped than there is"
)
def test_a_process_forks_though_room_for_weights_exceeds_the_machines_memory() -> None:
    of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kept = [WeightMemory().take(64) for _ in range(of_machine // 2**30 + 2)]
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert kept


def test_what_a_forked_copy_writes_to_weights_stays_with_it() -> None:
    kept = WeightMemory().take(64)
    kept.copy_(torch.arange(64, dtype=torch.uint8))
    pid = os.fork()
    if pid == 0:
        kept.zero_()
        os._exit(0)
    os.waitpid(pid, 0)
    assert torch.equal(kept, torch.arange(64, dtype=torch.uint8))
