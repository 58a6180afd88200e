"""Fields and tensors of a GGUF file that change numbers are used as llama.cpp has them, or refused by their name."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType

from moeserve.model.families import build_spec, load_config
from moeserve.model.gguf.architectures import config_of
from moeserve.model.gguf.config import Fields, generation_config_of, num_layers
from moeserve.model.gguf.folder import gguf_folder
from moeserve.model.gguf.header import GgufHeader, read_gguf
from moeserve.model.gguf.parts import parts_of
from moeserve.model.gguf.tokenizer import build_tokenizer, tokenizer_config_of
from moeserve.model.spec import CheckpointError, ModelError, UnsupportedModel
from moeserve.model.weights import load_decoder
from tests.support import gguf_modules
from tests.support.gguf_export import ARCHITECTURES, as_it_is, copy_gguf, write_gguf
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import build

Headers = Callable[[str], GgufHeader]


@pytest.fixture(scope="module")
def header_of(tmp_path_factory: pytest.TempPathFactory) -> Headers:
    """Return the header of a tiny model of an architecture."""
    folder, known = tmp_path_factory.mktemp("gguf"), dict[str, GgufHeader]()

    def header(architecture: str) -> GgufHeader:
        if architecture not in known:
            case, fields = ARCHITECTURES[architecture]
            path = folder / f"{architecture}.gguf"
            write_gguf(path, architecture, build(case, **fields))
            known[architecture] = read_gguf(path)
        return known[architecture]

    return header


def with_fields(header: GgufHeader, **changes: Any) -> GgufHeader:
    """Change fields of the architecture, by names with `__` for dots. None takes one away."""
    start = header.metadata["general.architecture"]
    further = {f"{start}.{name.replace('__', '.')}": value for name, value in changes.items()}
    merged = {**header.metadata, **further}
    return replace(header, metadata={name: value for name, value in merged.items() if value is not None})


_EVERYWHERE: list[dict[str, Any]] = [
    {"attn_logit_softcapping": 50.0},
    {"final_logit_softcapping": 30.0},
    {"router_logit_softcapping": 30.0},
    {"attention__temperature_scale": 0.1},
    {"attention__indexer__top_k": 64},
    {"attention__causal": False},
    {"attention__max_alibi_bias": 8.0},
    {"swiglu_clamp_exp": [0.0, 7.0]},
    {"rope__scaling__attn_factor": 1.2},
    {"rope__scaling__yarn_attn_factor": 1.2},
    {"rope__scaling__yarn_ext_factor": 0.5},
    {"rope__scaling__alpha": 1000.0},
    {"use_parallel_residual": True},
]


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {"llama-frequencies"}))
@pytest.mark.parametrize("change", _EVERYWHERE, ids=lambda change: next(iter(change)))
def test_a_field_that_changes_numbers_is_refused_by_its_name(
    architecture: str, change: dict[str, Any], header_of: Headers
) -> None:
    name = next(iter(change)).replace("__", ".")
    config_of(header_of(architecture))
    with pytest.raises(UnsupportedModel, match=rf"^The GGUF file sets [\w.-]+\.{name} to [^\n]*\.$"):
        config_of(with_fields(header_of(architecture), **change))


# Of these changes, those that an architecture of `gguf_modules` has a place for.
_PLACES = {
    "gemma4": ("final_logit_softcapping",),
    "glm-dsa": ("attention__indexer__top_k",),
    "mistral3": ("attention__temperature_scale",),
    "mistral4": ("attention__temperature_scale",),
    "step35": ("swiglu_clamp_exp",),
}


@pytest.mark.parametrize("architecture", sorted(gguf_modules.ARCHITECTURES))
def test_so_it_is_where_the_names_are_those_of_the_package(architecture: str, tmp_path: Path) -> None:
    code = gguf_modules.tiny(architecture)
    code.outer.save_pretrained(tmp_path / "saved")
    gguf_modules.write_module_gguf(tmp_path / "tiny.gguf", architecture, code, tmp_path / "saved")
    header = read_gguf(tmp_path / "tiny.gguf")
    config_of(header)
    for change in _EVERYWHERE:
        name = next(iter(change))
        if name not in _PLACES.get(architecture, ()):
            with pytest.raises(UnsupportedModel, match=rf"{name.replace('__', '.')}[^\n]*\.$"):
                config_of(with_fields(header, **change))


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("llama", {"attention__scale": 0.5}),
        ("llama", {"attention__clamp_kqv": 8.0}),
        ("llama", {"logit_scale": 0.25}),
        ("llama", {"residual_scale": 0.2}),
        ("llama", {"embedding_scale": 12.0}),
        ("llama", {"attention__sliding_window": 16}),
        ("llama", {"rope__dimension_count": 8}),
        ("llama", {"attention__value_length": 8}),
        ("llama", {"expert_gating_func": 2}),
        ("llama", {"expert_weights_norm": False}),
        ("qwen3moe", {"expert_weights_norm": False}),
        ("qwen3moe", {"expert_weights_scale": 2.5}),
        ("qwen3moe", {"expert_group_count": 4}),
        ("qwen3moe", {"expert_gating_func": 2}),
        ("qwen2moe", {"expert_weights_norm": True}),
        ("olmoe", {"expert_gating_func": 3}),
        ("dots1", {"expert_gating_func": 1}),
        ("glm4moe", {"expert_gating_func": 1}),
        ("minimax-m2", {"expert_gating_func": 1}),
        ("deepseek2", {"expert_gating_func": 4}),
        ("deepseek2", {"expert_weights_norm": True}),
        ("granitemoe", {"rope__scaling__finetuned": False}),
        ("gpt-oss", {"attention__sliding_window_pattern": 4}),
        ("gpt-oss", {"rope__freq_base_swa": 5000.0}),
    ],
)
def test_a_field_that_the_architecture_has_no_place_for_is_refused(
    architecture: str, change: dict[str, Any], header_of: Headers
) -> None:
    with pytest.raises(UnsupportedModel, match=r"^[^\n]+\.$"):
        config_of(with_fields(header_of(architecture), **change))


@pytest.mark.parametrize(
    ("architecture", "change", "same"),
    [
        ("llama", {"expert_weights_scale": 0.0, "logit_scale": 1.0, "attention__clamp_kqv": 0.0}, {}),
        ("llama", {"expert_gating_func": 1, "expert_weights_norm": True}, {}),
        ("llama", {"attention__sliding_window": 1 << 20}, {}),
        ("llama", {"rope__scaling__factor": 4.0}, {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}),
        ("llama", {"rope__scale_linear": 4.0}, {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}),
        ("llama", {"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, {}),
        ("olmoe", {"attention__clamp_kqv": 0.0}, {"attention__clamp_kqv": None}),
        ("dots1", {"expert_weights_scale": 0.0}, {"expert_weights_scale": 1.0}),
        ("glm4moe", {"expert_gating_func": None}, {"expert_gating_func": 2}),
        ("deepseek2", {"expert_gating_func": None}, {"expert_gating_func": 1}),
        # The first files of GLM-4.7-Flash did not tell how experts are chosen.
        ("deepseek2-v3", {"expert_gating_func": None}, {"expert_gating_func": 2}),
        ("qwen3moe", {"rope__dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3}, {}),
        ("minimax-m2", {"rope__dimension_count": None}, {"rope__dimension_count": 16}),
        (
            "granitemoe",
            {"attention__scale": None, "embedding_scale": None, "residual_scale": None, "logit_scale": None},
            {"attention__scale": 16**-0.5, "embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0},
        ),
        (
            "qwen3moe",
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__yarn_ext_factor": 1.0},
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": "context_length",
            },
        ),
    ],
)
def test_an_absent_or_neutral_field_means_its_usual_value(
    architecture: str, change: dict[str, Any], same: dict[str, Any], header_of: Headers
) -> None:
    header = header_of(architecture)
    start = header.metadata["general.architecture"]
    named = {
        name: header.metadata[f"{start}.context_length"] if own == "context_length" else own
        for name, own in same.items()
    }
    assert config_of(with_fields(header, **change)) == config_of(with_fields(header, **named))


def test_a_factor_of_rotary_positions_without_a_type_is_a_linear_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("mixtral", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", model)
    changed = with_fields(read_gguf(path), rope__scaling__factor=4.0)
    monkeypatch.setattr("moeserve.model.gguf.folder.read_gguf", lambda _: changed)
    folder = gguf_folder(path, tmp_path / "cache")
    tokens = list(range(1, 22))
    found = PagedRunner(load_decoder(folder, build_spec(load_config(folder)), max_model_len=64), [tokens])
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert (found.step([(0, 0, len(tokens))]) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("architecture", "tensor"),
    [
        ("llama", "blk.1.post_attention_norm.weight"),
        ("gpt-oss", "blk.1.ffn_norm.weight"),
        ("qwen3moe", "rope_freqs.weight"),
        ("qwen3moe", "blk.1.attn_q.scale"),
        ("qwen3moe", "blk.1.layer_output_norm.weight"),
        ("qwen3moe", "blk.7.attn_q.weight"),
        ("deepseek2", "blk.1.indexer.attn_k.weight"),
        ("glm4moe", "output_norm_extra.weight"),
    ],
)
def test_a_tensor_that_would_be_left_out_or_taken_twice_is_refused_by_its_name(
    architecture: str, tensor: str, header_of: Headers
) -> None:
    header = header_of(architecture)
    tensors = {**header.tensors, tensor: header.tensors["output_norm.weight"]}
    bad = replace(header, tensors=tensors)
    fields = Fields(bad)
    assert list(parts_of(header, fields, num_layers(fields)))
    with pytest.raises(CheckpointError, match=rf"^The GGUF file holds [^\n]*{tensor.removeprefix('blk.1.')}[^\n]*\.$"):
        list(parts_of(bad, fields, num_layers(fields)))


_OWN = {
    "attn_sinks.weight": {"gpt-oss"},
    "exp_probs_b.bias": {"bailingmoe2", "deepseek2-v3", "dots1", "ernie4_5-moe", "glm4moe", "minimax-m2"},
    "attn_norm.bias": {"phimoe"},
    "attn_k_norm.bias": set[str](),
}


def load(path: Path, cache: Path) -> None:
    folder = gguf_folder(path, cache)
    load_decoder(folder, build_spec(load_config(folder)), max_model_len=64)


@pytest.mark.parametrize(
    ("tensor", "architecture"),
    [
        (tensor, name)
        for tensor, own in _OWN.items()
        for name in ARCHITECTURES
        if name not in own | {"llama-frequencies", "qwen3vlmoe"}
    ],
)
def test_a_tensor_of_another_architecture_is_refused_when_weights_are_loaded(
    architecture: str, tensor: str, header_of: Headers, tmp_path: Path
) -> None:
    header, further = header_of(architecture), f"blk.1.{tensor}"
    bad = tmp_path / "bad.gguf"

    def change(name: str, own: gguf.ReaderTensor) -> Any:
        extra = [(further, np.ones(64, np.float32), Kind.F32)] if name == "output_norm.weight" else []
        return [*as_it_is(name, own), *extra]

    copy_gguf(header.files[0], bad, change)
    with pytest.raises(ModelError, match=r"^[^\n]*(hold|have)[^\n]*\.$"):
        load(bad, tmp_path / "cache")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ((b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), "two tensors have one name"),
        ((b"tokenizer.ggml.eos_token_id", b"tokenizer.ggml.bos_token_id"), "two fields of its metadata have one name"),
    ],
)
def test_a_name_that_comes_twice_is_refused(
    names: tuple[bytes, bytes], sentence: str, header_of: Headers, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(header_of("llama").files[0].read_bytes().replace(*names))
    with pytest.raises(CheckpointError, match=sentence):
        read_gguf(bad)


@pytest.mark.parametrize(
    "change",
    [
        {"attention__key_length": 0},
        {"attention__key_length": -3},
        {"attention__key_length": None, "attention__head_count": 100_000},
    ],
    ids=str,
)
def test_heads_without_a_width_are_refused_in_a_sentence(change: dict[str, Any], header_of: Headers) -> None:
    with pytest.raises(CheckpointError, match=r"have no width\.$"):
        config_of(with_fields(header_of("llama"), **change))


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("qwen3next", {"ssm__time_step_rank": 0}),
        ("deepseek2-v3", {"rope__scaling__yarn_log_multiplier": "x"}),
        ("deepseek2-v3", {"rope__scaling__yarn_log_multiplier": []}),
    ],
)
def test_a_field_of_a_wrong_kind_is_refused_in_a_sentence(
    architecture: str, change: dict[str, Any], header_of: Headers
) -> None:
    with pytest.raises(ModelError, match=r"^[^\n]+\.$"):
        build_spec(config_of(with_fields(header_of(architecture), **change)))


@pytest.mark.parametrize("architecture", ["llama", "qwen3next", "ernie4_5-moe"])
@pytest.mark.parametrize(
    "change",
    [{"block_count": 2**31}, {"block_count": 0}, {"nextn_predict_layers": -(2**63)}, {"block_count": []}],
    ids=str,
)
def test_a_number_of_layers_that_the_file_cannot_hold_is_refused(
    architecture: str, change: dict[str, Any], header_of: Headers
) -> None:
    with pytest.raises(CheckpointError, match=r"^[^\n]+\.$"):
        config_of(with_fields(header_of(architecture), **change))


_VALUES: list[Any] = [0, 1, -1, 2**40, 1.5, float("nan"), True, "text", "", [], ["a", "b"]]
_VALUES += [array("i", [1, 2]), array("f", [0.5]), array("B", bytes(300)), array("Q", [2**64 - 1])]
_TOKENIZER = ["model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token"]
_TOKENIZER += ["add_space_prefix", "precompiled_charsmap", "remove_extra_whitespaces", "suppress_tokens"]
_TOKENIZER += [f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")]
_ALONE = ["split.tensors.count", "general.architecture", "tokenizer.chat_template"]


def read_all(header: GgufHeader) -> None:
    """Do what a start does with the fields of a file."""
    config_of(header)
    generation_config_of(header)
    tokenizer_config_of(header.metadata)
    build_tokenizer(header.metadata)
    fields = Fields(header)
    for _ in parts_of(header, fields, num_layers(fields)):
        pass


def refusal(header: GgufHeader) -> str:
    try:
        read_all(header)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("architecture", ["llama", "gpt-oss", "deepseek2-v3", "phimoe", "qwen3next"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_field_of_any_kind_is_used_or_refused_in_one_sentence(
    kind: str, architecture: str, header_of: Headers
) -> None:
    header = header_of(architecture)
    size = len(header.metadata["tokenizer.ggml.tokens"])
    metadata = {**header.metadata, "tokenizer.ggml.model": kind, "tokenizer.ggml.scores": array("f", bytes(4 * size))}
    names = {*metadata, *_ALONE, *(f"tokenizer.ggml.{name}" for name in _TOKENIZER)}
    read_all(replace(header, metadata=metadata))
    for name in sorted(names):
        for value in _VALUES:
            sentence = refusal(replace(header, metadata={**metadata, name: value}))
            assert "\n" not in sentence, (name, value)
            assert len(sentence) < 500, (name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("tokenizer.ggml.tokens", value) for value in (3, "abc", 1.5, True, array("i", [1]))),
        *(("tokenizer.ggml.token_type", value) for value in (3, "abc", ["a"])),
        *(("tokenizer.ggml.merges", value) for value in (3, "a b", array("i", [1]))),
        *(("tokenizer.ggml.eos_token_id", value) for value in ("2", 1.5, ["a"], array("i", [2]))),
        *(("tokenizer.ggml.add_bos_token", value) for value in ("no", 7, ["a"], array("B", [0]))),
        ("tokenizer.ggml.pre", ["gpt-2"]),
        ("tokenizer.ggml.model", 7),
        ("tokenizer.chat_template", ["{{ 1 }}"]),
        ("llama.rope.scaling.type", ["linear"]),
        ("llama.rope.freq_base", array("f", [1e4])),
        ("llama.context_length", "64"),
    ],
)
def test_a_field_of_another_kind_is_refused_by_its_name(name: str, value: object, header_of: Headers) -> None:
    header = header_of("llama")
    with pytest.raises(CheckpointError, match=rf"^The field {name} is no [a-z ]+\.$"):
        read_all(replace(header, metadata={**header.metadata, name: value}))


def test_arrays_of_small_numbers_take_the_memory_of_their_bytes(tmp_path: Path) -> None:
    path, count = tmp_path / "large.gguf", 2**20
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    numbers = GGUFValueType.ARRAY.to_bytes(4, "little") + GGUFValueType.UINT8.to_bytes(4, "little")
    numbers += count.to_bytes(8, "little") + bytes(range(256)) * (count // 256)
    fields = b"".join((2).to_bytes(8, "little") + f"{number:02d}".encode() + numbers for number in range(60))
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (60).to_bytes(8, "little") + fields)
    tracemalloc.start()
    header = read_gguf(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert list(header.metadata["07"][:3]) == [0, 1, 2]
    assert most < 80 * 2**20
