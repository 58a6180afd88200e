"""A checkpoint or configuration that cannot be served is one clear sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.model.checkpoint import read_index
from moeserve.model.families import load_config
from moeserve.model.spec import CheckpointError, ModelError, UnsupportedModel
from moeserve.model.weights import load_decoder
from tests.support.checkpoints import change_tensors, load, spec_of
from tests.support.tiny_models import save

_NORM = "model.layers.1.input_layernorm.weight"


def _rename(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.surprise.weight"] = tensors.pop(_NORM).clone()
    tensors[_NORM] = torch.ones(64)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop(_NORM), f"lacks the tensor {_NORM}"),
        (
            lambda tensors: tensors.update({_NORM: torch.ones(63)}),
            r"has shape \[63\], but the configuration says \[64\]",
        ),
        (lambda tensors: tensors.update({_NORM: torch.ones(64, dtype=torch.int32)}), "stored as I32, which cannot be"),
        (lambda tensors: tensors.update({_NORM: torch.ones(64).to(torch.float8_e4m3fn)}), "no scales of its blocks"),
        (_rename, "model.layers.1.surprise.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_sentence(change: Any, sentence: str, tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data[:-100], r"model.safetensors is truncated, \d+ of \d+ bytes"),
        (lambda data: b"", r"model.safetensors is empty: download it again\.$"),
        (
            lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "model.safetensors .*: run git lfs pull",
        ),
        (lambda data: data[:5], "truncated or not a safetensors"),
        (lambda data: data[:8] + b"#" + data[9:], "damaged, its header"),
        (lambda data: b"PK\x03\x04" + b"\xff" * 50, "truncated or not a safetensors"),
    ],
)
def test_a_damaged_file_of_weights_is_one_sentence(
    damage: Callable[[bytes], bytes], sentence: str, tmp_path: Path
) -> None:
    save("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    save("llama", tmp_path, max_shard_size="60KB")
    spec = spec_of(tmp_path)
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"{victim.name} is missing"):
        load_decoder(tmp_path, spec)
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load_decoder(tmp_path, spec)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickled weights only"):
        load_decoder(tmp_path, spec)


def test_an_index_may_not_name_files_elsewhere(tmp_path: Path) -> None:
    save("llama", tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="outside its folder"):
        read_index(tmp_path)


def test_a_shape_is_checked_before_memory_is_taken(tmp_path: Path) -> None:
    """A configuration of an absurdly large model fails on the first shape, not on an allocation."""
    save("mixtral", tmp_path)
    spec = replace(spec_of(tmp_path), hidden_size=1 << 40)
    with pytest.raises(CheckpointError, match="has shape"):
        load_decoder(tmp_path, spec, max_model_len=32)


@pytest.mark.parametrize(
    ("content", "error", "sentence"),
    [
        (None, ModelError, "no config.json"),
        ("{", ModelError, "not valid JSON"),
        ("[]", ModelError, "does not hold a JSON object"),
        ("{}", UnsupportedModel, "no model_type"),
        (
            '{"model_type": "mixtral", "quantization_config": [4]}',
            ModelError,
            r"quantization_config must be an object\.$",
        ),
        ('{"model_type": "mamba2"}', UnsupportedModel, "'mamba2' are not supported"),
        ('{"model_type": "llama", "hidden_size": "wide"}', ModelError, "hidden_size is 'wide'"),
        ('{"model_type": "llama", "attention_dropout": "wide"}', ModelError, "not a valid llama configuration"),
    ],
)
def test_an_unusable_configuration_is_one_sentence(
    content: str | None, error: type[ModelError], sentence: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(error, match=sentence) as caught:
        load_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\n")
    load(tmp_path)
    assert not (tmp_path / "ran").exists()
