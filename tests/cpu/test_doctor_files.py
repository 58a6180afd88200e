"""Which of several GGUF files `moeserve doctor` says to take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from click.testing import CliRunner
from gguf import GGMLQuantizationType

import moeserve.machine
from launcher.cli import main
from moeserve.config import ServeConfig
from moeserve.engine.known_model import examine, parameters_of
from moeserve.engine.memory_plan import share_memory
from moeserve.machine import Machine
from moeserve.model.families import build_spec, load_config
from tests.cpu.test_doctor import MACHINE, QWEN3, folder_of
from tests.support.gguf_export import write_gguf
from tests.support.published_models import OF_ANY_KIND, PUBLISHED, Published
from tests.support.recorded_gpus import GPUS
from tests.support.tiny_models import build

GIB = 2**30
# Gigabytes of the files of Qwen3-30B-A3B.
SIZES = {"Q3_K_M": 14.7, "Q4_K_M": 18.6, "Q5_K_M": 21.7, "Q8_0": 32.5, "BF16": 61.1}


def ask(model: object, *options: str) -> str:
    result = CliRunner().invoke(main, ["doctor", str(model), *options])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = replace(MACHINE, free_bytes=22 * GIB)
    monkeypatch.setattr(moeserve.machine, "read_machine", lambda _: found)
    return found


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository of GGUF files, one of them in parts, whose model's configuration is in another one."""
    names = {f"qwen3-{kind}.gguf": round(size * 1e9) for kind, size in SIZES.items()}
    names |= {"qwen3-Q6_K-00001-of-00002.gguf": 20 * 10**9, "qwen3-Q6_K-00002-of-00002.gguf": 5 * 10**9, "README.md": 1}
    siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in names.items()]
    info = SimpleNamespace(siblings=siblings, card_data={"base_model": "base/qwen3"})
    folder = folder_of(QWEN3, tmp_path)

    def download(repository: str, name: str, **options: object) -> str:
        if repository == "owner/qwen3-GGUF":
            raise huggingface_hub.errors.EntryNotFoundError("none")
        assert (repository, name) == ("base/qwen3", "config.json")
        return str(folder / name)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return folder


def test_of_a_repository_the_most_bits_that_fit_are_taken(hub: Path, machine: Machine) -> None:
    said = ask("owner/qwen3-GGUF")
    assert "GGUF models: 6" in said
    assert "Take the most bits that fit: moeserve serve owner/qwen3-GGUF:Q5_K_M" in said
    found = {choice["kind"]: choice for choice in json.loads(ask("owner/qwen3-GGUF", "--json"))["files"]}
    assert [kind for kind, choice in found.items() if choice["obstacle"] is None] == ["Q3_K_M", "Q4_K_M", "Q5_K_M"]
    assert found["Q6_K"]["num_bytes"] == 25 * 10**9
    # 3.35 of 30.5 billion parameters are active, 0.31 of them the embedding; a token reads one row of it.
    assert found["Q4_K_M"]["tokens_per_second"] == pytest.approx(50 / 18.6 * 30.53 / (3.353 - 0.311), rel=1e-3)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.name)
@pytest.mark.parametrize("free", [16 * GIB, 28 * GIB, 64 * GIB], ids=["16GiB", "28GiB", "64GiB"])
def test_of_models_that_people_run_at_home_a_file_is_advised_with_its_context_and_speed(
    published: Published, free: int, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub / "config.json").write_text(json.dumps({**published.config, "dtype": "bfloat16"}))
    files = {f"m-{kind}.gguf": round(size * 1e9) for kind, size in published.gigabytes.items()}
    siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in files.items()]
    info = SimpleNamespace(siblings=siblings, card_data={"base_model": "base/qwen3"})
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
    found = replace(MACHINE, free_bytes=free)
    monkeypatch.setattr(moeserve.machine, "read_machine", lambda _: found)
    spec = examine(hub).spec
    counted = parameters_of(spec)
    assert counted.total / 1e9 == pytest.approx(published.total, rel=0.02)
    assert counted.active is not None
    # Makers count embeddings among the active ones, or leave them out.
    embedding = spec.vocab_size * spec.hidden_size
    assert any(
        n / 1e9 == pytest.approx(published.active, rel=0.05) for n in (counted.active, counted.active - embedding)
    )
    said = json.loads(ask("owner/qwen3-GGUF", "--json"))
    fits = [kind for kind, size in published.gigabytes.items() if size * 1e9 + GIB < free and kind != "F16"]
    assert said["take"] == [f"owner/qwen3-GGUF:{kind}" for kind in fits[-1:]]
    for choice in said["files"]:
        assert (choice["obstacle"] is None) == (choice["num_bytes"] + GIB < free)
        if choice["obstacle"] is None:
            assert choice["kv_tokens"] >= 8192
            read = choice["num_bytes"] * (counted.active - embedding) / counted.total
            assert choice["tokens_per_second"] == pytest.approx(MACHINE.bandwidth / read)


