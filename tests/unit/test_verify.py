"""Recorded hashes of a model folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launcher.cli import main
from moeserve.model.cache import MANIFEST_NAME
from moeserve.model.source import resolve_model
from moeserve.model.spec import ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def verify(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["verify", str(folder), *options])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


def test_a_folder_is_recorded_and_verified(folder: Path) -> None:
    assert verify(folder, "--record").stdout == f"{folder} is recorded: 3 files.\n"
    assert verify(folder).stdout == f"{folder} is what its manifest says: 3 files.\n"


def test_a_flipped_bit_is_found_by_the_command_and_at_start(folder: Path) -> None:
    verify(folder, "--record")
    assert resolve_model(str(folder)) == folder
    flip_a_bit(folder / "model.safetensors")
    result = verify(folder)
    assert result.exit_code == 1
    assert "model.safetensors does not have the content" in result.output
    with pytest.raises(ModelError, match="does not have the content"):
        resolve_model(str(folder))


def test_a_folder_is_recorded_anew_when_it_is_asked_for(folder: Path) -> None:
    verify(folder, "--record")
    flip_a_bit(folder / "model.safetensors")
    assert verify(folder, "--record").exit_code == 0
    assert verify(folder).exit_code == 0


def test_without_a_manifest_there_is_nothing_to_compare_with(folder: Path) -> None:
    result = verify(folder)
    assert result.exit_code == 1
    assert f"Error: {folder} has no readable {MANIFEST_NAME}" in result.stderr


def test_a_manifest_that_names_a_pipe_is_refused(folder: Path) -> None:
    verify(folder, "--record")
    (folder / "tokenizer_config.jsonl").touch()
    verify(folder, "--record")
    (folder / "tokenizer_config.jsonl").unlink()
    os.mkfifo(folder / "tokenizer_config.jsonl")
    assert "is not a regular file" in verify(folder).stderr


def test_another_programs_manifest_is_left_alone(folder: Path) -> None:
    (folder / MANIFEST_NAME).write_text("{}")
    assert "left as it is" in verify(folder, "--record").output
    assert (folder / MANIFEST_NAME).read_text() == "{}"
    assert resolve_model(str(folder)) == folder


def test_a_folder_that_cannot_be_served_is_one_sentence(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in verify(folder, "--record").output
