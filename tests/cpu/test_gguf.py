"""GGUF models give the numbers of the models that they were made from."""

from __future__ import annotations

import json
import random
import resource
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from kernels.ops import CpuOps
from kernels.weight_formats import Arithmetic
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.memory_plan import plan_model, rounding_of
from moeserve.model.checkpoint import read_index
from moeserve.model.families import build_spec, load_config
from moeserve.model.gguf.fields import plain
from moeserve.model.gguf.folder import gguf_folder
from moeserve.model.gguf.header import read_gguf
from moeserve.model.gguf.parts import GgufPart, Heads
from moeserve.model.gguf.tensors import read_packed, read_part
from moeserve.model.source import resolve_model
from moeserve.model.spec import CheckpointError, ModelError
from moeserve.model.weights import load_decoder
from tests.support.gguf_export import ARCHITECTURES, as_it_is, copy_gguf, write_gguf
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import build

_TOKENS = torch.randint(1, 128, (21,), generator=torch.Generator().manual_seed(2)).tolist()


def folder_of(path: Path, tmp_path: Path) -> Path:
    return gguf_folder(path, tmp_path / "cache")


def logits_of(folder: Path, arithmetic: Arithmetic | None = None) -> torch.Tensor:
    """arithmetic: None widens all weights."""
    spec = build_spec(load_config(folder))
    if arithmetic is None:
        decoder = load_decoder(folder, spec, max_model_len=64)
    else:
        rounding = rounding_of(ServeConfig(arithmetic=arithmetic), spec, read_index(folder))
        decoder = load_decoder(folder, spec, ops=CpuOps(arithmetic), max_model_len=64, rounding=rounding)
    return PagedRunner(decoder, [_TOKENS]).step([(0, 0, len(_TOKENS))])


@pytest.mark.parametrize(
    ("architecture", "latent"),
    [*((name, "split") for name in ARCHITECTURES), ("deepseek2", "whole"), ("deepseek2-v3", "whole")],
)
def test_logits_are_those_of_the_model_that_was_written(architecture: str, latent: str, tmp_path: Path) -> None:
    case, fields = ARCHITECTURES[architecture]
    model = build(case, **fields)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture, model, latent=latent)
    with torch.no_grad():
        expected = model(torch.tensor([_TOKENS]), use_cache=False).logits[0]
    found = logits_of(folder_of(path, tmp_path))
    assert 0.5 < expected.abs().max() < 50
    assert (found - expected).abs().max() <= 1e-4


def spelt(kinds: dict[str, Kind]) -> object:
    """Quantise tensors whose names hold a key; the others stay float32."""
    return lambda name, values: next((kind for key, kind in kinds.items() if key in name), Kind.F32)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of many kinds of tensors, with widths that all of them allow."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    model = build("mixtral", hidden_size=256, intermediate_size=256, head_dim=64)
    kinds = {"attn_q": Kind.Q8_0, "attn_k": Kind.Q4_0, "attn_v": Kind.Q4_1, "attn_output": Kind.BF16}
    kinds |= {"ffn_gate_exps": Kind.TQ2_0, "ffn_down_exps": Kind.Q5_0, "ffn_up_exps": Kind.F16, "token_embd": Kind.Q8_0}
    write_gguf(path, "llama", model, spelt(kinds))  # type: ignore[arg-type]
    return path


def test_a_header_is_what_the_gguf_package_reads(quantised: Path) -> None:
    header, reader = read_gguf(quantised), gguf.GGUFReader(quantised)
    for tensor in reader.tensors:
        own = header.tensors[tensor.name]
        assert (own.kind, own.shape) == (tensor.tensor_type.name, tuple(int(n) for n in tensor.shape[::-1]))
        assert (own.offset, own.num_bytes) == (tensor.data_offset, tensor.n_bytes)
    found = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert {name: plain(value) for name, value in header.metadata.items()} == found


