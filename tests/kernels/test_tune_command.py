"""`moeserve tune`: what it refuses, and that serving finds what it wrote."""

import json
import types
from dataclasses import replace

import pytest
import torch

import moeserve.model.gpu.kernels as expert_kernels
import moeserve.tune.experts as tune_moe
from kernels.gpu.moe import device_of, moe_experts_reference
from kernels.gpu.moe_config import MoeShape, heuristic_config
from moeserve.tune.experts import ACTIVATION, make_case
from tests.support.commands import invoke

SHAPE = MoeShape(8, 256, 128, 2, "bfloat16")
CPU = torch.device("cpu")
BF16 = torch.bfloat16


def tune(*arguments):
    return invoke("tune", *arguments)


def test_without_a_gpu_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = tune("--shape", "8,256,128,2")
    assert result.exit_code == 1
    assert result.output == "Error: There is no CUDA GPU here to measure on.\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "either a MODEL or --shape"),
        (("model", "--block-size", "24"), "24 is not a power of two"),
        (("--shape", "8,256,128,2", "--weights", "int4", "--group-size", "48"), "48"),
        (("--shape", "8,256,128,2", "--num-tokens", "1,3"), "3 is none of 1, 4"),
        (("model", "--shape", "8,256,128,2"), "either a MODEL or --shape"),
        (("--shape", "8,256"), "not like"),
        (("--shape", "8,0,128,2"), "not like"),
        (("--shape", "8,256,128,9"), "no 9 best"),
        (("--shape", "8,256,128,2", "--weights", "int3"), "int3"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, complaint):
    result = tune(*arguments)
    assert result.exit_code == 2
    assert complaint in result.output


def test_what_was_tuned_is_what_serving_uses(monkeypatch, tmp_path):
    own = heuristic_config(SHAPE, 64, device_of(CPU))
    own = replace(own, down=own.gate_up)
    platform = expert_kernels.platform_of(CPU)
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(expert_kernels, "platform_of", lambda device: platform)
    monkeypatch.setattr(tune_moe, "tune_shape", lambda *args, **options: iter([(64, tune_moe.Tuned(own, 12.5))]))
    result = tune("--shape", "8,256,128,2")
    assert result.exit_code == 0, result.output
    (path,) = (tmp_path / "tuned").iterdir()
    assert result.output == f"Wrote {path}\n"
    assert json.loads(path.read_text())["configs"]["64"]["microseconds"] == 12.5
    configs = expert_kernels.moe_configs(SHAPE, CPU)
    assert configs(50) == own != heuristic_config(SHAPE, 50, device_of(CPU))


def test_what_was_found_before_it_ended_is_kept(monkeypatch, tmp_path):
    own = heuristic_config(SHAPE, 64, device_of(CPU))
    platform = expert_kernels.platform_of(CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(expert_kernels, "platform_of", lambda device: platform)

    def tune_some(shape, all_num_tokens, device, report):
        assert all_num_tokens == (64, 1024)
        yield 64, tune_moe.Tuned(own, 12.5)
        raise RuntimeError("no candidate runs\nanywhere")

    monkeypatch.setattr(tune_moe, "tune_shape", tune_some)
    path = tmp_path / "file.json"
    result = tune("--shape", "8,256,128,2", "--num-tokens", "64,1024", "--out", str(path))
    assert result.exit_code == 1
    assert result.output == "Error: Experts cannot be tuned: no candidate runs.\n"
    assert list(json.loads(path.read_text())["configs"]) == ["64"]


@pytest.mark.parametrize(
    ("shape", "group_size", "expected"),
    [("8,256,128,2", None, 128), ("8,192,128,2", None, 64), ("8,96,128,2", None, 32), ("8,256,128,2", 32, 32)],
)
def test_groups_of_int4_are_those_of_serving(shape, group_size, expected, monkeypatch):
    tuned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("moeserve.tune.__main__._tune_experts", lambda shape, *rest: tuned.append(shape))
    options = [] if group_size is None else ["--group-size", str(group_size)]
    assert tune("--shape", shape, "--weights", "int4", *options).exit_code == 0
    assert [shape.group_size for shape in tuned] == [expected]
    sizes = {"hidden_size": 128, "moe": types.SimpleNamespace(intermediate_size=int(shape.split(",")[1]))}
    if group_size is None:
        assert expert_kernels.expert_storage(types.SimpleNamespace(**sizes), BF16, "int4").group_size == expected


def test_groups_that_do_not_divide_are_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = tune("--shape", "8,100,128,2", "--weights", "int4")
    assert result.exit_code == 1
    assert result.output == "Error: Groups of 32 do not divide 128 and 100.\n"


def test_a_file_that_cannot_be_written_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("")
    own = heuristic_config(SHAPE, 64, device_of(CPU))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(expert_kernels, "platform_of", lambda device: expert_kernels.Platform("interpreter", "3.9"))
    monkeypatch.setattr(tune_moe, "tune_shape", lambda *args, **options: iter([(64, tune_moe.Tuned(own, 12.5))]))
    result = tune("--shape", "8,256,128,2", "--out", str(tmp_path / "taken" / "file.json"))
    assert result.exit_code == 1
    assert "cannot be written" in result.output


def test_the_parts_put_together_compute_a_layer(device):
    shape = MoeShape(4, 32, 64, 2, "bfloat16")
    case = make_case(shape, 5, device)
    moe = expert_kernels.triton_moe(expert_kernels.moe_configs(shape, device), device, torch.bfloat16, 8)
    out = moe(case.x, case.expert_ids, case.expert_weights, case.experts, ACTIVATION).float()
    expected = moe_experts_reference(case.x, case.expert_ids, case.expert_weights, case.experts, ACTIVATION)
    assert (out - expected).norm() / expected.norm() < 1e-2
