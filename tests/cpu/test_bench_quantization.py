"""The commands that measure weights of fewer bits, on small models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kernels.cpu.library import native_kernels
from moeserve.bench import decode, quality
from moeserve.model.families import build_spec, load_config
from tests.support.quantised_files import compressed, quantise_checkpoint
from tests.support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels.")


def test_quality_refuses_experts_that_cannot_be_quantised(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    result = CliRunner().invoke(quality.command, [str(model), "--tokens", "1024"])
    assert result.exit_code == 1
    assert "rows of 48 weights" in result.output


def test_quality_compares_forms_with_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.tiny_checkpoint._FFN", 64)
    model = write_tiny_checkpoint(tmp_path / "model")
    forms = (
        quality.Form(),
        quality.Form("int8", "int8"),
        quality.Form("int4"),
        quality.Form(kv_dtype="int8"),
        quality.Form(dtype="bfloat16"),
    )
    plain, eight, four, small_kv, narrow = quality.measure(model, 256, forms)
    assert plain.num_tokens == eight.num_tokens == four.num_tokens > 100
    assert [plain.form, eight.form, four.form, small_kv.form, narrow.form] == [
        "as in the checkpoint",
        "int8, activations int8",
        "int4, activations exact",
        "as in the checkpoint, keys and values int8",
        "as in the checkpoint, activations bfloat16",
    ]
    assert eight.perplexity != plain.perplexity
    assert eight.perplexity == pytest.approx(plain.perplexity, rel=0.02)
    assert small_kv.perplexity == pytest.approx(plain.perplexity, rel=0.02)
    assert narrow.perplexity != plain.perplexity
    assert narrow.perplexity == pytest.approx(plain.perplexity, rel=0.02)
    assert four.perplexity == pytest.approx(plain.perplexity, rel=0.2)


def test_quality_compares_quantised_files_as_they_are_with_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.tiny_checkpoint._FFN", 64)
    plain, quantised = (write_tiny_checkpoint(tmp_path / name) for name in ("plain", "eight bits"))
    quantise_checkpoint(quantised, *compressed("pack-quantized", 8, 32, symmetric=False))
    result = CliRunner().invoke(quality.command, [str(plain), str(quantised), "--tokens", "1024"])
    assert result.exit_code == 0, result.output
    rows = [line.split(" | ") for line in result.output.splitlines()[4:]]
    assert [row[0].lstrip("| ") for row in rows] == [
        "as in the checkpoint",
        "eight bits: int8_zero, activations exact",
        "eight bits: int8_zero, activations int8, keys and values bfloat16",
    ]
    found = [float(row[1]) for row in rows]
    assert len(set(found)) == 3
    assert found[1:] == pytest.approx([found[0]] * 2, rel=0.1)
    refused = CliRunner().invoke(quality.command, [str(quantised), str(plain), "--tokens", "1024"])
    assert refused.exit_code == 1
    assert "Error: plain " in refused.output


def test_decode_takes_the_sizes_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    shape, stored = decode.shape_of(str(model))
    spec = build_spec(load_config(model))
    assert spec.moe is not None
    assert (shape.hidden, shape.num_experts, shape.layers) == (spec.hidden_size, spec.moe.num_experts, spec.num_layers)
    assert stored == ()
    refused = CliRunner().invoke(decode.command, ["--shape", str(tmp_path / "none")])
    assert refused.exit_code == 1
    assert refused.output.startswith("Error: ")


def test_decode_times_every_format_and_leaves_out_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    small = decode.Shape(64, 64, 32, 4, 2, 96, 128, 2)
    monkeypatch.setitem(decode.SHAPES, "olmoe", small)
    monkeypatch.setattr(decode, "_READ_BYTES", 2**20)
    arguments = ["--layers", "1", "--format", "bfloat16", "--format", "q4_0", "--format", "q4_k"]
    result = CliRunner().invoke(decode.command, arguments)
    assert result.exit_code == 0, result.output
    rows = [line.split("|")[1].strip() for line in result.output.splitlines() if line.startswith("| ")]
    assert rows == ["weights", *4 * ["bfloat16"], *4 * ["q4_0"]]
    assert "q4_k is left out: rows of 64 weights are not blocks of 256" in result.output
    products = decode.Products(small, 1, None, "int8")
    choices = torch.tensor([[[0, 1]]])
    num_bytes, operations = products.bytes_and_operations(choices)
    assert operations == 2 * (64 * (128 + 64) + 2 * 3 * 64 * 96 + 64 * 128)
    assert num_bytes == operations