@pytest.mark.parametrize("published", OF_ANY_KIND, ids=lambda published: published.name)
def test_a_file_of_a_model_on_transformers_code_takes_its_own_bytes_and_fits_where_these_do(
    published: Published, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub / "config.json").write_text(json.dumps({**published.config, "dtype": "bfloat16"}))
    spec = examine(hub).spec
    counted, embedding = parameters_of(spec), spec.vocab_size * spec.hidden_size
    assert counted.total / 1e9 == pytest.approx(published.total, rel=0.02)
    assert counted.active is not None
    assert (counted.active - embedding) / 1e9 == pytest.approx(published.active, rel=0.05)
    num_bytes = counted.total * 9 // 16  # 4.5 bits a weight
    info = SimpleNamespace(
        siblings=[SimpleNamespace(rfilename="m-Q4_0.gguf", size=num_bytes)], card_data={"base_model": "base/qwen3"}
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
    for free, fits in ((num_bytes, False), (num_bytes + 8 * GIB, True)):
        monkeypatch.setattr(moeserve.machine, "read_machine", lambda _, free=free: replace(MACHINE, free_bytes=free))
        said = json.loads(ask("owner/qwen3-GGUF", "--json"))
        assert said["take"] == (["owner/qwen3-GGUF:Q4_0"] if fits else [])
    (choice,) = said["files"]
    read = (counted.active - embedding) * 9 / 16
    assert choice["tokens_per_second"] == pytest.approx(50e9 / read, rel=1e-3)


def test_the_tokens_beside_a_file_of_the_hub_are_those_that_a_start_plans(hub: Path, machine: Machine) -> None:
    found = {choice["kind"]: choice for choice in json.loads(ask("owner/qwen3-GGUF", "--json"))["files"]}
    config = ServeConfig(model="owner/qwen3-GGUF", kv_cache_dtype="bfloat16")
    for kind in ("Q3_K_M", "Q4_K_M", "Q5_K_M"):
        num_bytes = found[kind]["num_bytes"]
        plan = share_memory(build_spec(load_config(hub)), torch.float32, num_bytes, config, machine.free_bytes)
        assert found[kind]["kv_tokens"] == plan.kv.num_blocks * config.block_size
        # 96 KiB a token; 0.85 of what is left beside the file and half a GiB.
        left = machine.free_bytes - num_bytes - GIB // 2
        assert found[kind]["kv_tokens"] == pytest.approx(0.85 * left / (96 * 1024), rel=0.01)


def test_of_16_bits_none_is_taken_and_without_a_configuration_only_sizes_are_told(
    hub: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moeserve.machine, "read_machine", lambda _: replace(machine, free_bytes=200 * GIB))
    (hub / "config.json").unlink()
    said = json.loads(ask("owner/qwen3-GGUF", "--json"))
    assert said["take"] == ["owner/qwen3-GGUF:Q8_0"]
    assert all(choice["obstacle"] is None and choice["tokens_per_second"] is None for choice in said["files"])
    monkeypatch.setattr(moeserve.machine, "read_machine", lambda _: replace(machine, free_bytes=8 * GIB))
    assert "None of up to 8 bits a weight fits into memory here." in ask("owner/qwen3-GGUF")


def test_of_a_folder_every_file_is_planned_as_serve_plans_it(tmp_path: Path, machine: Machine) -> None:
    model = build("mixtral", hidden_size=256, intermediate_size=256, head_dim=64)
    folder = tmp_path / "files"
    folder.mkdir()
    write_gguf(folder / "tiny-F32.gguf", "llama", model)
    for kind in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0):
        write_gguf(folder / f"tiny-{kind.name}.gguf", "llama", model, lambda _, __, kind=kind: kind)
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    (folder / "broken-Q2_K.gguf").write_bytes(b"GGUF")
    said = json.loads(ask(folder, "--json"))
    assert said["take"] == [str(folder / "tiny-Q8_0.gguf")]
    names = [Path(choice["name"]).name for choice in said["files"]]
    assert names == ["broken-Q2_K.gguf", "tiny-Q4_0.gguf", "tiny-Q8_0.gguf", "tiny-F32.gguf"]
    assert said["files"][0]["obstacle"] is not None
    alone = json.loads(ask(folder / "tiny-Q4_0.gguf", "--json"))
    assert said["files"][1]["tokens_per_second"] == alone["setups"][0]["tokens_per_second"] > 0
    assert alone["rounded"] == []


