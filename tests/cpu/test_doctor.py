"""What `moeserve doctor` says agrees with transformers' own models, with real checkpoints and with the memory plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner, Result

import launcher.doctor
import moeserve.machine
from benchmarks.ways import MODELS
from launcher.cli import main
from moeserve.config import ServeConfig
from moeserve.engine.doctor import setups_of
from moeserve.engine.experts.gpu_memory import slot_layouts
from moeserve.engine.known_model import NativeModel, examine, kinds_of_layers, parameters_of, sizes_of, summary
from moeserve.engine.memory_plan import plan_model, plan_on_cpu
from moeserve.engine.weight_bytes import weights_bytes
from moeserve.machine import Gpu, Machine
from moeserve.model.checkpoint import read_index
from moeserve.model.gguf.folder import gguf_folder
from moeserve.model.gpu.kernels import expert_storage
from moeserve.model.hf.spec import read_transformers_spec
from moeserve.model.kv_pool import kv_block_bytes
from moeserve.model.sizes import count_parameters, expected_index
from moeserve.model.spec import CheckpointError, ModelError
from moeserve.model.state_pool import state_row_bytes
from tests.support.checkpoints import spec_of
from tests.support.fp8 import to_fp8
from tests.support.gguf_modules import tiny, write_module_gguf
from tests.support.published_models import AS_ON_THE_HUB, Published
from tests.support.tiny_models import CASES, config_of, save
from tests.support.tiny_transformers import save_tiny, tiny_config

GIB = 2**30
# Compute capability and bytes of shared memory.
HOPPER = ((9, 0), 227 << 10)
MACHINE = Machine("a processor", 4, ("AVX2",), 64 * GIB, 32 * GIB, 50e9)
QWEN3 = {**MODELS["Qwen3-30B-A3B"], "dtype": "bfloat16"}


def folder_of(config: dict[str, Any], folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return folder_of(QWEN3, tmp_path)


def ask(folder: Path | None, *options: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *([] if folder is None else [str(folder)]), *options])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moeserve.machine, "read_machine", lambda _: MACHINE)


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    config = config_of(case)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    buffers = [pair for pair in model.named_buffers() if pair[0].endswith(("_bias", "layer_scalar"))]
    named = [(name, tensor) for name, tensor in [*model.named_parameters(), *buffers] if "vision" not in name]
    config.save_pretrained(tmp_path)
    spec = spec_of(tmp_path)
    count = count_parameters(spec)
    assert count.total == sum(tensor.numel() for _, tensor in named)
    experts = sum(tensor.numel() for name, tensor in named if ".experts." in name and "correction" not in name)
    assert count.experts == experts
    idle = 0 if spec.moe is None else experts - experts // spec.moe.num_experts * spec.moe.gate.top_k
    assert count.active == count.total - idle


@pytest.mark.parametrize("case", ["llama-biases-llama3", "qwen2_moe", "gpt_oss", "ernie4_5_moe", "deepseek_v3-yarn"])
def test_without_weights_sizes_are_those_of_the_saved_model(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    spec, index = spec_of(tmp_path), read_index(tmp_path)
    expected = expected_index(spec, "F32")
    for dtype in (torch.float32, torch.bfloat16):
        assert weights_bytes(spec, dtype, expected) == weights_bytes(spec, dtype, index)
    assert sum(info.num_bytes for info in expected.values()) == sum(info.num_bytes for info in index.values())


def test_without_weights_fp8_is_known_from_the_configuration(tmp_path: Path) -> None:
    save("deepseek_v3-yarn", tmp_path)
    to_fp8(tmp_path, (16, 24))
    spec = spec_of(tmp_path)
    expected, index = expected_index(spec, "F32"), read_index(tmp_path)
    assert sum(info.num_bytes for info in expected.values()) == sum(info.num_bytes for info in index.values())
    assert weights_bytes(spec, torch.float32, expected) == weights_bytes(spec, torch.float32, index)


def test_fp8_is_counted_as_it_lies_and_offered_in_four_bits(tmp_path: Path, machine: None) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    said = ask(folder_of({**QWEN3, "quantization_config": fp8}, tmp_path)).stdout
    assert "27.8 GiB of FP8_128" in said
    assert "--quantization int4: fits" in said
    assert "--quantization int8" not in said


def test_a_file_on_transformers_code_is_counted_in_its_blocks(tmp_path: Path) -> None:
    def in_blocks(_: str, values: np.ndarray) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType.F32 if values.shape[-1] % 32 else gguf.GGMLQuantizationType.Q8_0

    code = tiny("granitehybrid")
    code.outer.save_pretrained(tmp_path / "saved")
    write_module_gguf(tmp_path / "tiny.gguf", "granitehybrid", code, tmp_path / "saved", in_blocks)
    folder = gguf_folder(tmp_path / "tiny.gguf", tmp_path / "cache")
    setup = next(iter(setups_of(examine(folder), MACHINE, ServeConfig())))
    assert setup.obstacle is None
    assert setup.weights_bytes == plan_model(folder, ServeConfig(kv_cache_memory=2**20)).weights_bytes
    assert setup.weights_bytes < 0.5 * plan_model(tmp_path / "saved", ServeConfig(kv_cache_memory=2**20)).weights_bytes


def test_a_published_model_is_described_from_its_configuration_alone(qwen3: Path, machine: None) -> None:
    said = ask(qwen3).stdout
    assert "qwen3_moe (native), 30.53 billion parameters, 3.35 billion active per token" in said
    assert "48 with 128 experts, 8 per token" in said
    assert "56.8 GiB of BF16" in said
    assert "There are no weights: sizes go by config.json." in said


def test_json_says_the_same_in_bytes(qwen3: Path, machine: None) -> None:
    found = json.loads(ask(qwen3, "--json").stdout)
    model = found["model"]
    assert model["parameters"] == {"total": 30532122624, "active": 3353032704, "experts": 28991029248}
    sizes = {sizes["name"]: sizes for sizes in model["sizes"]}
    kv_bytes = 48 * 2 * 4 * 128 * 2
    assert sizes["bfloat16"] == {
        "name": "bfloat16",
        "weights_bytes": 2 * 30532122624,
        "kv_bytes": kv_bytes,
        "state_bytes": 0,
        "window_kv_bytes": 0,
        "window": 0,
    }
    assert sizes["4 bits"]["kv_bytes"] == sizes["8 bits"]["kv_bytes"]
    assert found["machine"]["free_bytes"] == 32 * GIB


def test_recurrent_layers_are_counted_with_the_states_of_requests_and_snapshots(tmp_path: Path) -> None:
    config_of("qwen3_next").save_pretrained(tmp_path)
    machine = replace(MACHINE, gpus=(Gpu("a GPU", 80 * GIB, 79 * GIB, *HOPPER, 1e12),))
    (setup,) = setups_of(examine(tmp_path), machine, ServeConfig(max_num_seqs=3))
    model = examine(tmp_path)
    assert isinstance(model, NativeModel)
    plan = plan_on_cpu(model.spec, torch.float32, model.index, ServeConfig(max_num_seqs=3), 32 * GIB)
    assert (setup.num_state_slots, setup.num_snapshots) == (plan.kv.num_state_slots, plan.kv.num_snapshots)
    assert setup.num_state_slots == 3
    one = state_row_bytes(spec_of(tmp_path).state_layers, torch.float32)
    assert setup.state_bytes == one * plan.kv.num_state_rows > 0
    assert "a gated delta net" in {kind for _, kind in kinds_of_layers(spec_of(tmp_path))}


def test_layers_with_a_window_count_for_the_last_tokens_of_a_context(tmp_path: Path) -> None:
    config_of("gpt_oss", max_position_embeddings=4096).save_pretrained(tmp_path)
    model = examine(tmp_path)
    assert isinstance(model, NativeModel)
    sizes = sizes_of(model)[0]
    # Two of three layers have a window of 4 tokens; a token has 2 heads of 16 keys and values in each.
    layer = 2 * 2 * 16 * 4
    assert (sizes.kv_bytes, sizes.window_kv_bytes, sizes.window) == (layer, 2 * layer, 4)
    assert sizes.context_bytes(1000) == 1000 * layer + 4 * 2 * layer
    config = ServeConfig(kv_cache_memory=2**20, max_num_seqs=4, max_num_batched_tokens=64)
    (setup,) = setups_of(model, MACHINE, config)
    plan = plan_on_cpu(model.spec, torch.float32, model.index, config, 32 * GIB)
    assert setup.num_window_blocks == plan.kv.num_window_blocks > 0
    assert setup.kv_tokens == plan.kv.num_blocks * 16 > 2**20 // (3 * layer)
    assert 2**20 - 2 * 16 * layer < setup.kv_bytes <= 2**20
    said = ask(tmp_path, "--kv-cache-memory", "1MiB").stdout
    assert "of each of the last 4 tokens, in layers with a window: 512 bytes in float32" in said
    assert "of its blocks hold the last tokens, for layers with a window" in said


def test_what_does_not_fit_gets_an_expert_memory_that_does(qwen3: Path) -> None:
    whole, few = setups_of(examine(qwen3), MACHINE, ServeConfig())
    assert whole.obstacle is not None
    assert "56.9 GiB" in whole.obstacle
    assert few.obstacle is None
    assert few.flags[0] == "--expert-memory"
    assert few.resident_experts is not None
    assert 8 < few.resident_experts < 128
    assert few.weights_bytes + few.kv_bytes < 32 * GIB
    assert 48 * 128 * 3 * 768 * 2048 * 2 <= few.expert_file_bytes < 55 * GIB


def test_the_disk_that_the_expert_file_takes_is_told(qwen3: Path, machine: None) -> None:
    said = ask(qwen3).stdout
    assert "disk      54 GiB for the expert file, written while the first start serves; " in said
    assert " GiB free" in said


def test_the_disk_is_told_for_a_file_of_experts_that_are_all_in_memory(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = replace(MACHINE, free_bytes=128 * GIB)
    monkeypatch.setattr(moeserve.machine, "read_machine", lambda _: large)
    assert "expert file" not in ask(qwen3).stdout
    said = ask(qwen3, "--expert-store-dir", str(tmp_path)).stdout
    assert f"moeserve serve MODEL --expert-store-dir {tmp_path}: fits" in said
    assert f"disk      54 GiB for the expert file, written while the first start serves; {tmp_path} has " in said


def test_numa_nodes_are_told_with_the_ranks_that_would_keep_to_them(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "NUMA" not in ask(qwen3).stdout
    monkeypatch.setattr(moeserve.machine, "read_machine", lambda _: replace(MACHINE, num_nodes=2))
    said = ask(qwen3).stdout
    assert "  NUMA nodes  2: a start puts a rank on each, where ranks can share the layers\n" in said
    assert "On 2 ranks, each on a NUMA node, over gloo within a machine" in said
    assert "--pipeline-parallel-size" not in ask(qwen3, "--device", "cpu", "--dtype", "float32").stdout.split("On 2")[0]


def test_doctor_plans_the_ranks_that_a_start_puts_on_numa_nodes(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(MACHINE, num_nodes=2, free_bytes=128 * GIB)
    monkeypatch.setattr(moeserve.machine, "read_machine", lambda _: machine)
    first, second, *_ = json.loads(ask(qwen3, "--json").stdout)["setups"]
    assert first["flags"] == ["--pipeline-parallel-size", "2"]
    assert second["flags"] == []
    assert first["kv_tokens"] > 0


def test_where_nothing_fits_the_least_memory_that_would_do_is_told(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(MACHINE, free_bytes=3 * GIB)
    monkeypatch.setattr(moeserve.machine, "read_machine", lambda _: small)
    least = json.loads(ask(qwen3, "--json").stdout)["least"]
    assert 3 * GIB < least["free_bytes"] < 9 * GIB
    assert least["setup"]["flags"][0] == "--expert-memory"
    (_, fitting) = setups_of(examine(qwen3), replace(MACHINE, free_bytes=least["free_bytes"]), ServeConfig())
    assert fitting.obstacle is None
    smaller = replace(MACHINE, free_bytes=least["free_bytes"] - 256 * 2**20)
    assert all(setup.obstacle for setup in setups_of(examine(qwen3), smaller, ServeConfig()))
    assert "of free memory serves it: moeserve serve MODEL --expert-memory " in ask(qwen3).stdout


def test_what_fits_is_bounded_by_the_bytes_that_a_token_reads(qwen3: Path) -> None:
    (setup,) = setups_of(examine(qwen3), replace(MACHINE, free_bytes=128 * GIB), ServeConfig())
    assert (setup.flags, setup.obstacle) == ((), None)
    embedding = 151936 * 2048
    read = 2 * (3353032704 - embedding)
    # Vectors take four bytes each.
    assert setup.tokens_per_second == pytest.approx(50e9 / read, rel=1e-3)


def test_a_gpu_gets_the_first_form_of_experts_that_fits(qwen3: Path) -> None:
    gpu = Gpu("a GPU", 48 * GIB, 47 * GIB, *HOPPER, 1e12)
    setups = setups_of(examine(qwen3), replace(MACHINE, free_bytes=128 * GIB, gpus=(gpu,)), ServeConfig())
    assert [setup.flags for setup in setups] == [
        (),
        ("--device", "cuda"),
        ("--device", "cuda", "--quantization", "experts=int8"),
    ]
    assert setups[1].obstacle == "The weights take 56.9 GiB of a GPU; 41.7 GiB can be used."
    assert setups[2].obstacle is None
    small = replace(gpu, total_bytes=8 * GIB, free_bytes=8 * GIB)
    last = setups_of(examine(qwen3), replace(MACHINE, gpus=(small,)), ServeConfig())[-1]
    assert last.obstacle is None
    assert "--expert-memory" in last.flags
    assert last.resident_experts is not None
    assert last.resident_experts >= 8


def test_a_setting_of_a_cpu_is_the_reason_why_no_gpu_serves(qwen3: Path) -> None:
    gpu = Gpu("a GPU", 80 * GIB, 79 * GIB, *HOPPER, 1e12)
    config = ServeConfig(quantization="int8")
    (setup,) = [s for s in setups_of(examine(qwen3), replace(MACHINE, gpus=(gpu,)), config) if s.device == "cuda"]
    assert setup.obstacle is not None
    assert "--quantization int8 is for a CPU" in setup.obstacle


def test_several_gpus_share_the_experts(qwen3: Path) -> None:
    gpus = (
        Gpu("a GPU", 48 * GIB, 47 * GIB, *HOPPER),
        Gpu("a GPU", 48 * GIB, 46 * GIB, *HOPPER),
        Gpu("old", GIB, GIB, (7, 0), 0, obstacle="old"),
    )
    setups = setups_of(examine(qwen3), replace(MACHINE, gpus=gpus), ServeConfig())
    assert setups[-1].flags == ("--device", "cuda", "--expert-parallel-size", "2")
    assert setups[-1].obstacle is None


@pytest.mark.parametrize("form", ["none", "int8", "fp8", "int4"])
def test_sizes_on_a_gpu_are_known_without_taking_memory(form: str, tmp_path: Path) -> None:
    spec = spec_of(folder_of({**QWEN3, "hidden_size": 256}, tmp_path))
    storage = expert_storage(spec, torch.bfloat16, form)
    with torch.device("meta"):
        found = slot_layouts(spec, torch.bfloat16, storage).num_bytes
    assert found == slot_layouts(spec, torch.bfloat16, storage).num_bytes


def test_without_a_model_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moeserve.machine, "_COPIED_BYTES", 2**20)
    said = ask(None)
    assert said.exit_code == 0
    assert "This machine: " in said.stdout
    found = json.loads(ask(None, "--json").stdout)["machine"]
    assert found["cores"] == launcher.doctor.usable_cores()
    assert 0 < found["free_bytes"] <= found["memory_bytes"]
    assert found["bandwidth"] > 0


def test_what_fits_nowhere_says_what_the_least_would_be(qwen3: Path) -> None:
    setups = setups_of(examine(qwen3), replace(MACHINE, free_bytes=3 * GIB), ServeConfig())
    assert setups[-1].flags == ("--expert-memory", "3456MiB")
    assert setups[-1].obstacle is not None
    assert "but only 3 GiB are free" in setups[-1].obstacle


def test_settings_of_a_gpu_do_not_fit_a_cpu(qwen3: Path, machine: None) -> None:
    found = json.loads(ask(qwen3, "--kv-cache-dtype", "fp8_e4m3", "--json").stdout)
    assert found["setups"][0]["obstacle"].startswith("--kv-cache-dtype fp8_e4m3 ")


def test_a_setting_that_is_wrong_ends_as_in_serve(qwen3: Path, machine: None) -> None:
    result = ask(qwen3, "--dtype", "int3")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --dtype")


@pytest.mark.parametrize("case", CASES)
def test_transformers_classes_say_of_our_own_types_what_we_say(case: str, tmp_path: Path) -> None:
    config_of(case).save_pretrained(tmp_path)
    ours, theirs = spec_of(tmp_path), read_transformers_spec(tmp_path)
    assert parameters_of(theirs) == parameters_of(ours)
    if theirs.keeps_snapshots:  # Not of a rotary embedding that looks at the tokens.
        assert kv_block_bytes(theirs.kv_layers, 1, torch.float32) == kv_block_bytes(ours.kv_layers, 1, torch.float32)
        # Their short convolution keeps one token more; the other state, where there is one, is larger.
        matrices = ([max(prod(state.shape) for state in layer) for layer in s.state_layers] for s in (ours, theirs))
        assert next(matrices) == next(matrices) or not any(len(layer) > 1 for layer in ours.state_layers)
    if not ours.state_layers:  # These have a name of their own in ours.
        assert sorted(kinds_of_layers(theirs)) == sorted(kinds_of_layers(ours))


@pytest.mark.parametrize("published", AS_ON_THE_HUB, ids=lambda published: published.name)
def test_a_configuration_as_the_hub_has_it_is_that_of_our_own_decoder(published: Published, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**published.config, "dtype": "bfloat16"}))
    model = examine(tmp_path)
    assert isinstance(model, NativeModel)
    counted = parameters_of(model.spec)
    assert counted.total / 1e9 == pytest.approx(published.total, rel=0.005)
    assert counted.active is not None
    assert counted.active / 1e9 == pytest.approx(published.active, rel=0.01)


def test_a_published_model_on_transformers_code_is_described_from_its_configuration(
    tmp_path: Path, machine: None
) -> None:
    # Kimi-Linear-48B-A3B.
    transformers.KimiLinearConfig(dtype="bfloat16").save_pretrained(tmp_path)
    said = ask(tmp_path)
    assert "kimi_linear (transformers), 49.13 billion parameters, 3.49 billion active per token" in said.stdout
    assert "21 with linear attention\n              6 with latent attention\n" in said.stdout
    assert "26 with 256 experts, 8 per token and a shared one\n              1 with a dense block\n" in said.stdout
    assert "There are no weights: sizes go by config.json." in said.stdout
    assert "a check at load decides that" in said.stdout
    assert said.stderr == ""


@pytest.mark.parametrize("model_type", ["jamba", "kimi_linear", "afmoe"])
def test_of_transformers_code_too_a_start_takes_what_is_said(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    code = save_tiny(model_type, tmp_path / "whole")
    code.outer.config.save_pretrained(tmp_path)
    config = ServeConfig(kv_cache_memory=2**20, max_num_seqs=3)
    (found,), (without_weights,) = (
        setups_of(examine(folder), MACHINE, config) for folder in (tmp_path / "whole", tmp_path)
    )
    plan = plan_model(tmp_path / "whole", config)
    assert found == without_weights
    assert found.weights_bytes == plan.weights_bytes
    assert found.kv_tokens == plan.kv.num_blocks * config.block_size
    assert found.num_state_slots == plan.kv.num_state_slots
    assert found.tokens_per_second is not None
    assert MACHINE.bandwidth is not None
    read = MACHINE.bandwidth / found.tokens_per_second
    assert read < found.weights_bytes
    assert summary(plan.spec).startswith(f"{model_type} (transformers), ")


def test_what_transformers_keeps_in_a_form_of_its_own_is_not_known(tmp_path: Path) -> None:
    tiny_config("deepseek_v4").save_pretrained(tmp_path)
    model = examine(tmp_path)
    assert {sizes.kv_bytes for sizes in sizes_of(model)} == {None}
    assert any("All that a request keeps" in sentence for sentence in model.assumptions)


def test_code_of_a_model_folder_never_runs(tmp_path: Path, machine: None) -> None:
    tiny_config("afmoe").save_pretrained(tmp_path)
    (tmp_path / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    path = tmp_path / "config.json"
    own = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": own}))
    assert "afmoe (transformers)" in ask(tmp_path).stdout
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "does not hold a JSON object"),
        ('{"model_type": "never_heard_of"}', "'never_heard_of'"),
        ('{"model_type": "afmoe", "hidden_size": 1e400}', "hidden_size"),
        ('{"model_type": "afmoe", "hidden_size": "x"}', "hidden_size"),
        ('{"model_type": "afmoe", "num_hidden_layers": 100000000}', "num_hidden_layers"),
        ('{"model_type": "lfm2_moe", "conv_L_cache": 1}', "conv_L_cache"),
        ('{"model_type": "gemma4", "text_config": {"num_experts": 100000000}}', "num_experts"),
        ('{"model_type": "mixtral", "hidden_size": 1e400}', "hidden_size"),
        ('{"model_type": "mixtral", "num_local_experts": -4}', "num_local_experts"),
        ('{"model_type": "mixtral", "num_hidden_layers": 100000000}', "num_hidden_layers"),
        ('{"model_type": "mixtral", "a": ' + "[" * 5000 + "]" * 5000 + "}", "is not valid JSON"),
    ],
    ids=lambda value: value[:40],
)
def test_a_hostile_configuration_is_one_sentence(config: str, words: str, tmp_path: Path, machine: None) -> None:
    (tmp_path / "config.json").write_text(config)
    result = ask(tmp_path)
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert words in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


HOSTILE = (None, -1, 0, 7, 2**40, 1e308, "x", [None], {"a": {}})
MORE = [pytest.param(case, marks=pytest.mark.long) for case in ("mixtral", "gpt_oss", "phimoe-longrope")]


@pytest.mark.parametrize("case", ["deepseek_v3-yarn", "ernie4_5_moe", *MORE])
def test_any_value_of_any_key_gives_an_answer_or_one_sentence(case: str, tmp_path: Path) -> None:
    try_values(config_of(case).to_dict(), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["jamba", "axk2"])
def test_so_it_does_for_transformers_code(model_type: str, tmp_path: Path) -> None:
    try_values(json.loads(tiny_config(model_type).to_json_string(use_diff=False)), tmp_path)


def try_values(whole: dict[str, Any], tmp_path: Path) -> None:
    gpu = Gpu("a GPU", 80 * GIB, 79 * GIB, *HOPPER, 1e12)
    answers = 0
    for key in whole:
        for value in HOSTILE:
            folder_of({**whole, key: value}, tmp_path)
            with suppress(ModelError):
                setups = setups_of(examine(tmp_path), replace(MACHINE, gpus=(gpu,)), ServeConfig())
                answers += len(setups) > 0
    assert answers > len(whole)


@pytest.mark.parametrize("model_type", ["mixtral", "starcoder2"])
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data[:-100], r"is truncated, \d+ of \d+ bytes"),
        (lambda data: bytes(7) + b"\x80" + data[8:], "is truncated or not a safetensors"),
        (lambda data: data[:8] + b"[]" + b" " * (len(data) - 10), "is damaged, its header"),
    ],
)
def test_damaged_weights_are_refused_in_the_sentence_of_a_start(
    model_type: str, damage: Callable[[bytes], bytes], sentence: str, tmp_path: Path, machine: None
) -> None:
    save(model_type, tmp_path) if model_type in CASES else save_tiny(model_type, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    result = ask(tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.match(rf"^Error: model\.safetensors {sentence}", result.stderr)
    with pytest.raises(CheckpointError, match=sentence):
        read_index(tmp_path)


@pytest.mark.parametrize("content", [None, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"])
def test_of_weights_that_are_not_all_there_sizes_go_by_the_configuration(
    content: bytes | None, tmp_path: Path, machine: None
) -> None:
    save("mixtral", tmp_path, max_shard_size="500KB")
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    path.unlink() if content is None else path.write_bytes(content)
    said = ask(tmp_path).stdout
    assert re.search(rf"{path.name} is [^\n]*\. Sizes go by config\.json\.", said)
    assert "moeserve serve MODEL: fits" in said


def test_weights_that_do_not_fit_the_configuration_are_one_sentence(tmp_path: Path, machine: None) -> None:
    save("mixtral", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 32}))
    result = ask(tmp_path)
    assert result.exit_code == 1
    assert "but the configuration says" in result.stderr


def test_gpus_that_are_elsewhere_are_planned_by_their_table(qwen3: Path) -> None:
    options = ("--device", "cuda", "--gpus", "8xh100-80g", "--expert-parallel-size", "8", "--memory", "1TiB")
    said = ask(qwen3, *options).output
    assert said.count("GPU         H100-80G") == 8
    assert "moeserve serve MODEL --device cuda --expert-parallel-size 8: fits" in said
    assert "moeserve serve MODEL: " not in said


def test_cards_are_named_by_their_memory_and_ways_to_share_a_model_are_compared(qwen3: Path) -> None:
    said = ask(qwen3, "--gpus", "4x24GB", "--pipeline-parallel-size", "4").output
    assert said.count("GPU         A10-24G") == 4
    assert "moeserve serve MODEL --device cuda --pipeline-parallel-size 4: fits" in said
    assert "On 4 ranks, each on a A10-24G, over PCIe" in said
    for flags in ("--pipeline-parallel-size 4", "--expert-parallel-size 4", "--tensor-parallel-size 4"):
        assert f"\n  {flags} " in said
    assert "For one request take --" in said
    assert "No service of several GPUs has run yet." in said


def test_gpus_that_cannot_share_the_experts_equally_are_not_told_to(qwen3: Path) -> None:
    said = ask(qwen3, "--gpus", "3x24GB").output
    assert "--expert-parallel-size 3" not in said
    said = ask(qwen3, "--gpus", "3x24GB", "--device", "cuda", "--expert-parallel-size", "3").output
    assert "128 experts cannot be shared equally among 3 ranks" in said


def test_a_dense_model_has_no_experts_to_share(tmp_path: Path, machine: None) -> None:
    save("llama", tmp_path)
    for flags in ((), ("--tensor-parallel-size", "2")):
        said = ask(tmp_path, "--device", "cpu", "--expert-parallel-size", "2", *flags).output
        assert "--expert-parallel-size 2: a llama model has no experts to share" in said


def test_ranks_that_share_layers_or_each_layer_are_planned_on_a_cpu(qwen3: Path) -> None:
    for flags in (
        ("--pipeline-parallel-size", "2"),
        ("--tensor-parallel-size", "2"),
        ("--pipeline-parallel-size", "2", "--expert-parallel-size", "2"),
    ):
        (setup,) = json.loads(ask(qwen3, "--device", "cpu", "--memory", "256GiB", *flags, "--json").stdout)["setups"]
        assert setup["obstacle"] is None
        assert tuple(setup["flags"]) == flags
    refused = ask(qwen3, "--device", "cpu", "--pipeline-parallel-size", "2", "--expert-memory", "9GiB").output
    assert all(flag in refused for flag in ("--expert-memory", "--pipeline-parallel-size"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--gpus", "4x25GB"), "NUMBERxMEMORY"),
        (("--gpus", "8xH1000"), "names are A10-24G"),
        (("--gpus", "0xL4-24G"), "is not NUMBERxNAME"),
        (("--gpus", "4xL4-24G", "--expert-parallel-size", "8"), "8 ranks need as many --gpus"),
        (("--memory", "much"), "--memory"),
    ],
)
def test_a_description_of_hardware_that_cannot_be_read_is_one_sentence(
    qwen3: Path, options: tuple[str, ...], says: str
) -> None:
    result = CliRunner().invoke(main, ["doctor", str(qwen3), *options])
    assert (result.exit_code, says in result.output) == (2, True)