def test_numbers_are_those_that_the_gguf_package_unpacks(quantised: Path) -> None:
    for tensor in gguf.GGUFReader(quantised).tensors:
        own = read_gguf(quantised).tensors[tensor.name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        assert torch.equal(read_part(GgufPart((own,))).float(), torch.from_numpy(expected).view(own.shape))


def test_rows_keep_their_blocks_and_other_kinds_are_rounded_to_8_bits(quantised: Path) -> None:
    tensors = read_gguf(quantised).tensors
    plain = GgufPart((tensors["blk.0.attn_q.weight"],))
    paired = GgufPart(plain.sources, "pairs", Heads(4))
    rows = read_packed(plain)
    assert rows.format.name == "q8_0"
    assert torch.equal(read_packed(paired).data, rows.rows(torch.arange(256).view(4, 32, 2).mT.flatten()).data)
    experts = GgufPart((tensors["blk.0.ffn_gate_exps.weight"],))
    with_expert = read_packed(experts, 3)
    assert with_expert.format.name == "q8_0"
    wide = gguf.quants.dequantize(with_expert.data.numpy(), Kind.Q8_0)
    assert np.abs(wide - read_part(experts)[3].numpy()).max() < 0.01


def widened(tensor: gguf.ReaderTensor) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(tensor.shape[::-1])


def test_the_logits_of_quantised_files_are_those_of_their_values(quantised: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide.gguf"
    copy_gguf(quantised, wide, lambda name, tensor: [(name, widened(tensor), Kind.F32)])
    found, expected = logits_of(folder_of(quantised, tmp_path)), logits_of(folder_of(wide, tmp_path))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("first", ["attn", "nothing"])
def test_a_split_model_is_one_model(first: str, tmp_path: Path) -> None:
    """first: in the names of the tensors of the first part, which holds all metadata."""
    model = build("mixtral")
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, "llama", model)
    names = [f"tiny-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for number, name in enumerate(names):

        def own(tensor_name: str, tensor: gguf.ReaderTensor, number: int = number) -> object:
            return as_it_is(tensor_name, tensor) if (first in tensor_name) == (number == 0) else []

        copy_gguf(whole, tmp_path / name, own, lambda _, number=number: number == 0)  # type: ignore[arg-type,misc]
    expected = logits_of(folder_of(whole, tmp_path))
    for name in names:
        assert torch.equal(logits_of(folder_of(tmp_path / name, tmp_path)), expected)
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 parts, the first is tiny-00002-of-00002\.gguf"):
        read_gguf(tmp_path / names[0])


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (("m-00002-of-00002.gguf", "m-00001-of-00002.gguf"), r"m-00001-of-00002\.gguf is part 2 of 2"),
        (("m.gguf", "m-00002-of-00002.gguf"), r"m\.gguf is part 1 of 2 .*must end in -00001-of-00002\.gguf"),
        (("m-00001-of-00001.gguf", "other.gguf"), r"m-00001-of-00001\.gguf is part 1 of 2"),
    ],
    ids=["swapped", "renamed", "of another number"],
)
def test_parts_under_other_names_are_refused_with_the_names_that_they_should_have(
    names: tuple[str, str], named: str, tmp_path: Path
) -> None:
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    with pytest.raises(CheckpointError, match=rf"^{named}"):
        read_gguf(tmp_path / names[0])


def test_a_path_that_is_not_utf8_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "tiny\udcff.gguf"
    write_gguf(path, "llama", build("mixtral"))
    with pytest.raises(ModelError, match=r"tiny\\udcff\.gguf' is not UTF-8: rename the file"):
        gguf_folder(path, tmp_path / "cache")


def test_files_with_each_expert_by_itself_are_those_with_all_of_them_in_one_tensor(
    quantised: Path, tmp_path: Path
) -> None:
    """As Mixtral's files were before 2024-04; they do not tell the width of an expert either."""

    def apart(name: str, tensor: gguf.ReaderTensor) -> object:
        if "_exps" not in name:
            return as_it_is(name, tensor)
        block, _, own = name.removesuffix("_exps.weight").rpartition(".")
        return [(f"{block}.{own}.{e}.weight", np.array(one), tensor.tensor_type) for e, one in enumerate(tensor.data)]

    old = tmp_path / "old.gguf"
    copy_gguf(quantised, old, apart, lambda key: not key.endswith("expert_feed_forward_length"))  # type: ignore[arg-type]
    folders = [folder_of(path, tmp_path) for path in (quantised, old)]
    assert torch.equal(*(logits_of(folder) for folder in folders))
    assert torch.equal(*(logits_of(folder, "exact") for folder in folders))