def test_of_a_repository_in_the_cache_the_files_there_are_compared_offline(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models--owner--tiny-GGUF"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("a" * 40)
    model = build("mixtral", hidden_size=256, intermediate_size=256, head_dim=64)
    for kind in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0):
        write_gguf(snapshot / f"tiny-{kind.name}.gguf", "llama", model, lambda _, __, kind=kind: kind)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = json.loads(ask("owner/tiny-GGUF", "--json"))
    assert {choice["kind"]: choice["num_bytes"] for choice in said["files"]} == {
        kind: (snapshot / f"tiny-{kind}.gguf").stat().st_size for kind in ("Q8_0", "Q4_0")
    }
    assert said["take"] == ["owner/tiny-GGUF:Q8_0"]
    assert "8 experts" in ask("owner/tiny-GGUF:Q4_0")


def test_kinds_that_are_rounded_while_they_are_loaded_are_told(tmp_path: Path, machine: Machine) -> None:
    kind, path = GGMLQuantizationType.TQ2_0, tmp_path / "tiny.gguf"
    write_gguf(path, "llama", build("mixtral", hidden_size=256, intermediate_size=256, head_dim=64), lambda *_: kind)
    assert "of TQ2_0 (rounded to q8_0), " in ask(path)


def test_a_checkpoint_of_16_bits_gets_the_ways_with_fewer(tmp_path: Path, machine: Machine) -> None:
    said = ask(folder_of(QWEN3, tmp_path))
    assert "moeserve serve MODEL --quantization int4: fits" in said
    assert "--quantization int8" not in said
    found = json.loads(ask(tmp_path, "--json"))["rounded"]
    assert [setup["flags"] for setup in found] == [["--quantization", "int4"]]
    assert 18 < found[0]["tokens_per_second"] < 25
    assert json.loads(ask(tmp_path, "--json", "--quantization", "int4"))["rounded"] == []


def test_who_names_no_model_learns_what_to_look_for(machine: Machine) -> None:
    said = CliRunner().invoke(main, ["doctor"]).stdout
    assert "Models of up to 19.5 GiB fit whole" in said
    assert "moeserve doctor owner/name says which to take" in said


def test_files_are_planned_for_a_gpu_too_and_the_largest_that_fits_it_is_taken(
    hub: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = next(gpu for gpu in GPUS if "RTX4090" in gpu.name)
    monkeypatch.setattr(
        moeserve.machine, "read_machine", lambda _: replace(machine, free_bytes=200 * GIB, gpus=(card,))
    )
    said = json.loads(ask("owner/qwen3-GGUF", "--json"))
    found = {choice["kind"]: choice for choice in said["files"]}
    assert found["Q4_K_M"]["gpu_tokens"] >= 32768
    # It fits the machine's memory, not the card's.
    assert (found["Q8_0"]["obstacle"], found["Q8_0"]["gpu_tokens"]) == (None, None)
    most = max((one for one in said["files"] if one["gpu_tokens"] is not None), key=lambda one: one["num_bytes"])
    assert said["take"] == [most["name"]]
    assert "; on the GPU it fits, " in ask("owner/qwen3-GGUF")
