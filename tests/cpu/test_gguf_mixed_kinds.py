"""GGUF files that mix kinds within one matrix of our own code: what is kept of them, and that the plan counts it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from kernels.cpu.library import native_kernels
from kernels.cpu.packing import WeightMemory
from kernels.ops import CpuOps
from kernels.weight_formats import Arithmetic
from moeserve.config import ServeConfig
from moeserve.engine.memory_plan import plan_model, read_any_spec, rounding_of
from moeserve.model.checkpoint import read_index
from moeserve.model.decoder import Decoder
from moeserve.model.gguf.folder import gguf_folder
from moeserve.model.spec import DecoderSpec
from moeserve.model.weights import load_decoder
from tests.support.gguf_export import ARCHITECTURES, Quantise, copy_gguf, write_gguf
from tests.support.gguf_modules import tiny, write_module_gguf
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import build

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels.")
_TEXT = list(range(3, 30))
# Dense; dense and shared experts; dense blocks beside experts; shared experts in one matrix; delta rules. Fields make
# blocks fit the rows of shared experts.
_FIELDS: dict[str, dict[str, int]] = {
    "qwen35": {},
    "glm4moe": {},
    "gemma4": {},
    "granitehybrid": {"shared_intermediate_size": 64},
    "qwen3next": {"shared_expert_intermediate_size": 64},
}
_MODELS = tuple(_FIELDS)


def write(architecture: str, folder: Path, quantise: Quantise) -> Path:
    """Write a tiny model's file; return its folder."""
    folder.mkdir()
    torch.manual_seed(3)
    if architecture in ARCHITECTURES:
        case, fields = ARCHITECTURES[architecture]
        write_gguf(folder / "tiny.gguf", architecture, build(case, **fields, **_FIELDS[architecture]), quantise)
    else:
        code = tiny(architecture, **_FIELDS[architecture])
        code.outer.save_pretrained(folder / "saved")
        write_module_gguf(folder / "tiny.gguf", architecture, code, folder / "saved", quantise)
    return gguf_folder(folder / "tiny.gguf", folder / "cache")


def in_kinds(**kinds: Kind) -> Quantise:
    """Quantise to the kind of the first word that is in a tensor's name, the others to Q8_0, as far as blocks fit."""

    def quantise(name: str, values: np.ndarray) -> Kind:
        if re.search("gate_inp|conv|norm|router", name):
            return Kind.F32
        kind = next((kind for word, kind in kinds.items() if word in name), Kind.Q8_0)
        return kind if values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else Kind.F32

    return quantise


_MIXES: dict[str, Quantise] = {
    "all in one kind": in_kinds(),
    "gate and up in other kinds": in_kinds(ffn_gate=Kind.Q4_0, ffn_up=Kind.Q5_1),
    "floats beside blocks": in_kinds(ffn_gate=Kind.F16),
    "narrow floats beside blocks": in_kinds(ffn_gate=Kind.BF16, ffn_up=Kind.BF16),
    "a down projection in floats": in_kinds(ffn_down=Kind.F32),
}


def load(folder: Path, arithmetic: Arithmetic | None) -> Decoder:
    """arithmetic: None widens all weights."""
    config = ServeConfig(arithmetic=arithmetic or "auto")
    spec, _ = read_any_spec(folder, config)
    assert isinstance(spec, DecoderSpec)
    if arithmetic is None:
        return load_decoder(folder, spec, max_model_len=64)
    rounding = rounding_of(config, spec, read_index(folder))
    return load_decoder(folder, spec, ops=CpuOps(arithmetic), max_model_len=64, rounding=rounding)


@pytest.mark.parametrize("architecture", _MODELS)
def test_the_plan_counts_the_bytes_that_are_packed_whatever_kinds_lie_beside_each_other(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = 0

    def take(memory: WeightMemory, size: int, own: Callable[[WeightMemory, int], torch.Tensor]) -> torch.Tensor:
        nonlocal packed
        packed += size
        return own(memory, size)

    own = WeightMemory.take
    monkeypatch.setattr(WeightMemory, "take", lambda memory, size: take(memory, size, own))
    unpacked = {}  # Bytes of the plan beyond those that are packed: the embedding, norms.
    for number, (name, quantise) in enumerate(_MIXES.items()):
        folder = write(architecture, tmp_path / str(number), quantise)
        packed = 0
        load(folder, "exact")
        unpacked[name] = plan_model(folder, ServeConfig(arithmetic="exact")).weights_bytes - packed
    assert len(set(unpacked.values())) == 1, unpacked


@pytest.mark.parametrize("architecture", _MODELS)
def test_matrices_of_two_kinds_of_blocks_are_rounded_to_8_bits(architecture: str, tmp_path: Path) -> None:
    kinds = in_kinds(ffn_gate=Kind.Q5_1, ffn_up=Kind.Q5_0, attn_gate=Kind.Q5_0)
    folder = write(architecture, tmp_path / "mixed", kinds)
    (tmp_path / "rounded").mkdir()
    # Only there are gates of delta rules one matrix with queries, keys and values.
    parts = r"ffn_(gate|up)(_exps|_shexp)?\.weight" + (
        r"|attn_(gate|qkv)\.weight" if architecture == "qwen3next" else ""
    )

    def change(name: str, tensor: gguf.ReaderTensor) -> Iterator[tuple[str, np.ndarray, Kind]]:
        is_one = re.search(parts, name) and tensor.tensor_type not in (Kind.F32, Kind.Q8_0)
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type) if is_one else None
        values = np.array(tensor.data) if numbers is None else np.asarray(gguf.quantize(numbers, Kind.Q8_0))
        yield name, values, tensor.tensor_type if numbers is None else Kind.Q8_0

    copy_gguf(tmp_path / "mixed" / "tiny.gguf", tmp_path / "rounded" / "tiny.gguf", change)
    rounded = gguf_folder(tmp_path / "rounded" / "tiny.gguf", tmp_path / "cache")
    found, expected = (PagedRunner(load(own, "exact"), [_TEXT]).step([(0, 0, len(_TEXT))]) for own in (folder, rounded))
    assert torch.equal(found, expected)
    plans = [plan_model(own, ServeConfig()) for own in (folder, rounded)]
    assert plans[0].weights_bytes == plans[1].weights_bytes
    assert any("rounded from Q5_0+Q5_1" in name for name in plans[0].rounding.stored)