def test_a_file_is_a_model_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen3moe", build("qwen3_moe", mlp_only_layers=[]))
    folder = resolve_model(str(path))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_moe"
    # A tokenizer beside the file is taken instead of its own.
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes() + b"\n")
    other = resolve_model(str(path))
    assert other != folder
    assert (other / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"general.architecture": "rwkv6"}, "architecture 'rwkv6' .*: llama,"),
        ({"tokenizer.ggml.pre": "own"}, "'own'"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        ({"llama.rope.scaling.type": "su"}, "'su'"),
        ({"llama.expert_used_count": "two"}, "The field llama.expert_used_count is no whole number"),
        ({"llama.embedding_length": None}, "lacks the field llama.embedding_length"),
        ({"tokenizer.ggml.merges": ["ab"]}, "has the merge 'ab', which is no pair"),
    ],
)
def test_what_cannot_be_served_gets_one_sentence(
    change: dict[str, object], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", build("mixtral"))
    header = read_gguf(path)
    metadata = {name: value for name, value in {**header.metadata, **change}.items() if value is not None}
    monkeypatch.setattr(
        "moeserve.model.gguf.folder.read_gguf", lambda _: type(header)(metadata, header.tensors, header.files)
    )
    with pytest.raises(ModelError, match=sentence):
        folder_of(path, tmp_path)


@pytest.mark.parametrize(
    ("name", "numbers", "sentence"),
    [
        ("rope_freqs.weight", [1.0] * 7, "do not fit"),
        ("rope_freqs.weight", [1.0] * 7 + [0.0], "not all positive"),
        ("rope_factors_long.weight", [1.0] * 8, "long-context factors"),
    ],
)
def test_factors_of_rotary_frequencies_that_make_no_sense_get_one_sentence(
    name: str, numbers: list[float], sentence: str, tmp_path: Path
) -> None:
    path, bad = tmp_path / "tiny.gguf", tmp_path / "bad.gguf"
    write_gguf(path, "llama", build("mixtral"))
    further = (name, np.array(numbers, np.float32), Kind.F32)

    def change(own: str, tensor: gguf.ReaderTensor) -> object:
        return [*as_it_is(own, tensor), *([further] if own == "output_norm.weight" else [])]

    copy_gguf(path, bad, change)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=sentence):
        folder_of(bad, tmp_path)


def test_a_file_is_refused_on_transformers_code(quantised: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave --model-impl at auto"):
        plan_model(folder_of(quantised, tmp_path), ServeConfig(model_impl="transformers"))


def test_a_tensor_whose_name_would_break_a_line_is_refused_in_one_sentence(quantised: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(quantised.read_bytes().replace(b"attn_q.weight", b"attn\nq.weight"))
    with pytest.raises(CheckpointError, match=r"^bad.gguf is damaged, a tensor's name has [^\n]*\.$"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: b"", r"bad\.gguf is empty: download it again"),
        (
            lambda data: b"version https://git-lfs.github.com/spec/v1\n",
            "a pointer of Git LFS .*: run git lfs pull",
        ),
        (lambda data: b"<html>no</html>", r"bad\.gguf is not a GGUF file"),
        (lambda data: data[:-1], r"is truncated, \d+ of \d+ bytes"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "is big-endian"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "is of GGUF version 1, .*: take a newer file"),
    ],
)
def test_what_is_no_whole_gguf_file_gets_one_sentence_with_what_to_do(
    change: Callable[[bytes], bytes], sentence: str, quantised: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(change(quantised.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"^[^\n]*{sentence}[^\n]*\.$"):
        read_gguf(path)


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "Q1_0", "I32"])
def test_integers_and_kinds_that_only_ggml_computes_with_are_refused_before_weights(kind: str, tmp_path: Path) -> None:
    path, number = tmp_path / "tiny.gguf", Kind[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("output.weight", np.zeros((2, block_bytes * 256 // block), np.uint8), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wanted = rf"^tiny\.gguf holds output\.weight as {kind}, which cannot be read"
    with pytest.raises(CheckpointError, match=wanted):
        read_gguf(path)


@pytest.mark.parametrize("number", [400, pytest.param(100_000, marks=pytest.mark.long)])
def test_mutated_headers_get_one_sentence(number: int, quantised: Path, tmp_path: Path) -> None:
    """Flip, cut and overwrite bytes of a header: each is read, or refused in a sentence, with little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    draw, content = random.Random(4), quantised.read_bytes()
    header_bytes = min(tensor.offset for tensor in read_gguf(quantised).tensors.values())
    head, path = content[:header_bytes], tmp_path / "bad.gguf"
    numbers = [struct.pack("<Q", value) for value in (0, 1, 2**31, 2**40, 2**63, 2**64 - 1)]
    for _ in range(number):
        bad = bytearray(head)
        for _ in range(draw.choice((1, 1, 2, 8))):
            place = draw.randrange(len(bad) if draw.random() < 0.5 else 64)
            new = draw.choice(numbers) if draw.random() < 0.5 else bytes((draw.randrange(256),))
            bad[place : place + len(new)] = new
        is_cut = draw.random() < 0.2
        with path.open("wb") as file:
            file.write(bad[: draw.randrange(len(bad))] if is_cut else bad)
            if not is_cut:
                file.truncate(len(content))  # Only the header is read.
        with suppress(CheckpointError):
            read_gguf(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024
