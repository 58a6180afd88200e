"""`moeserve list`: the models in the hub library's cache, and whether they fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher import model_list
from launcher.cli import main
from moeserve.machine import Machine
from tests.support.tiny_checkpoint import write_tiny_checkpoint

MACHINE = Machine("a processor", 2, (), 2**40, 2**40)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("moeserve.machine.read_machine", lambda _: MACHINE)
    return tmp_path


def put(cache: Path, name: str) -> Path:
    """Return the folder of a model's only revision."""
    repository = cache / f"models--{name.replace('/', '--')}"
    revision = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    folder = repository / "snapshots" / revision
    folder.mkdir(parents=True)
    return folder


def test_an_empty_cache_says_how_a_model_is_fetched(cache: Path) -> None:
    assert "moeserve pull" in CliRunner().invoke(main, ["list"]).output


def test_a_model_of_safetensors_is_listed_with_its_size_and_its_fit(cache: Path) -> None:
    write_tiny_checkpoint(put(cache, "owner/tiny"))
    (line,) = CliRunner().invoke(main, ["list"]).output.splitlines()
    assert line.startswith("owner/tiny ")
    assert "fits, " in line
    assert "tokens of keys and values beside it" in line


def test_gguf_models_are_listed_by_kind_with_why_they_do_not_fit(cache: Path) -> None:
    folder = put(cache, "owner/files")
    for name in ("model-Q4_K_M-00001-of-00002.gguf", "model-Q4_K_M-00002-of-00002.gguf", "mmproj-F16.gguf"):
        (folder / name).write_bytes(b"no model")
    (found,) = model_list.cached_models()
    assert (found.name, found.num_bytes, len(found.parts)) == ("owner/files:Q4_K_M", 16, 2)
    assert CliRunner().invoke(main, ["list"]).output.startswith("owner/files:Q4_K_M")
    assert "does not fit" in CliRunner().invoke(main, ["list"]).output
