"""What `moeserve bench decode` says of a machine with tiles: how fast they are, and what share of it products reach."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner

from kernels.cpu.library import NativeKernels, native_kernels
from moeserve.bench.decode import TileRates, command, read_tile_rates

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels.")


def test_products_in_tiles_are_bounded_by_tiles_of_what_they_multiply() -> None:
    rates = TileRates(of_pairs=2.0, of_bytes=3.0)
    assert rates.bound("q4_k", 16, "int8", narrow_rows=False) == 3.0
    assert rates.bound("q4_k", 4, "int8", narrow_rows=False) is None  # Too few rows for a tile.
    assert rates.bound("q4_k", 16, "exact", narrow_rows=False) is None
    assert rates.bound("bfloat16", 1, "int8", narrow_rows=True) == 2.0
    assert rates.bound("bfloat16", 256, "int8", narrow_rows=False) is None


def test_the_rate_of_tiles_is_that_of_the_shortest_run_and_there_is_none_without_tiles() -> None:
    calls: list[int] = []
    kernels = SimpleNamespace(has_tiles=True, multiply_tiles=lambda _, is_pairs: calls.append(is_pairs))
    rates = read_tile_rates(cast("NativeKernels", kernels))
    assert rates is not None
    assert min(rates.of_pairs, rates.of_bytes) > 0
    assert calls == sorted(calls)
    assert read_tile_rates(cast("NativeKernels", SimpleNamespace(has_tiles=False))) is None


def test_a_machine_with_tiles_gets_a_column_of_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeserve.bench.decode.read_bandwidth", lambda: 1e9)
    monkeypatch.setattr("moeserve.bench.decode.read_tile_rates", lambda _: TileRates(1e12, 1e12))
    monkeypatch.setattr("moeserve.bench.decode.measure", lambda *_, **__: [])
    said = CliRunner().invoke(command, ["--shape", "olmoe"]).output
    assert "tiles by themselves: 1000 GOP/s in bfloat16, 1000 in groups of bytes" in said
    assert "| of the tiles |" in said
