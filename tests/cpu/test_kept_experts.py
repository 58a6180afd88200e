"""`--expert-store-dir` without `--expert-memory`: experts are written beside requests, and mapped next time."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from structlog.testing import capture_logs

import kernels.ops
import moeserve.model.expert_store
from benchmarks.token_engine import TokenEngine
from experts.memory.file import round_to_page
from kernels.cpu.library import native_kernels
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.experts.kept import ExpertFileWriter
from moeserve.engine.memory_plan import plan_model, read_spec, rounding_of
from moeserve.model import file_hashes
from moeserve.model.checkpoint import read_index
from moeserve.model.expert_store import ExpertFile, layouts_of, stored_experts
from moeserve.model.gguf.folder import gguf_folder
from moeserve.plan import SamplingParams
from tests.support.expert_files import wait_until_written
from tests.support.gguf_export import write_gguf
from tests.support.tiny_models import build, save

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels.")
_TOKENS = torch.randint(1, 128, (21,), generator=torch.Generator().manual_seed(2)).tolist()
_SAMPLING = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
BASE = ServeConfig(kv_cache_memory=2**20, max_num_seqs=4, max_model_len=64)


class Model(NamedTuple):
    """weights: the file whose change makes it another model."""

    folder: Path
    weights: Path
    config: ServeConfig


def _gguf(tmp_path: Path) -> Model:
    """Layers have experts of two sizes."""
    kinds = {"blk.0.ffn_down_exps": Kind.Q8_0, "ffn_down_exps": Kind.Q4_0, "_exps": Kind.Q4_1}

    def kind_of(name: str, _: object) -> Kind:
        return next((kind for key, kind in kinds.items() if key in name), Kind.F32)

    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", build("mixtral"), kind_of)
    return Model(gguf_folder(path, tmp_path / "cache"), path, BASE)


def _rounded(tmp_path: Path) -> Model:
    save("gpt_oss", tmp_path / "model")
    return Model(tmp_path / "model", tmp_path / "model/model.safetensors", replace(BASE, quantization="int4"))


def _in_rows(tmp_path: Path) -> Model:
    """Not computed by the compiled kernels."""
    save("mixtral", tmp_path / "model")
    return Model(tmp_path / "model", tmp_path / "model/model.safetensors", replace(BASE, dtype="bfloat16"))


def answers(model: Model, store: Path | None = None) -> list[object]:
    """Generate with a service that has written its expert file before it ends, if it writes one."""
    config = replace(model.config, expert_store_dir=None if store is None else str(store))
    engine = TokenEngine(model.folder, config)
    wait_until_written()
    found = engine.generate([_TOKENS, _TOKENS[:7]], _SAMPLING)
    engine.close()
    return [(one.token_ids, one.logprobs) for one in found]


@pytest.mark.parametrize("make", [_gguf, _rounded, _in_rows])
def test_the_second_start_packs_nothing_and_answers_with_the_same_bits(
    make: Callable[[Path], Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = make(tmp_path), tmp_path / "store"
    wanted = answers(model)
    with capture_logs() as logs:
        assert answers(model, store) == wanted
    assert [line["event"] for line in logs if "expert" in line["event"]] == ["expert_file_written"]
    (written,) = store.glob("*/experts.bin")

    def refuse(*_: object) -> Iterator[object]:
        raise AssertionError("packed")

    monkeypatch.setattr(kernels.ops, "results_in_order", refuse)
    with capture_logs() as logs:
        assert answers(model, store) == wanted
    assert [(line["event"], line["file"]) for line in logs if "expert" in line["event"]] == [
        ("experts_mapped", str(written))
    ]


def test_expert_memory_reads_the_file_that_a_start_in_memory_has_written(tmp_path: Path) -> None:
    model, store = _gguf(tmp_path), tmp_path / "store"
    wanted = answers(model, store)
    (path,) = store.glob("*/experts.bin")
    written = path.stat()
    spec, dtype = read_spec(model.folder, BASE)
    rounding = rounding_of(BASE, spec, read_index(model.folder))
    layouts = layouts_of(stored_experts(model.folder, spec, dtype, rounding))
    few = 3 * len(spec.moe_layers) * round_to_page(layouts.num_bytes)
    assert answers(model._replace(config=replace(BASE, expert_memory=few)), store) == wanted
    assert path.stat() == written


def _expert_file(model: Model, store: Path) -> tuple[ExpertFile, torch.Tensor]:
    """Return the file, and the bytes of some expert of it."""
    spec, dtype = read_spec(model.folder, BASE)
    stored = stored_experts(model.folder, spec, dtype, rounding_of(BASE, spec, read_index(model.folder)))
    layouts = layouts_of(stored)
    assert spec.moe is not None
    file = ExpertFile(model.folder, stored, spec.moe.num_experts, layouts, store)
    return file, torch.zeros(layouts.num_bytes, dtype=torch.uint8)


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    model, store = _gguf(tmp_path), tmp_path / "store"
    file, expert = _expert_file(model, store)

    def some() -> Iterator[torch.Tensor]:
        yield from [expert] * 3
        os._exit(9)

    if (child := os.fork()) == 0:
        file.ensure(lambda *_: None, some())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (torn,) = store.glob(".*.tmp-*/new/experts.bin")
    assert not file.path.exists()
    wanted = answers(model)
    assert answers(model, store) == wanted
    assert file.path.exists()
    assert not torn.exists()
    assert answers(model, store) == wanted


def test_a_service_that_ends_while_the_file_is_written_removes_it(tmp_path: Path) -> None:
    file, expert = _expert_file(_gguf(tmp_path), tmp_path / "store")
    begun = threading.Event()

    def endless() -> Iterator[torch.Tensor]:
        for one in repeat(expert):
            begun.set()
            yield one

    writer = ExpertFileWriter(file, endless())
    assert begun.wait(60)
    writer.close()
    wait_until_written()
    assert not list((tmp_path / "store").glob("*/*.bin"))
    assert not list((tmp_path / "store").glob(".*.tmp-*"))


@pytest.mark.parametrize("num_samples", [256, 0])
@pytest.mark.parametrize("make", [_gguf, _rounded])
def test_experts_of_other_weights_of_the_same_size_and_time_are_not_taken(
    make: Callable[[Path], Model], num_samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not num_samples:
        monkeypatch.setattr(file_hashes, "_SMALL_BYTES", 0)
        monkeypatch.setattr(file_hashes, "_SAMPLE_BYTES", 0)
    model, store = make(tmp_path), tmp_path / "store"
    answers(model, store)
    status, content = model.weights.stat(), bytearray(model.weights.read_bytes())
    content[-9] ^= 1
    model.weights.write_bytes(content)
    os.utime(model.weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    if make is _gguf:
        model = model._replace(folder=gguf_folder(model.weights, tmp_path / "cache"))
    with capture_logs() as logs:
        answers(model, store)
    assert [line["event"] for line in logs if "expert" in line["event"]] == ["expert_file_written"]
    assert len(list(store.glob("*/experts.bin"))) == (2 if num_samples else 1)


@pytest.mark.parametrize("make", [_gguf, _rounded])
def test_experts_of_the_same_weights_elsewhere_are_taken(make: Callable[[Path], Model], tmp_path: Path) -> None:
    model, store = make(tmp_path), tmp_path / "store"
    wanted = answers(model, store)
    if make is _gguf:
        shutil.copyfile(model.weights, elsewhere := tmp_path / "elsewhere.gguf")
        model = model._replace(folder=gguf_folder(elsewhere, tmp_path / "cache"))
    else:
        shutil.copytree(model.folder, tmp_path / "elsewhere", copy_function=shutil.copyfile)
        (tmp_path / "elsewhere/README.md").write_text("The same.")
        model = model._replace(folder=tmp_path / "elsewhere")
    with capture_logs() as logs:
        assert answers(model, store) == wanted
    assert [line["event"] for line in logs if "expert" in line["event"]] == ["experts_mapped"]


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def _another(path: Path) -> None:
    """As long as the file, and made of other weights."""
    content = bytearray(path.read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut, _another])
def test_a_damaged_file_is_one_warning_and_is_left_alone(damage: Callable[[Path], None], tmp_path: Path) -> None:
    model, store = _gguf(tmp_path), tmp_path / "store"
    wanted = answers(model, store)
    (path,) = store.glob("*/experts.bin")
    damage(path)
    content = path.read_bytes()
    with capture_logs() as logs:
        assert answers(model, store) == wanted
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert line["event"] == "expert_file_not_used"
    assert f"delete {path}" in line["reason"]
    assert path.read_bytes() == content


@pytest.mark.parametrize("when", ["before", "while it is written"])
def test_a_full_disk_is_one_warning_and_the_service_goes_on(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = _gguf(tmp_path), tmp_path / "store"
    wanted = answers(model)
    if when == "before":
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    else:

        def fail(path: Path, **_: object) -> None:
            path.write_bytes(b"some")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(moeserve.model.expert_store, "write_expert_file", fail)
    with capture_logs() as logs:
        assert answers(model, store) == wanted
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert line["event"] == "expert_file_not_written"
    assert "free" in line["reason"] if when == "before" else "No space left on device" in line["reason"]
    assert not list(store.glob("*/experts.bin"))
    assert not list(store.glob(".*.tmp-*"))


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("mixtral", {"expert_parallel_size": 2}, "single rank"),
        ("llama", {}, "a llama model has no experts"),
        ("mixtral", {"model_impl": "transformers"}, "our own code"),
    ],
)
def test_a_folder_for_experts_that_would_have_no_effect_is_refused(
    case: str, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    save(case, tmp_path / "model")
    with pytest.raises(ConfigError, match=f"^--expert-store-dir.*{words}"):
        plan_model(tmp_path / "model", replace(BASE, expert_store_dir=str(tmp_path), **changes))  # type: ignore[arg-type]
