"""A start compiles the kernels that it will launch, in several processes, into Triton's cache."""

from pathlib import Path

import pytest

from tests.support.separate_process import output_of

pytestmark = pytest.mark.kernel_change


@pytest.mark.parametrize(("case", "part"), [("llama", "whole"), ("qwen3_moe", "stage"), ("llama", "shard")])
def test_a_first_start_compiles_what_is_launched_and_a_second_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, part: str
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found, *told, launched, failed = output_of("tests.support.start_kernels", case, "86", part)
    count = int(found.split()[1])
    assert count >= 10
    assert told == [f"told {done} {count}" for done in (*range(count + 1), count)]
    hits, misses = map(int, launched.split()[1:])
    assert hits >= 4
    assert misses == 0
    assert "kernel: " in failed
