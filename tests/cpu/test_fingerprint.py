"""What determines bits makes KV, packed experts and the name of the service others; nothing else does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from launcher.run_directory import hash_model
from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.fingerprint import fingerprint_of, fingerprint_of_kv
from moeserve.engine.memory_plan import plan_model
from moeserve.engine.rank import Rank
from moeserve.model.expert_store import ExpertFile, layouts_of, stored_experts
from moeserve.model.gguf.folder import gguf_folder
from moeserve.run_context import RunContext
from tests.support.gguf_export import write_gguf
from tests.support.tiny_model import write_model_dir
from tests.support.tiny_models import build, save

BASE = ServeConfig(kv_cache_memory=2**20, max_num_seqs=4, max_model_len=64)


class Names(NamedTuple):
    """The fingerprint of KV, the name of the service, and that of its packed experts."""

    kv: str
    service: str
    experts: bytes


class Kind(NamedTuple):
    """path: a folder, or a GGUF file. beside: the folder with texts. weights: the file of weights."""

    path: Path
    beside: Path
    weights: Path


def _safetensors(folder: Path) -> Kind:
    save("mixtral", folder)
    write_model_dir(folder)
    return Kind(folder, folder, folder / "model.safetensors")


def _gguf(folder: Path) -> Kind:
    write_model_dir(folder)
    write_gguf(folder / "tiny.gguf", "llama", build("mixtral"))
    return Kind(folder / "tiny.gguf", folder, folder / "tiny.gguf")


KINDS = [_safetensors, _gguf]


def loaded(model: Path, tmp_path: Path, config: ServeConfig = BASE) -> tuple[RunContext, Rank]:
    folder = gguf_folder(model, tmp_path / "cache") if model.is_file() else model
    context = RunContext(
        config=config,
        model_dir=str(folder),
        model_hash=hash_model(folder),
        run_dir="",
        incarnation=1,
        secret="",
        served_model_names=("m",),
    )
    return context, load_rank(folder, plan_model(folder, config), config, lambda _: None).start()


def names(model: Path, tmp_path: Path, config: ServeConfig = BASE) -> Names:
    context, rank = loaded(model, tmp_path, config)
    folder, root = Path(context.model_dir), tmp_path / "kept"
    root.mkdir(exist_ok=True)
    plan = plan_model(folder, config)
    stored = stored_experts(folder, plan.spec, plan.dtype, plan.rounding)
    file = ExpertFile(folder, stored, plan.spec.moe.num_experts, layouts_of(stored), root)  # type: ignore[union-attr]
    found = Names(fingerprint_of_kv(context, rank, root), fingerprint_of(config, rank, context.model_hash), file.source)
    rank.close()
    return found


def _other_weights(kind: Kind) -> Kind:
    """With the same size and mtime."""
    status, content = kind.weights.stat(), bytearray(kind.weights.read_bytes())
    content[-9] ^= 1
    kind.weights.write_bytes(content)
    os.utime(kind.weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    return kind


def _other_file(kind: Kind) -> Kind:
    """Renamed over the first one, with its size and mtime."""
    shutil.copy2(kind.weights, aside := kind.weights.with_suffix(".new"))
    _other_weights(kind._replace(weights=aside)).weights.rename(kind.weights)
    return kind


def _edit(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Kind], Kind]:
    def edit(kind: Kind) -> Kind:
        content = json.loads((kind.beside / name).read_text())
        change(content)
        (kind.beside / name).write_text(json.dumps(content))
        return kind

    return edit


def _write(*files: str) -> Callable[[Kind], Kind]:
    def write(kind: Kind) -> Kind:
        for name in files:
            (kind.beside / name).parent.mkdir(exist_ok=True)
            (kind.beside / name).write_text("{{ messages }}" if name.endswith("jinja") else "{}")
        return kind

    return write


def _touch(kind: Kind) -> Kind:
    for path in kind.beside.iterdir():
        os.utime(path, ns=(1, 1))
    return kind


def _move(kind: Kind) -> Kind:
    elsewhere = kind.beside.with_name("elsewhere")
    kind.beside.rename(elsewhere)
    if kind.path == kind.beside:
        return Kind(elsewhere, elsewhere, elsewhere / kind.weights.name)
    (elsewhere / kind.path.name).rename(renamed := elsewhere / "renamed.gguf")
    return Kind(renamed, elsewhere, renamed)


def _copy(kind: Kind) -> Kind:
    """As a download on another machine: other times, other inodes."""
    elsewhere = kind.beside.with_name("copied")
    shutil.copytree(kind.beside, elsewhere, copy_function=shutil.copyfile)
    return Kind(elsewhere / kind.path.relative_to(kind.beside), elsewhere, elsewhere / kind.weights.name)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("change", [_other_weights, _other_file])
def test_other_weights_of_the_same_path_size_and_mtime_are_another_model(
    make: Callable[[Path], Kind], change: Callable[[Kind], Kind], tmp_path: Path
) -> None:
    kind = make(tmp_path / "model")
    before = names(kind.path, tmp_path)
    after = names(change(kind).path, tmp_path)
    assert all(one != other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_edit("tokenizer.json", lambda one: one["added_tokens"].pop()), id="tokenizer"),
        pytest.param(_edit("tokenizer_config.json", lambda one: one.update(chat_template="{{ 1 }}")), id="template"),
        pytest.param(_write("chat_template.jinja"), id="template in a file"),
    ],
)
def test_other_texts_are_another_model_with_the_same_experts(
    make: Callable[[Path], Kind], change: Callable[[Kind], Kind], tmp_path: Path
) -> None:
    kind = make(tmp_path / "model")
    before = names(kind.path, tmp_path)
    after = names(change(kind).path, tmp_path)
    assert before.kv != after.kv
    assert before.service != after.service
    assert before.experts == after.experts


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_edit("config.json", lambda one: one.update(rms_norm_eps=1e-3)), id="configuration"),
        pytest.param(_edit("config.json", lambda one: one["rope_parameters"].update(rope_theta=7e5)), id="rope"),
        pytest.param(_write("additional_chat_templates/tool_use.jinja"), id="tool template"),
        pytest.param(_write("generation_config.json"), id="defaults"),
    ],
)
def test_another_configuration_is_another_model(change: Callable[[Kind], Kind], tmp_path: Path) -> None:
    kind = _safetensors(tmp_path / "model")
    (kind.beside / "generation_config.json").unlink(missing_ok=True)
    before = names(kind.path, tmp_path)
    after = names(change(kind).path, tmp_path)
    assert before.kv != after.kv
    assert before.service != after.service


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    "change",
    [_touch, _move, _copy, pytest.param(_write("README.md", "LICENSE", ".note", "other.json", "d/x"), id="README")],
)
def test_the_same_model_elsewhere_is_the_same(
    make: Callable[[Path], Kind], change: Callable[[Kind], Kind], tmp_path: Path
) -> None:
    kind = make(tmp_path / "model")
    before = names(kind.path, tmp_path)
    assert names(change(kind).path, tmp_path) == before


@pytest.mark.parametrize("make", KINDS)
def test_settings_that_change_bits_are_another_service_and_others_are_not(
    make: Callable[[Path], Kind], tmp_path: Path
) -> None:
    kind = make(tmp_path / "model")
    before = names(kind.path, tmp_path)
    same: list[dict[str, Any]] = [
        {"max_num_seqs": 2, "kv_cache_memory": 2**21, "threads": 1, "max_num_batched_tokens": 64},
        {"max_model_len": 32, "seed": 3, "dtype": "float32", "model_impl": "native"},
    ]
    for settings in same:
        assert names(kind.path, tmp_path, replace(BASE, **settings))[:2] == before[:2], settings
    other: list[dict[str, Any]] = [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"block_size": 32},
    ]
    if make is _safetensors:
        other += [{"quantization": "int8"}, {"quantization": "int4"}, {"quantization": "int8", "arithmetic": "exact"}]
        other += [{"quantization": "experts=int8"}]
    found = [names(kind.path, tmp_path, replace(BASE, **settings)) for settings in other]
    assert len({before.kv, *(one.kv for one in found)}) == len(other) + 1
    assert len({before.service, *(one.service for one in found)}) == len(other) + 1


def test_ranks_and_how_they_send_sums_home_are_in_the_fingerprint(tmp_path: Path) -> None:
    _, rank = loaded(_safetensors(tmp_path / "model").path, tmp_path)

    def of(ranks: list[list[int]], combine_dtype: str) -> str:
        group: Any = SimpleNamespace(experts=SimpleNamespace(placement=SimpleNamespace(ranks=ranks)))
        return fingerprint_of(replace(BASE, combine_dtype=combine_dtype), replace(rank, group=group), "model")

    split, other = [[0, 0, 1, 1]], [[0, 1, 0, 1]]
    found = {of(split, "float32"), of(split, "bfloat16"), of(other, "float32"), fingerprint_of(BASE, rank, "model")}
    assert len(found) == 4
    rank.close()


def test_only_the_bits_of_every_processor_have_a_fingerprint_without_the_library_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rank = loaded(_safetensors(tmp_path / "model").path, tmp_path)
    configs = (BASE, replace(BASE, reproducible=True))
    here = [fingerprint_of(config, rank, "model") for config in configs]
    other = tmp_path / "other.so"
    other.write_bytes(b"compiled for another processor")
    monkeypatch.setattr("moeserve.engine.fingerprint.find_library", lambda: SimpleNamespace(path=other))
    elsewhere = [fingerprint_of(config, rank, "model") for config in configs]
    assert here[0] != elsewhere[0]
    assert here[1] == elsewhere[1]
    assert here[0] != here[1]
    rank.close()
